"""The lane engine: continuous batching of clients. A fixed pool of lanes on one device, refilled as clients finish.

Each lane holds one client's local model and walks through its batches; one step moves all lanes. A lane that is done
takes the next waiting client of any run, so ragged clients leave no lane idle, and a run waits only for its own cohort.
The reference engine is its specification: both follow the same plan of batches.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import local, tasks
from ..errors import FedeveError, Words
from ..layout import Layout
from ..memory import Memory
from ..method import Sent, Vectors
from ..run import DTYPES, Run
from ..seeds import Indices
from ..store import Position
from ..summary import Summary
from .pool import WINDOW, OnDevice, Pool, upload
from .reference import refuse_misfit
from .turn import Turn

CHUNK = 64  # clients summarised at once, in cohort order, whoever of them is done first
_EVALUATION_BATCH = 2000


class Part:
    """Up to CHUNK clients of one cohort, who are summarised together once all of them are done."""

    def __init__(self, clients: list[int], weights: list[float], sent: Sent, memory: dict[str, Tensor]) -> None:
        self.clients, self.weights, self.sent, self.memory = clients, weights, sent, memory
        self.updates = sent.params.new_zeros(len(clients), sent.params.shape[-1])
        self.num_steps = [0] * len(clients)
        self.missing = len(clients)

    def finish(self, run: Run) -> None:
        """Everybody is done: what else they send and remember, and whose reply is finite."""
        steps = upload(self.num_steps, self.updates, self.updates.dtype)
        self.extras, self.remember = run.method.finish(self.updates, steps, run.local.lr, self.sent, self.memory)
        self.finite = torch.stack([torch.isfinite(v).all(-1) for v in (self.updates, *self.extras.values())]).all(0)

    def summary(self, good: list[int]) -> Summary:
        """The summary of those at these places."""
        weights = upload([self.weights[place] for place in good], self.updates, torch.float64)
        if len(good) == len(self.clients):
            return Summary.of(self.updates, weights, self.extras, trusted=True)
        extras = {name: vectors[good] for name, vectors in self.extras.items()}
        return Summary.of(self.updates[good], weights, extras, trusted=True)


class Seat:
    """A run in the pool: its state, the round it is in, and who of the cohort waits, works or is done."""

    def __init__(self, number: int, run: Run, position: Position, memory: Memory) -> None:
        self.number, self.run, self.memory = number, run, memory
        self.state, self.num_rounds = position.state, position.num_rounds
        self.parts: list[Part] = []
        self.rows: dict[int, Indices] = {}
        self.waiting: deque[tuple[Part, int]] = deque()

    def open_round(self) -> None:
        """Sample the next cohort and send to it."""
        sent, silent = self.run.method.send(self.state), self.run.silent_in(self.num_rounds)
        self.rows = self.run.dealt(self.num_rounds)
        clients = [client for client in self.rows if client not in silent]
        sizes = {client: len(rows) for client, rows in self.rows.items()}
        self.parts = []
        for first in range(0, len(clients), CHUNK):
            some = clients[first : first + CHUNK]
            remembered = [self.memory.get(client) for client in some]
            memory = {name: torch.stack([m[name] for m in remembered]) for name in self.run.method.remembers}
            part = Part(some, [float(sizes[client]) for client in some], sent, memory)
            part.missing -= sum(sizes[client] == 0 for client in some)
            self.parts.append(part)
            self.waiting.extend((part, place) for place, client in enumerate(some) if sizes[client])

    @property
    def is_done(self) -> bool:
        """Whether everybody in the cohort has answered."""
        return not self.waiting and not any(part.missing for part in self.parts)

    def begin_close(self) -> None:
        """Queue the server's step, as if every reply were finite; nothing here waits for the device."""
        for part in self.parts:
            part.finish(self.run)
        self.outcome = self._step([list(range(len(part.clients))) for part in self.parts])
        facts = [value.double().reshape(1) for value in self.outcome[1].values()]
        self.told = torch.cat([*(part.finite.double() for part in self.parts), *facts]) if self.parts else None

    def end_close(self) -> Turn:
        """Wait for the step and tell what it did; a reply that was not finite is left out and the step done again."""
        told = [] if self.told is None else self.told.tolist()
        good, left_out = [], []
        for part in self.parts:
            flags, told = told[: len(part.clients)], told[len(part.clients) :]
            good.append([place for place, fine in enumerate(flags) if fine])
            left_out += [part.clients[place] for place, fine in enumerate(flags) if not fine]
        if left_out:
            self.outcome = self._step(good)
            told = [float(value) for value in self.outcome[1].values()]
        self.state, scalars, weight = self.outcome
        writes: dict[int, Vectors] = {
            part.clients[place]: {name: vectors[place] for name, vectors in part.remember.items()}
            for part, places in zip(self.parts, good, strict=True)
            for place in places
        }
        facts = dict(zip(scalars, told, strict=True)) if weight else None
        self.num_rounds += 1
        return Turn(self.num_rounds, self.state, facts, sum(map(len, good)), left_out, writes)

    def _step(self, good: list[list[int]]) -> tuple[Any, dict[str, Tensor], float]:
        """The server's step on the replies at these places of the parts, in cohort order, and their weight."""
        weight = sum(part.weights[place] for part, places in zip(self.parts, good, strict=True) for place in places)
        if not weight:
            return self.state, {}, weight
        parts = [part.summary(places) for part, places in zip(self.parts, good, strict=True) if places]
        return *self.run.server.step(self.state, Summary.merged(parts)), weight


