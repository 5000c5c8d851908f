"""Which node has which number, and who is in a cohort: a function of the seed and the round, as in simulations."""

from __future__ import annotations

import time
from logging import INFO, WARNING, getLogger

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from .. import seeds

QUESTION = "partition"
"""The action under which a client is asked for its partition-id."""
log = getLogger("flwr")
_PATIENCE, _BRIEFLY = 600.0, 10.0  # seconds to say which partition a node holds, when it is new and when asked again


class Nodes:
    """The nodes online now, by number. Flower draws node ids at random; numbers stay the same from run to run."""

    def __init__(self, how: str, seed: int) -> None:
        self.how, self.seed = how, seed
        self._numbers: dict[int, int] = {}  # of every node seen so far
        self._seen: dict[int, str] = {}  # when each registered
        self._said: dict[int, int | None] = {}  # the partition each says it holds, where nodes are asked
        self._silent: set[int] = set()  # who was asked and did not answer
        self._refused: set[int] = set()  # whose partition another has
        self._online: list[int] = []

    def __len__(self) -> int:
        return len(self._online)

    def number(self, node: int) -> int:
        return self._numbers.get(node, -1)

    def wait(self, grid: Grid, least: int) -> None:
        """Until `least` nodes are online and have numbers."""
        told = -1
        while True:
            self.look(grid)
            if len(self) >= least:
                return
            if told != len(self):
                log.log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", len(self), least)
                told = len(self)
            time.sleep(0.5)

    def look(self, grid: Grid) -> None:
        """Who is online; nodes not seen before get a number."""
        infos = {info.node_id: info.registered_at for info in grid.get_nodes()}
        if self.how == "ask":
            self._ask(grid, [node for node in infos if node not in self._said])
            self._number(set(infos))
        else:
            # Ranked among all that were ever seen, so that who connects first changes nothing.
            self._seen |= infos
            ranked = sorted(self._seen, key=lambda node: (self._seen[node], node))
            self._numbers = {node: place for place, node in enumerate(ranked)}
        self._online = sorted((node for node in infos if node in self._numbers), key=self._numbers.__getitem__)

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        """Which partitions these hold. Who does not answer is asked again at the next look."""
        new = [node for node in nodes if node not in self._silent]
        self._said |= _answers(grid, new, timeout=_PATIENCE)
        self._said |= _answers(grid, [node for node in nodes if node in self._silent], timeout=_BRIEFLY)
        self._silent = {node for node in nodes if node not in self._said}
        for node in new:
            if self._said.get(node) is None:
                log.log(WARNING, "node %d is not used: it does not say which partition it holds", node)

    def _number(self, online: set[int]) -> None:
        """A partition is its holder's as long as that is online, and then another's that says it holds it."""
        holders = {number: node for node, number in self._numbers.items() if node in online}
        refused = set()
        for node in sorted(online & self._said.keys()):
            number = self._said[node]
            if number is not None and holders.setdefault(number, node) != node:
                refused.add(node)
                if node not in self._refused:
                    log.log(WARNING, "node %d is not used: node %d holds partition %d", node, holders[number], number)
        self._numbers, self._refused = {node: number for number, node in holders.items()}, refused

    def cohort(self, size: int, server_round: int) -> list[int]:
        """The nodes that train in a round, in the order drawn. Flower counts rounds from 1, `seeds` from 0."""
        by_number = {self._numbers[node]: node for node in self._online}
        population = np.array(sorted(by_number), dtype=np.int64)
        drawn = seeds.cohort(population, size, seed=self.seed, round=server_round - 1)
        return [by_number[number] for number in drawn.tolist()]

    def evaluators(self, size: int, server_round: int) -> list[int]:
        """The nodes that evaluate after a round."""
        drawn = seeds.generator(self.seed, server_round, "evaluators").choice(len(self), size=size, replace=False)
        return [self._online[place] for place in sorted(drawn.tolist())]


def share_of(num_nodes: int, fraction: float, least: int) -> int:
    """How many nodes a fraction is, as Flower counts: rounded down, but no fewer than `least`."""
    return max(int(num_nodes * fraction), least)


def _answers(grid: Grid, nodes: list[int], *, timeout: float) -> dict[int, int | None]:
    """The partition ids of nodes whose clients answer with `say_partition`; None of those that answer otherwise."""
    kind = f"{MessageType.QUERY}.{QUESTION}"
    questions = [Message(content=RecordDict(), message_type=kind, dst_node_id=node) for node in nodes]
    found: dict[int, int | None] = {}
    for reply in grid.send_and_receive(questions, timeout=timeout) if questions else ():
        if not reply.has_error():
            record = reply.content.config_records.get(QUESTION)
            answer = None if record is None else record.get("partition-id")
            found[reply.metadata.src_node_id] = answer if isinstance(answer, int) else None
    return found
