"""The lane engine: continuous batching of clients. A fixed pool of lanes on one device, refilled as clients finish.

Each lane holds one client's local model and walks through its batches. A lane that is done takes the next waiting
client of any run, so ragged clients leave no lane idle, and a run waits only for its own cohort. The reference engine
is its specification: both follow the same plan of batches.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import augment, local, tasks
from ..data.federated import FederatedData
from ..errors import FedeveError, Words
from ..layout import Layout
from ..local import LocalWork
from ..memory import Memory, free_on
from ..method import Correction
from ..run import DTYPES, Run
from ..seeds import Indices
from ..store import Position
from .batched import AVAILABLE, Batched
from .blame import blame
from .pool import Batch, OnDevice, Pool, Task, bytes_kept, bytes_per_lane, upload
from .profile import Profile
from .reference import Examples, gradient, refuse_misfit
from .seat import Part, Seat
from .server import Server
from .turn import Turn
from .width import useful
from .workers import Inline, Workers

MOST_LANES = 512  # more of them do not make a GPU faster
_EVALUATION_BATCH = 4096  # rows of the test set at once, on a CPU
_EVALUATION_BYTES = 8 * 2**30  # what a backward pass would keep of them, on a GPU
_SHARE = 0.6  # of the free memory, what lanes may take


class Lanes:
    """Plays runs that share model, examples and local work in one pool; others get a pool of their own.

    `width` is how many lanes: rows of a batch on a GPU, processes on a CPU (or rows there too, where `batched`).
    """

    name = "lanes"

    def __init__(
        self,
        runs: list[Run],
        device: torch.device,
        *,
        width: int | None = None,
        precision: str = "float32",
        batched: bool | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.runs, self.device, self.width, self.precision = runs, device, width, precision
        self.batched = device.type == "cuda" if batched is None else batched
        self.models: list[nn.Module] = []
        for number, run in enumerate(runs):
            with blame(number):
                model = run.build_model().to(device)
                refuse_misfit(model, run.data, DTYPES[run.dtype], device)
                _refuse_random(model)
                self.models.append(model)
        self.layouts = [Layout.of(model) for model in self.models]
        pairs = zip(self.models, self.layouts, strict=True)
        self.starts = [layout.flatten(dict(model.named_parameters())) for model, layout in pairs]
        self.alike = _alike(runs)
        self.datas: dict[Any, OnDevice] = {}
        self.at_once: dict[Any, int] = {}
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.profile, self.timed = profile or Profile(), profile is not None

    def data(self, run: Run) -> OnDevice:
        """A run's examples on the device, there once for all runs that share them."""
        data = self.alike[id(run.data)]
        key = (id(data), run.dtype)
        if key not in self.datas:
            self.datas[key] = OnDevice(data, DTYPES[run.dtype], self.device)
        return self.datas[key]

    def play(self, positions: list[Position], memories: list[Memory]) -> Iterator[tuple[int, Turn]]:
        """The rounds that are left, as their cohorts are done."""
        begun = time.perf_counter()
        try:
            yield from self._groups(positions, memories)
        finally:
            self.profile.seconds += time.perf_counter() - begun

    def _groups(self, positions: list[Position], memories: list[Memory]) -> Iterator[tuple[int, Turn]]:
        groups: dict[Any, list[int]] = {}
        for number, run in enumerate(self.runs):
            if positions[number].num_rounds < run.rounds:
                groups.setdefault(self._shared(run), []).append(number)
        for numbers in groups.values():
            at = {number: positions[number] for number in numbers}
            width = self._planned(numbers)
            while at:
                try:
                    yield from self._play(at, memories, width)
                except RuntimeError as error:
                    if not _is_lack_of_memory(error) or width == 1:
                        raise
                    width //= 2
                    warnings.warn(f"out of memory; going on with {width} lanes", stacklevel=2)
                    if self.device.type == "cuda":
                        torch.cuda.empty_cache()

    def _planned(self, numbers: list[int]) -> int:
        """How many lanes: no more than are of use, than the memory has room for, than make sense."""
        if self.width is not None:
            return self.width
        run, runs = self.runs[numbers[0]], [self.runs[number] for number in numbers]
        if not self.batched:
            clients = sum(run.cohort for run in runs)
            return min(clients, len(os.sched_getaffinity(0))) if hasattr(os, "fork") else 1
        size = bytes_per_lane(self.models[numbers[0]], self.layouts[numbers[0]], self.data(run), run.local)
        return max(1, min(useful(runs), MOST_LANES, int(_SHARE * free_on(self.device)) // size))

    def _shared(self, run: Run) -> Any:
        """What runs must have in common to share a pool: examples, however dealt, model and the kind of local work."""
        work = dataclasses.replace(run.local, lr=1.0, epochs=1, steps=None)
        model = run.model if isinstance(run.model, str) else id(run.model)
        return model, repr(sorted(run.model_options.items())), id(self.alike[id(run.data)]), run.dtype, work

    def _pool(self, number: int, width: int) -> Pool:
        run, model, layout = self.runs[number], self.models[number].train(), self.layouts[number]
        if self.batched:
            data = self.data(run)
            return Batch(model, layout, data, run.local, run.data.task, width, precision=self.precision)
        trainer = Trainer(run, model, layout)
        if width == 1 or torch.cuda.is_initialized():  # who has used a GPU cannot fork others that take gradients
            return Inline(trainer)
        return Workers(trainer, layout, DTYPES[run.dtype], width)

    def _play(self, at: dict[int, Position], memories: list[Memory], width: int) -> Iterator[tuple[int, Turn]]:
        """Play these runs in one pool; `at` follows them, and who has ended leaves it."""
        server = Server(self.device)
        pool = self._pool(next(iter(at)), width)
        lanes: dict[int, tuple[Seat, Part, int]] = {}
        seats = []
        try:
            for number, where in at.items():
                with blame(number):
                    seats.append(Seat(number, self.runs[number], where, memories[number], server, width))
            while seats:
                done = [seat for seat in seats if seat.is_done]
                aside = self._aside()
                self._fill(pool, lanes, seats)
                moved = None
                if lanes:
                    with self._stage("training"):
                        moved = pool.advance()
                with aside:
                    for seat in done:
                        with blame(seat.number):
                            with self._stage("server"):
                                seat.begin_step()
                            seat.begin_evaluation(self._evaluator(seat.number))
                for seat in seats:
                    with blame(seat.number):
                        seat.look_ahead()
                for seat in done:
                    with blame(seat.number):
                        turn = seat.end(self._evaluator(seat.number))
                    at[seat.number] = Position(turn.num_rounds, turn.state)
                    yield seat.number, turn
                    if turn.num_rounds == seat.run.rounds:
                        seats.remove(seat)
                        del at[seat.number]
                    else:
                        with blame(seat.number):
                            seat.open_round()
                if moved is not None:
                    self.profile.lane_steps += moved.lane_steps
                    self.profile.client_steps += moved.client_steps
                    _collect(pool, lanes, moved.done)
        finally:
            pool.close()

    def _fill(self, pool: Pool, lanes: dict[int, tuple[Seat, Part, int]], seats: list[Seat]) -> None:
        """Seat waiting clients in free lanes: of the least advanced runs first, each run's largest first.

        A run's clients stay together, so that some runs are done while others train and no server is awaited.
        """
        free = iter([lane for lane in range(pool.width) if lane not in lanes])
        fresh = []
        for seat in sorted(seats, key=lambda seat: seat.num_rounds):
            while seat.waiting and (lane := next(free, None)) is not None:
                with blame(seat.number):
                    part, place, plan = seat.take()
                    fresh.append(Task(lane, part.sent.params, part.correction_of(place), part.run.local, plan))
                lanes[lane] = (seat, part, place)
        pool.seat(fresh)

    def _aside(self) -> Any:
        """A stream beside the lanes', from where they stand now: servers step while the next clients train."""
        if self.side is None:
            return nullcontext()
        self.side.wait_event(torch.cuda.current_stream().record_event())
        return torch.cuda.stream(self.side)

    def _stage(self, name: str) -> Any:
        return self.profile.stage(name, self.device) if self.timed else nullcontext()

    def _evaluator(self, number: int) -> Any:
        return lambda params: self.evaluate(number, params)

    @torch.no_grad()
    def evaluate(self, number: int, params: Tensor) -> dict[str, Tensor]:
        """The task's metrics on the whole test set, on their way."""
        data, model = self.data(self.runs[number]), self.models[number].eval()
        if not len(data.y_test):
            return {}
        with self._stage("evaluation"):
            parts = data.x_test.split(self._evaluated_at_once(number))
            outputs = [self._answers(model, self.layouts[number], params, data.transform(x)) for x in parts]
            judged = tasks.metrics(self.runs[number].data.task, torch.cat(outputs), data.y_test)
        model.train()
        return judged

    def _answers(self, model: nn.Module, layout: Layout, params: Tensor, x: Tensor) -> Tensor:
        """What a model says; as one lane where our layers are faster: in bfloat16, and with few channels."""
        by_hand = AVAILABLE and x.is_cuda and params.dtype == torch.float32
        if not by_hand or not (self.precision == "bf16" or _has_few_channels(model)):
            return torch.func.functional_call(model, layout.unflatten(params), (x,))
        with Batched(self.precision):
            lane = torch.func.vmap(lambda p, x: torch.func.functional_call(model, layout.unflatten(p), (x,)))
            return lane(params[None], x[None])[0]

    def _evaluated_at_once(self, number: int) -> int:
        """Rows of the test set, on a GPU as many as fill it: a function of the model, since last bits depend on it."""
        if self.device.type != "cuda":
            return _EVALUATION_BATCH
        run = self.runs[number]
        key = self._shared(run)
        if key not in self.at_once:
            fits = _EVALUATION_BYTES // max(1, bytes_kept(self.models[number], self.data(run), 16) // 16)
            parts = -(-len(run.data.y_test) // max(256, min(65536, fits)))
            self.at_once[key] = -(-len(run.data.y_test) // parts)  # all of one size, about
        return self.at_once[key]


class Trainer:
    """Trains one client after another, in a process of its own: the reference engine's steps on a plan of rows."""

    def __init__(self, run: Run, model: nn.Module, layout: Layout) -> None:
        self.data, self.dtype, self.model, self.layout = run.data, DTYPES[run.dtype], model, layout

    def __call__(self, start: Tensor, correction: Correction, work: LocalWork, plan: Indices) -> Tensor:
        """Where a client ends."""
        self.model.train()
        if local.is_plain(work):
            return self._descend(start, correction, work.lr, self._batches(work, plan))
        walk = local.begin(work, start)
        for x, y in self._batches(work, plan):
            grad = gradient(self.model, self.layout, self.data.task, walk.params, x, y)
            walk = local.advance(work, walk, grad, start=start, correction=correction)
        return walk.params

    def _batches(self, work: LocalWork, plan: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        plan, views = augment.unfolded(plan) if work.augments else (plan, plan)
        rows = np.unique(plan[plan >= 0])
        mine = Examples(self.data, rows, self.dtype, torch.device("cpu"), augmented=work.augments)
        for batch, seen in zip(plan, views, strict=True):
            there = batch >= 0
            yield mine.batch(np.searchsorted(rows, batch[there]), seen[there])

    def _descend(
        self, start: Tensor, correction: Correction, lr: float, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Plain SGD on the module's own parameters, in place: as `local.advance`, without a copy at every step."""
        named = dict(self.model.named_parameters())
        params: list[Tensor] = [named[name] for name in self.layout.names]
        begun = list(self.layout.unflatten(start).values())
        prox, shift = correction
        shifts = None if shift is None else list(self.layout.unflatten(shift).values())
        with torch.no_grad():
            torch._foreach_copy_(params, begun)
        for x, y in batches:
            grads = torch.autograd.grad(tasks.loss(self.data.task, self.model(x), y), params)
            with torch.no_grad():
                if prox:
                    away = [param - first for param, first in zip(params, begun, strict=True)]
                    grads = torch._foreach_add(grads, away, alpha=float(prox))
                if shifts is not None:
                    grads = torch._foreach_add(grads, shifts)
                torch._foreach_add_(params, grads, alpha=-lr)
        return self.layout.flatten(named)


def _collect(pool: Pool, lanes: dict[int, tuple[Seat, Part, int]], done: list[int]) -> None:
    """Take the updates of those who are done."""
    by_part: dict[int, list[int]] = {}
    for lane in done:
        by_part.setdefault(id(lanes[lane][1]), []).append(lane)
    order = [lane for some in by_part.values() for lane in some]
    updates, first = pool.updates(order) if order else torch.empty(0), 0
    for some in by_part.values():
        seat, part, _ = lanes[some[0]]
        places = [lanes[lane][2] for lane in some]
        rows, first = updates[first : first + len(some)], first + len(some)
        if places == list(range(len(part.clients))):
            part.updates = rows
        else:
            part.updates[upload(places, part.updates)] = rows
        for lane in some:
            del lanes[lane]
        with blame(seat.number):
            seat.arrived(part, len(some))


def _is_lack_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _has_few_channels(model: nn.Module) -> bool:
    """Whether every convolution of a model is one of `narrow.py`'s."""
    from .narrow import MOST_CHANNELS

    outputs = [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    return bool(outputs) and max(outputs) <= MOST_CHANNELS


def has_random_layers(model: nn.Module) -> bool:
    """Whether a model draws random numbers in training, which lanes cannot do yet."""
    return any(_is_random(layer) for layer in model.modules())


def _is_random(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0


def _refuse_random(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if _is_random(layer):
            found = Words(f"{type(layer).__name__} at {name!r}")
            raise FedeveError("lanes have no random layers yet", got=found, do="use engine='reference'")


def _alike(runs: list[Run]) -> dict[int, FederatedData]:
    """By the id of every run's data the first of them all that has the same examples."""
    firsts: list[FederatedData] = []
    found: dict[int, FederatedData] = {}
    for data in {id(run.data): run.data for run in runs}.values():
        found[id(data)] = next((first for first in firsts if data.has_examples_of(first)), data)
        if found[id(data)] is data:
            firsts.append(data)
    return found
