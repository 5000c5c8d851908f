"""Which node has which number, and who is in a cohort: a function of the seed and the round, as in simulations."""

from __future__ import annotations

import time
from collections.abc import Iterable
from logging import INFO, WARNING, getLogger

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from .. import seeds

QUESTION = "partition"
"""The action under which a client is asked for its partition-id."""
log = getLogger("flwr")
_PATIENCE = 600.0  # seconds that a node has to say which partition it holds


class Nodes:
    """The nodes online now, by number. Flower draws node ids at random; numbers stay the same from run to run."""

    def __init__(self, how: str, seed: int) -> None:
        self.how, self.seed = how, seed
        self._numbers: dict[int, int] = {}  # of every node seen so far
        self._seen: dict[int, str] = {}  # when each registered
        self._asked: set[int] = set()
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
            new = [node for node in infos if node not in self._asked]
            self._numbers |= _ask(grid, new, taken=set(self._numbers.values())) if new else {}
            self._asked |= set(new)
        else:
            # Ranked among all that were ever seen, so that who connects first changes nothing.
            self._seen |= infos
            ranked = sorted(self._seen, key=lambda node: (self._seen[node], node))
            self._numbers = {node: place for place, node in enumerate(ranked)}
        self._online = sorted((node for node in infos if node in self._numbers), key=self._numbers.__getitem__)

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


def _ask(grid: Grid, nodes: Iterable[int], *, taken: set[int]) -> dict[int, int]:
    """The partition ids of nodes whose clients answer with `say_partition`; the others are named and not used."""
    kind = f"{MessageType.QUERY}.{QUESTION}"
    questions = [Message(content=RecordDict(), message_type=kind, dst_node_id=node) for node in nodes]
    found: dict[int, int] = {}
    for reply in grid.send_and_receive(questions, timeout=_PATIENCE):
        record = None if reply.has_error() else reply.content.config_records.get(QUESTION)
        answer = None if record is None else record.get("partition-id")
        if isinstance(answer, int) and answer not in taken and answer not in found.values():
            found[reply.metadata.src_node_id] = answer
    for node in nodes:
        if node not in found:
            log.log(WARNING, "node %d is not used: it does not say which partition it holds, or another has it", node)
    return found
