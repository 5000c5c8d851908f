"""The pool: lanes on one device, each holding one client's local model, and the one step that moves them all.

On a GPU the step is captured once and replayed. Who sits in which lane is `lanes.py`'s affair.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import local, tasks
from ..data.federated import FederatedData
from ..layout import Layout
from ..local import LocalWork
from ..method import Correction

WINDOW = 128  # steps of a plan that lie on the device; a longer plan is brought in pieces


def upload(values: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers from the host where `like` is; on a GPU the copy is queued, so that the host need not wait for it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else host


class OnDevice:
    """A federation's rows where the lanes are, as stored, and how a model sees them."""

    def __init__(self, data: FederatedData, dtype: torch.dtype, device: torch.device) -> None:
        self.x, self.y = torch.from_numpy(np.array(data.x)).to(device), torch.from_numpy(data.y).to(device)
        self.x_test, self.y_test = torch.from_numpy(np.array(data.x_test)).to(device), torch.from_numpy(data.y_test)
        self.y_test = self.y_test.to(device)
        self.transform = data.transform(dtype, device)


class Pool:
    """Lanes of one model on one device: where each client stands, and the step that moves them all."""

    def __init__(
        self, model: nn.Module, layout: Layout, data: OnDevice, work: LocalWork, task: str, width: int
    ) -> None:
        some = next(model.parameters())
        device, dtype, dim = some.device, some.dtype, layout.num_params
        self.model, self.layout, self.data, self.task, self.width = model, layout, data, task, width
        zeros = torch.zeros(width, dim, dtype=dtype, device=device)
        self.start, self.params, self.shift = zeros.clone(), zeros.clone(), zeros.clone()
        self.prox = torch.zeros(width, dtype=dtype, device=device)
        self.lr = torch.ones(width, dtype=dtype, device=device)
        begun = local.begin(work, zeros)
        self.first, self.second = begun.first.clone(), begun.second.clone()
        lanes_rate: Any = self.lr  # a rate for every lane, where a number is declared
        self.work = dataclasses.replace(work, lr=lanes_rate)
        self.plan = torch.full((width, WINDOW, work.batch), -1, dtype=torch.int64, device=device)
        self.cursor = torch.zeros(width, dtype=torch.int64, device=device)
        self.end = torch.zeros(width, dtype=torch.int64, device=device)
        self.num_steps = torch.zeros(width, dtype=torch.float64, device=device)
        self.numbers = torch.arange(width, device=device)
        self.gradients = torch.func.vmap(torch.func.grad(self._loss))
        self._replay: Callable[[], None] | None = None

    def seat(self, lanes: list[int], start: Tensor, correction: Correction, lr: float) -> None:
        """Put clients at their start; `correction.shift` is [clients, D] or None."""
        at = upload(lanes, self.start)
        self.start[at] = start
        self.params[at] = start
        self.shift[at] = 0.0 if correction.shift is None else correction.shift
        self.prox[at] = correction.prox
        self.lr[at] = lr
        self.num_steps[at] = 0.0
        for moment in (self.first, self.second):
            if moment.ndim:
                moment[at] = 0.0

    def load(self, lanes: list[int], plans: NDArray[np.int64], lengths: list[int]) -> None:
        """Give lanes the next piece of their plans, [lanes, WINDOW, batch] rows of the data, -1 where there is none."""
        at = upload(lanes, self.plan)
        self.plan[at] = upload(plans, self.plan)
        self.cursor[at] = 0
        self.end[at] = upload(lengths, self.plan)

    def advance(self, num_steps: int) -> None:
        """So many local steps of every lane that has as many left; the others stop at their end."""
        if self.plan.device.type == "cuda" and self._replay is None:
            self._replay = self._capture()
        for _ in range(num_steps):
            (self._replay or self._step)()

    def updates(self, lanes: list[int]) -> Tensor:
        """[lanes, D] end minus start."""
        at = upload(lanes, self.start)
        return self.params[at] - self.start[at]

    def _loss(self, params: Tensor, x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        outputs = torch.func.functional_call(self.model, self.layout.unflatten(params), (x,))
        # What a short batch lacks is there as some row, and counts nothing.
        return (tasks.losses(self.task, outputs, y) * counts).sum() / counts.sum().clamp(min=1)

    @torch.no_grad()
    def _step(self) -> None:
        active = self.cursor < self.end
        index = self.plan[self.numbers, self.cursor.clamp(max=WINDOW - 1)]
        rows = index.clamp(min=0)
        counts = ((index >= 0) & active[:, None]).to(self.params.dtype)
        grad = self.gradients(self.params, self.data.transform(self.data.x[rows]), self.data.y[rows], counts)
        walk = local.Walk(self.params, self.first, self.second, self.num_steps)
        correction = Correction(self.prox, self.shift)
        moved = local.advance(self.work, walk, grad, start=self.start, correction=correction)
        self.params.copy_(torch.where(active[:, None], moved.params, self.params))
        for moment, new in ((self.first, moved.first), (self.second, moved.second)):
            if moment.ndim:
                moment.copy_(torch.where(active[:, None], new, moment))
        self.num_steps += active
        self.cursor += active

    def _capture(self) -> Callable[[], None]:
        """The step as one CUDA graph: its hundreds of kernels start at once."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        end = self.end.clone()
        self.end.zero_()  # warming up must not move anybody
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # an older pool's graph that is freed during the capture would spoil it
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                self._step()
        finally:
            gc.enable()
        self.end.copy_(end)
        return graph.replay
