"""A run in the pool: the round it is in, and who of its cohort waits, works or is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import augment, local
from ..memory import Memory
from ..method import Correction, Sent, Vectors
from ..run import Run
from ..seeds import Indices
from ..store import Position
from ..summary import Summary
from .pool import upload
from .server import Outcome, Replies, Server, finish
from .turn import Turn

CHUNK = 64  # clients summarised at once, in cohort order, whoever of them is done first

Evaluate = Callable[[Tensor], dict[str, Tensor]]


class Part:
    """Up to CHUNK clients of one cohort, who are summarised together once all of them are done."""

    def __init__(self, run: Run, clients: list[int], sizes: list[int], sent: Sent, memory: dict[str, Tensor]) -> None:
        self.run, self.clients, self.sizes, self.sent, self.memory = run, clients, sizes, sent, memory
        self.correction = run.method.correction(sent, memory)
        self.updates = sent.params.new_zeros(len(clients), sent.params.shape[-1])
        for place, size in enumerate(sizes):
            if not size:  # it ends where it began: zero, or not a number where the model is not finite
                torch.sub(sent.params, sent.params, out=self.updates[place])
        self.num_steps = [0] * len(clients)
        self.missing = len(clients)

    def correction_of(self, place: int) -> Correction:
        """One client's correction."""
        prox, shift = self.correction
        return Correction(prox, None if shift is None else shift if shift.ndim == 1 else shift[place])

    def replies(self) -> Replies:
        """What all of them sent."""
        numbers = upload([self.sizes, self.num_steps], self.updates, torch.float64)
        return Replies(self.updates, numbers[0], numbers[1].to(self.updates.dtype), self.memory)

    def summary(self, extras: Vectors, good: list[int]) -> Summary:
        """The summary of those at these places."""
        weights = upload([self.sizes[place] for place in good], self.updates, torch.float64)
        chosen = {name: vectors[good] for name, vectors in extras.items()}
        return Summary.of(self.updates[good], weights, chosen, trusted=True)