@dataclasses.dataclass
class Client:
    """Who is in a lane: its place in its run's cohort, and what is left of its plan."""

    seat: Seat
    part: Part
    place: int
    plan: Indices
    taken: int = 0
    left: int = 0
    """Steps of the piece that lies on the device."""


class Lanes:
    """Plays runs that share model, data and local work in one pool; others get a pool of their own."""

    name = "lanes"

    def __init__(self, runs: list[Run], device: torch.device, width: int | None = None) -> None:
        self.runs, self.device, self.width = runs, device, width
        self.models = [run.build_model().to(device) for run in runs]
        self.layouts = [Layout.of(model) for model in self.models]
        for run, model in zip(runs, self.models, strict=True):
            refuse_misfit(model, run.data, DTYPES[run.dtype], device)
            _refuse_random(model)
        pairs = zip(self.models, self.layouts, strict=True)
        self.starts = [layout.flatten(dict(model.named_parameters())) for model, layout in pairs]
        self.datas: dict[tuple[int, str], OnDevice] = {}
        self.work = {"lane_steps": 0, "client_steps": 0}
        """Steps the pool took times its width, and how many of them moved a client: their ratio is the occupancy."""

    def data(self, run: Run) -> OnDevice:
        key = (id(run.data), run.dtype)
        if key not in self.datas:
            self.datas[key] = OnDevice(run.data, DTYPES[run.dtype], self.device)
        return self.datas[key]

    def play(self, positions: list[Position], memories: list[Memory]) -> Iterator[tuple[int, Turn]]:
        """The rounds that are left, as their cohorts are done."""
        groups: dict[Any, list[Seat]] = {}
        for number, run in enumerate(self.runs):
            if positions[number].num_rounds < run.rounds:
                seat = Seat(number, run, positions[number], memories[number])
                groups.setdefault(_shared(run), []).append(seat)
        for seats in groups.values():
            yield from self._play(seats)

    def _play(self, seats: list[Seat]) -> Iterator[tuple[int, Turn]]:
        number, run = seats[0].number, seats[0].run
        width = self.width or min(256, sum(seat.run.cohort for seat in seats))
        model = self.models[number].train()
        pool = Pool(model, self.layouts[number], self.data(run), run.local, run.data.task, width)
        lanes: list[Client | None] = [None] * width
        playing = deque(seats)
        for seat in seats:
            seat.open_round()
        while playing:
            done = [seat for seat in playing if seat.is_done]
            for seat in done:
                seat.begin_close()
            for seat in done:
                yield seat.number, seat.end_close()
                if seat.num_rounds == seat.run.rounds:
                    playing.remove(seat)
                else:
                    seat.open_round()
            _fill(pool, lanes, playing)
            busy = [client for client in lanes if client is not None]
            if busy:
                num_steps = min(client.left for client in busy)
                pool.advance(num_steps)
                self.work["lane_steps"] += num_steps * width
                self.work["client_steps"] += num_steps * len(busy)
                _collect(pool, lanes, num_steps)

    @torch.no_grad()
    def evaluate(self, number: int, params: Tensor) -> dict[str, float]:
        """The task's metrics on the whole test set."""
        data, model = self.data(self.runs[number]), self.models[number].eval()
        if not len(data.y_test):
            return {}
        named = self.layouts[number].unflatten(params)
        outputs = [
            torch.func.functional_call(model, named, (data.transform(x),)) for x in data.x_test.split(_EVALUATION_BATCH)
        ]
        model.train()
        judged = tasks.metrics(self.runs[number].data.task, torch.cat(outputs), data.y_test)
        return {name: float(value) for name, value in judged.items()}


