"""A Grid of Flower's in this process: messages go to functions, replies come back in whatever order a test wants."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# Flower's runtime says which run and node a process is before an app makes messages.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

Answer = Callable[[Message, int], Message | None]


class LocalGrid(Grid):
    """`answer(message, partition)` makes a reply, or None for a node that never answers.

    With `late`, replies arrive in an order drawn from that seed, one with every look; `alive` and `most_alive` count
    the replies that somebody still holds.
    """

    def __init__(self, answer: Answer, num_nodes: int, *, late: int | None = None, ids: int = 0) -> None:
        rng = np.random.default_rng([ids, 1])
        self.ids = sorted({int(n) for n in rng.integers(2, 2**62, size=num_nodes)})
        rng.shuffle(self.ids)  # node k has partition k; ids say nothing
        self.answer, self.rng = answer, None if late is None else np.random.default_rng(late)
        self.waiting: dict[str, Message] = {}
        self.there: set[str] = set()
        self.alive = self.most_alive = 0
        self.asked: list[list[int]] = []

    def get_nodes(self) -> Iterable[NodeInfo]:
        infos = [NodeInfo(node_id=n, registered_at=f"2026-01-01T00:00:{k:06d}") for k, n in enumerate(self.ids)]
        return infos[::-1]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        self.asked.append([self.ids.index(m.metadata.dst_node_id) for m in sent])
        for message in sent:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self.waiting[message.metadata.message_id] = message
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self.rng is None:
            self.there = set(self.waiting)
        elif left := sorted(set(self.waiting) - self.there):
            self.there.add(left[self.rng.integers(len(left))])
        found = []
        for name in [n for n in message_ids if n in self.there]:
            message = self.waiting[name]
            reply = self.answer(message, self.ids.index(message.metadata.dst_node_id))
            if reply is not None:
                del self.waiting[name]
                self.there.discard(name)
                self.alive += 1
                self.most_alive = max(self.most_alive, self.alive)
                weakref.finalize(reply, self._gone)
                found.append(reply)
        return found

    def _gone(self) -> None:
        self.alive -= 1

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        names = list(self.push_messages(messages))
        replies = list(self.pull_messages(names))
        for _ in itertools.takewhile(lambda _: self.rng is not None and self.waiting, range(10 * len(names))):
            replies += self.pull_messages(names)
        return replies

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def clients(app: ClientApp, num_nodes: int, *, contexts: dict[int, Context] | None = None, **config: Any) -> Answer:
    """Answers of a ClientApp, with a context for every node that lasts as long as the function."""
    kept: dict[int, Context] = {} if contexts is None else contexts

    def answer(message: Message, partition: int) -> Message:
        if partition not in kept:
            node = {"partition-id": partition, "num-partitions": num_nodes}
            node |= {key: str(value).format(partition) for key, value in config.items()}
            kept[partition] = Context(
                run_id=1, node_id=message.metadata.dst_node_id, node_config=node, state=RecordDict(), run_config={}
            )
        return app(message, kept[partition])

    return answer


def replying(
    make: Callable[[int, dict[str, np.ndarray]], dict[str, np.ndarray]], weight: Callable[[int], Any]
) -> Answer:
    """Clients that know nothing of fedeve: `make(partition, arrays)` are the arrays they send back."""

    def answer(message: Message, partition: int) -> Message:
        received = {name: array.numpy() for name, array in message.content["arrays"].items()}
        arrays = ArrayRecord({name: _array(value) for name, value in make(partition, received).items()})
        metrics = MetricRecord({"num-examples": weight(partition), "loss": float(partition)})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return answer


def _array(value: np.ndarray) -> Any:
    from flwr.app import Array

    return Array(np.asarray(value))
