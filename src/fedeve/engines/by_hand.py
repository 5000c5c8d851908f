"""The vectors of lanes on a GPU, moved and turned by kernels of our own, and models run with hand-batched layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import Layout
from ..local import LocalWork, is_plain
from . import channels
from .batched import Batched
from .descent import Descent, Standing, adam
from .order import Order
from .vectors import Gradients, Vectors


class ByHand(Vectors):
    """As `Vectors`, of float32; in bfloat16 with a copy of the params in it, which the products read."""

    def __init__(self, layout: Layout, work: LocalWork, width: int, *, like: Tensor, precision: str) -> None:
        shapes = [torch.empty(shape, device="meta") for shape in layout.shapes]
        last = [part.ndim == 4 and channels.suits(part, precision) for part in shapes]
        self.order = Order(layout, last, like.device)
        super().__init__(layout, work, width, like=like)
        lanes = (self.lr, self.prox, self.shifted, self.at_work)
        self.standing = Standing(self.params, self.start, self.shift, *lanes)
        self.plain = is_plain(work, work.optimizer)
        self.descent: Descent | None = None
        if self.plain and work.optimizer == "sgd":
            dtype = channels.dtype_of(precision)
            self.descent = Descent(self.standing, self.order.room(width, dtype) if any(last) else None)
        self.layers = Batched(precision, self.at_work, self.descent)

    def _room(self, numbers: Tensor) -> Tensor:
        return self.order.room(len(numbers), numbers.dtype)

    def begin(self, at: Tensor, start: Tensor, shifts: Tensor | None) -> None:
        self.order.bring(start, at, self.start, self.params, None if self.descent is None else self.descent.small)
        if shifts is not None:
            self.order.bring(shifts, at, self.shift)
        elif not self.plain:  # else nobody reads what does not count
            self.shift[at] = 0.0

    def updates(self, at: Tensor) -> Tensor:
        return self.order.moved(self.params, self.start, at)

    def step(self, gradients: Gradients) -> None:
        if self.descent is not None:
            self.descent.begin()
        with self.layers:
            grads = self.order.parts(gradients(self.order.unflatten(self.params)))
        if self.descent is not None:
            self.descent.move(grads)
        elif self.plain:
            adam(self.standing, grads, first=self.first, second=self.second, num_steps=self.num_steps)
        else:
            self._advance(torch.cat([part.reshape(len(self.lr), -1) for part in grads], dim=1))
        self.num_steps += self.at_work