def _refuse_random(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p:
            raise FedeveError(
                "lanes have no random layers yet",
                got=Words(f"{type(layer).__name__} at {name!r}"),
                do="use engine='reference'",
            )


def _shared(run: Run) -> Any:
    """What runs must have in common to share a pool: all but method, seed, rounds, cohort and the local rate."""
    work = dataclasses.replace(run.local, lr=1.0, epochs=1, steps=None)
    model = run.model if isinstance(run.model, str) else id(run.model)
    return model, repr(sorted(run.model_options.items())), id(run.data), run.dtype, work


def _fill(pool: Pool, lanes: list[Client | None], playing: deque[Seat]) -> None:
    """Seat waiting clients in free lanes, the runs taking turns, each run's in cohort order."""
    free = [number for number, client in enumerate(lanes) if client is None]
    fresh: dict[tuple[int, int], list[int]] = {}
    while free and any(seat.waiting for seat in playing):
        for seat in playing:
            if free and seat.waiting:
                part, place = seat.waiting.popleft()
                client = part.clients[place]
                rows, run = seat.rows[client], seat.run
                plan = local.plan(run.local, len(rows), seed=run.seed, round=seat.num_rounds, client=client)
                lane = free.pop(0)
                lanes[lane] = Client(seat, part, place, np.where(plan >= 0, rows[plan], -1))
                part.num_steps[place] = len(plan)
                fresh.setdefault((seat.number, id(part)), []).append(lane)
    for numbers in fresh.values():
        clients = [client for client in (lanes[number] for number in numbers) if client is not None]
        run, part = clients[0].seat.run, clients[0].part
        places = [client.place for client in clients]
        memory = {name: vectors[places] for name, vectors in part.memory.items()}
        pool.seat(numbers, part.sent.params, run.method.correction(part.sent, memory), run.local.lr)
        _bring(pool, numbers, clients)


def _bring(pool: Pool, numbers: list[int], clients: list[Client]) -> None:
    """Load the next piece of these clients' plans."""
    pieces = np.full((len(clients), *pool.plan.shape[1:]), -1, dtype=np.int64)
    for piece, client in zip(pieces, clients, strict=True):
        client.left = min(WINDOW, len(client.plan) - client.taken)
        piece[: client.left] = client.plan[client.taken : client.taken + client.left]
        client.taken += client.left
    pool.load(numbers, pieces, [client.left for client in clients])


def _collect(pool: Pool, lanes: list[Client | None], num_steps: int) -> None:
    """After so many steps: take the updates of those who are done, and bring the others' next pieces."""
    done: list[tuple[int, Client]] = []
    more: list[tuple[int, Client]] = []
    for number, client in enumerate(lanes):
        if client is not None:
            client.left -= num_steps
            if not client.left:
                (done if client.taken == len(client.plan) else more).append((number, client))
    if more:
        _bring(pool, [number for number, _ in more], [client for _, client in more])
    if done:
        updates = pool.updates([number for number, _ in done])
        for update, (number, client) in zip(updates, done, strict=True):
            client.part.updates[client.place] = update
            client.part.missing -= 1
            lanes[number] = None
