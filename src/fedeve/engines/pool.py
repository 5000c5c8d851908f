"""The pool of lanes, and the one for a GPU: rows of a batch, each one client's local model, and the step of them all.

The step is captured once and replayed. Who sits in which lane is `lanes.py`'s affair; on a CPU a lane is a process of
its own, see `workers.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .. import augment, tasks
from ..data.federated import FederatedData
from ..layout import Layout
from ..local import LocalWork
from ..method import Correction
from ..seeds import Indices
from .batched import AVAILABLE
from .vectors import Vectors

WINDOW = 128  # steps of a plan that lie on the device; a longer plan is brought in pieces


def upload(values: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers from the host where `like` is; on a GPU the copy is queued, so that the host need not wait for it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else host


class OnDevice:
    """A federation's rows where the lanes are, as stored, and how a model sees them."""

    def __init__(self, data: FederatedData, dtype: torch.dtype, device: torch.device) -> None:
        arrays = (data.x, data.y, data.x_test, data.y_test)
        # A copy where the array is read-only, as what a cache maps is: PyTorch has no such tensors.
        tensors = [torch.from_numpy(a if a.flags.writeable else np.array(a)).to(device) for a in arrays]
        self.x, self.y, self.x_test, self.y_test = tensors
        self.transform = data.transform(dtype, device)

    def examples(self, index: Tensor, *, augmented: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these rows, which carry their views where they are augmented."""
        if not augmented:
            return self.transform(self.x[index]), self.y[index]
        rows, views = augment.unfolded(index)
        return self.transform(augment.seen(self.x[rows], views)), self.y[rows]


@dataclass(frozen=True)
class Task:
    """What one lane has to do: where to start, how its gradient is corrected, and which rows are its batches."""

    lane: int
    start: Tensor
    correction: Correction
    """Of this client alone: `shift` is [D] or None."""
    work: LocalWork
    plan: Indices
    """[steps, batch] rows of the data, -1 where a batch is short."""


class Progressed(NamedTuple):
    """What moving a pool did: the lanes that are done now, steps times lanes, and how many of them moved a client."""

    done: list[int]
    lane_steps: int
    client_steps: int


class Pool(Protocol):
    """Lanes that move clients: rows of a batch on a GPU, processes on a CPU."""

    width: int

    def seat(self, tasks: Sequence[Task]) -> None:
        """Begin these tasks in lanes that are free."""
        ...

    def advance(self) -> Progressed:
        """Move on until somebody is done, or nearly so."""
        ...

    def updates(self, lanes: list[int]) -> Tensor:
        """[lanes, D] end minus start."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class Batch:
    """Lanes of one model on one device: where each client stands, and the step that moves them all."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        data: OnDevice,
        work: LocalWork,
        task: str,
        width: int,
        *,
        precision: str = "float32",
        by_hand: bool | None = None,
    ) -> None:
        like = next(model.parameters())
        self.model, self.data, self.task, self.width = model, data, task, width
        self.vectors = _vectors(layout, work, width, like, precision, by_hand)
        self.augmented = work.augments
        self.plan = torch.full((width, WINDOW, work.batch), -1, dtype=torch.int64, device=like.device)
        self.cursor = torch.zeros(width, dtype=torch.int64, device=like.device)
        self.end = torch.zeros(width, dtype=torch.int64, device=like.device)
        self.numbers = torch.arange(width, device=like.device)
        self.gradients = torch.func.vmap(torch.func.grad(self._loss))
        self._replay: Callable[[], None] | None = None
        self._plans: dict[int, Indices] = {}
        self._left: dict[int, int] = {}
        """Steps of the piece that lies on the device, in the lanes that are taken."""

    def seat(self, tasks: Sequence[Task]) -> None:
        """Put clients at their start; those of one run stand together in `tasks`."""
        if not tasks:
            return
        at = upload([task.lane for task in tasks], self.plan)
        first = 0
        for _, group in groupby(tasks, key=lambda task: id(task.start)):
            some = list(group)
            here, first = at[first : first + len(some)], first + len(some)
            shifts = [task.correction.shift for task in some if task.correction.shift is not None]
            self.vectors.begin(here, some[0].start, torch.stack(shifts) if shifts else None)
        numbers = [(task.work.lr, float(task.correction.prox), task.correction.shift is not None) for task in tasks]
        values = upload(numbers, self.vectors.lr, torch.float64)
        self.vectors.set(at, *values.to(self.vectors.lr.dtype).unbind(-1))
        self._plans |= {task.lane: task.plan for task in tasks}
        self._bring([task.lane for task in tasks], at)

    def _bring(self, lanes: list[int], at: Tensor) -> None:
        """Load the next piece of these lanes' plans."""
        pieces = [self._plans[lane][:WINDOW] for lane in lanes]
        lengths = [len(piece) for piece in pieces]
        block = np.full((len(lanes), max(lengths), self.plan.shape[-1]), -1, dtype=np.int64)
        for row, lane, piece in zip(block, lanes, pieces, strict=True):
            row[: len(piece)] = piece
            self._plans[lane] = self._plans[lane][WINDOW:]
            self._left[lane] = len(piece)
        self.plan[at, : block.shape[1]] = upload(block, self.plan)
        self.cursor[at] = 0
        self.end[at] = upload(lengths, self.plan)

    def advance(self) -> Progressed:
        """As many steps as every lane at work has left; nothing here waits for the device."""
        if not self._left:
            return Progressed([], 0, 0)
        num_steps, busy = min(self._left.values()), len(self._left)
        if self._replay is None:
            self._replay = self._prepare()
        for _ in range(num_steps):
            self._replay()
        self._left = {lane: left - num_steps for lane, left in self._left.items()}
        ready = [lane for lane, left in self._left.items() if not left]
        more = [lane for lane in ready if len(self._plans[lane])]
        if more:
            self._bring(more, upload(more, self.plan))
        done = [lane for lane in ready if not self._left[lane]]
        for lane in done:
            del self._left[lane]
        return Progressed(done, num_steps * self.width, num_steps * busy)

    def updates(self, lanes: list[int]) -> Tensor:
        """[lanes, D] end minus start."""
        return self.vectors.updates(upload(lanes, self.plan))

    def close(self) -> None:
        """Nothing to give back: the allocator has it."""

    def _loss(self, named: dict[str, Tensor], x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        outputs = torch.func.functional_call(self.model, named, (x,))
        # What a short batch lacks is there as some row, and counts nothing.
        return (tasks.losses(self.task, outputs, y) * counts).sum() / counts.sum().clamp(min=1)

    @torch.no_grad()
    def _step(self) -> None:
        active = torch.lt(self.cursor, self.end, out=self.vectors.at_work)
        index = self.plan[self.numbers, self.cursor.clamp(max=WINDOW - 1)]
        counts = ((index >= 0) & active[:, None]).to(self.vectors.lr.dtype)
        x, y = self.data.examples(index.clamp(min=0), augmented=self.augmented)
        self.vectors.step(lambda named: self.gradients(named, x, y, counts))
        self.cursor += active

    def _prepare(self) -> Callable[[], None]:
        """The step, tried where it moves nobody; on a GPU as one CUDA graph: its hundreds of kernels start at once."""
        end = self.end.clone()
        self.end.zero_()
        if self.plan.device.type != "cuda":
            self._step()
            self.end.copy_(end)
            return self._step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = captured(self._step)
        self.end.copy_(end)
        return graph.replay


def _vectors(
    layout: Layout, work: LocalWork, width: int, like: Tensor, precision: str, by_hand: bool | None
) -> Vectors:
    """With our kernels on a GPU, where they are for such numbers."""
    if not (AVAILABLE and like.dtype == torch.float32 and (like.is_cuda if by_hand is None else by_hand)):
        return Vectors(layout, work, width, like=like)
    from .by_hand import ByHand

    return ByHand(layout, work, width, like=like, precision=precision)


def captured(function: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What a function queues, as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # an older graph that is freed during the capture would spoil it
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            function()
    finally:
        gc.enable()
    return graph


def bytes_per_lane(model: nn.Module, layout: Layout, data: OnDevice, work: LocalWork) -> int:
    """What a lane takes, about: its vectors, and what the backward pass keeps of a batch and makes of it."""
    vector = layout.num_params * next(model.parameters()).element_size()
    return 10 * vector + 3 * bytes_kept(model, data, work.batch)


def bytes_kept(model: nn.Module, data: OnDevice, batch: int) -> int:
    """What a backward pass would keep of so many rows."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    rows = torch.arange(batch, device=next(model.parameters()).device) % max(1, len(data.y))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(data.transform(data.x[rows]))
    return kept