class Told(NamedTuple):
    """Numbers on their way from the device, without anybody waiting for them."""

    values: Tensor
    arrived: Any

    @classmethod
    def of(cls, values: list[Tensor]) -> Told:
        packed = torch.cat([value.detach().double().reshape(-1) for value in values])
        if not packed.is_cuda:
            return cls(packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(host, arrived)

    def read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


class Foreseen(NamedTuple):
    """The next round as far as it is a function of the seed: who has which rows, and the first clients' batches."""

    round: int
    rows: dict[int, Indices]
    """Of those who answer, in cohort order."""
    plans: dict[int, Indices]


class Seat:
    """Plays a run's rounds: `open_round`, `take` until nobody waits, `begin_step`, `begin_evaluation`, `end`."""

    def __init__(self, number: int, run: Run, position: Position, memory: Memory, server: Server, most: int) -> None:
        self.number, self.run, self.memory, self.server = number, run, memory, server
        self.most_parts = -(-most // CHUNK) + 1  # that may be open: enough for all lanes, however large the cohort
        self.state, self.num_rounds = position.state, position.num_rounds
        self.method = run.server
        self.sent = self.method.send(self.state)
        self.foreseen: Foreseen | None = None
        self.open_round()

    def look_ahead(self) -> None:
        """Prepare the next round once nobody waits in this one; worth doing while the device is busy."""
        if not self.waiting and not self.unopened and self.num_rounds + 1 < self.run.rounds:
            self._foresee(self.num_rounds + 1)

    def _foresee(self, num_rounds: int) -> Foreseen:
        if self.foreseen is None or self.foreseen.round != num_rounds:
            silent = self.run.silent_in(num_rounds)
            rows = {client: mine for client, mine in self.run.dealt(num_rounds).items() if client not in silent}
            plans = {client: self._plan(num_rounds, client, rows[client]) for client in islice(rows, CHUNK)}
            self.foreseen = Foreseen(num_rounds, rows, plans)
        return self.foreseen

    def _plan(self, num_rounds: int, client: int, rows: Indices) -> Indices:
        stream = {"seed": self.run.seed, "round": num_rounds, "client": client}
        plan = local.plan(self.run.local, len(rows), **stream)
        if not len(rows):
            return plan
        index = rows[plan]
        if self.run.local.augments:
            index = augment.folded(index, local.views(self.run.local, plan, **stream))
        return np.where(plan >= 0, index, -1)

    def open_round(self) -> None:
        """Begin the next round with the state as it is."""
        _, self.rows, self.plans = self._foresee(self.num_rounds)
        clients = list(self.rows)
        self.unopened = deque(clients[first : first + CHUNK] for first in range(0, len(clients), CHUNK))
        self.in_parts = len(self.unopened) > 1
        self.parts: deque[Part] = deque()
        self.waiting: deque[tuple[Part, int]] = deque()
        self.folded: Summary | None = None
        self.answered, self.num_steps = 0, 0
        self.left_out: list[int] = []
        self.writes: dict[int, Vectors] = {}
        self._open_parts()

    def _open_parts(self) -> None:
        while self.unopened and not self.waiting and len(self.parts) < self.most_parts:
            clients = self.unopened.popleft()
            sizes = [len(self.rows[client]) for client in clients]
            part = Part(self.run, clients, sizes, self.sent, self.memory.gather(clients))
            part.missing -= sizes.count(0)
            self.parts.append(part)
            longest_first = sorted(range(len(sizes)), key=lambda place: -sizes[place])  # a round waits for the longest
            self.waiting.extend((part, place) for place in longest_first if sizes[place])
            self._fold()

    def take(self) -> tuple[Part, int, Indices]:
        """The next client who waits, the largest of its part, and its batches."""
        part, place = self.waiting.popleft()
        client = part.clients[place]
        plan = self.plans.get(client)
        if plan is None:
            plan = self._plan(self.num_rounds, client, self.rows[client])
        part.num_steps[place] = len(plan)
        self._open_parts()
        return part, place, plan

    def arrived(self, part: Part, count: int) -> None:
        """So many more clients of a part are done."""
        part.missing -= count
        self._fold()
        self._open_parts()

    def _fold(self) -> None:
        """A cohort of many parts is summarised as they are done, in their order, so that memory stays flat."""
        while self.in_parts and self.parts and not self.parts[0].missing:
            part = self.parts.popleft()
            extras, remember, finite = finish(self.method, part.sent, part.replies(), self.run.local.lr)
            good = [place for place, fine in enumerate(finite.tolist()) if fine]
            if good:
                summary = part.summary(extras, good)
                self.folded = summary if self.folded is None else self.folded.merge(summary)
            self._note(part, good, remember)

    def _note(self, part: Part, good: list[int], remember: Vectors) -> None:
        fine = set(good)
        self.left_out += [client for place, client in enumerate(part.clients) if place not in fine]
        self.answered += len(good)
        self.num_steps += sum(part.num_steps)
        self.writes |= {part.clients[p]: {name: rows[p] for name, rows in remember.items()} for p in good}

    @property
    def is_done(self) -> bool:
        """Whether everybody in the cohort has answered."""
        return not self.waiting and not self.unopened and not any(part.missing for part in self.parts)

    def begin_step(self) -> None:
        """Queue the server's step, as if every reply were finite; nothing here waits."""
        self.outcome: Outcome | None = None
        part = self.parts[0] if self.parts else None
        if part is not None and any(part.sizes):
            self.outcome = self.server.close(self.method, self.state, part.replies(), self.run.local.lr)
        elif self.folded is not None:
            self.outcome = self._step(self.folded)

    def begin_evaluation(self, evaluate: Evaluate) -> None:
        """Queue the evaluation, where one is due, and send what there is to tell on its way."""
        state = self.state if self.outcome is None else self.outcome.state
        due = self.run.is_evaluated(self.num_rounds + 1)
        self.metrics = evaluate(state.params) if due else None
        facts = {} if self.outcome is None else self.outcome.facts
        values = [*facts.values(), *(self.metrics or {}).values()]
        if self.parts and self.outcome is not None:
            values.insert(0, self.outcome.finite)
        self.told = Told.of(values) if values else None

    def end(self, evaluate: Evaluate) -> Turn:
        """Wait for the step and tell what it did; a reply that was not finite is left out and the step done again."""
        told = [] if self.told is None else self.told.read()
        if self.parts and self.outcome is not None:
            part = self.parts[0]
            flags, told = told[: len(part.clients)], told[len(part.clients) :]
            good = [place for place, fine in enumerate(flags) if fine]
            self._note(part, good, self.outcome.remember)
            if len(good) < len(part.clients):
                told = self._again(part, good, evaluate)
        elif self.parts:  # nobody has data: no step, but whoever answers may remember
            part = self.parts[0]
            _, remember, finite = finish(self.method, part.sent, part.replies(), self.run.local.lr)
            self._note(part, [place for place, fine in enumerate(finite.tolist()) if fine], remember)
        facts = None
        if self.outcome is not None:
            self.state, self.sent = self.outcome.state, self.outcome.sent
            names = list(self.outcome.facts)
            facts, told = dict(zip(names, told, strict=False)), told[len(names) :]
        metrics = None if self.metrics is None else dict(zip(self.metrics, told, strict=True))
        self.num_rounds += 1
        return Turn(
            self.num_rounds, self.state, facts, self.answered, self.left_out, self.writes, metrics, self.num_steps
        )

    def _again(self, part: Part, good: list[int], evaluate: Evaluate) -> list[float]:
        """The step without those whose reply was not finite, or none where nobody else has data."""
        self.outcome = None
        if any(part.sizes[place] for place in good):
            extras, _, _ = finish(self.method, part.sent, part.replies(), self.run.local.lr)
            self.outcome = self._step(part.summary(extras, good))
        state = self.state if self.outcome is None else self.outcome.state
        facts = {} if self.outcome is None else self.outcome.facts
        if self.metrics is not None:
            self.metrics = evaluate(state.params)
        values = [*facts.values(), *(self.metrics or {}).values()]
        return Told.of(values).read() if values else []

    def _step(self, summary: Summary) -> Outcome | None:
        if not float(summary.weight):
            return None
        state, facts = self.method.step(self.state, summary)
        return Outcome(state, self.method.send(state), {}, facts, torch.empty(0))
