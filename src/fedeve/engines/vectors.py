"""The vectors of a pool's lanes: where clients began, where they are, and how a gradient moves them.

Here by PyTorch; `by_hand.py` has the same with kernels of our own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import local
from ..layout import Layout
from ..local import LocalWork
from ..method import Correction

Gradients = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Of a model's tensors [lanes, *shape] by name, the gradients by name."""


class Vectors:
    """Vectors [lanes, D] and what belongs to lanes, [lanes]: rate, strength of the pull to the start, steps taken."""

    def __init__(self, layout: Layout, work: LocalWork, width: int, *, like: Tensor) -> None:
        self.layout = layout
        numbers = torch.zeros(width, dtype=like.dtype, device=like.device)
        self.start, self.params, self.shift = (self._room(numbers) for _ in range(3))
        self.lr, self.prox, self.shifted = numbers + 1, numbers.clone(), numbers.clone()
        self.num_steps = numbers.double()
        self.at_work = torch.zeros(width, dtype=torch.bool, device=like.device)
        begun = local.begin(work, self.params)
        self.first, self.second = (moment if moment.ndim == 0 else self._room(numbers) for moment in begun[1:3])
        lanes_rate: Any = self.lr  # a rate for every lane, where a number is declared
        self.work = dataclasses.replace(work, lr=lanes_rate)

    def _room(self, numbers: Tensor) -> Tensor:
        return numbers.new_zeros(len(numbers), self.layout.num_params)

    def begin(self, at: Tensor, start: Tensor, shifts: Tensor | None) -> None:
        """Clients of one run at their start [D] in lanes `at` [n], and what is added to their gradients, if any."""
        self.start[at] = start
        self.params[at] = start
        self.shift[at] = 0.0 if shifts is None else shifts

    def set(self, at: Tensor, lr: Tensor, prox: Tensor, shifted: Tensor) -> None:
        """The numbers [n] of clients who begin in these lanes, with a fresh optimiser."""
        self.lr[at], self.prox[at], self.shifted[at] = lr, prox, shifted
        self.num_steps[at] = 0.0
        for moment in (self.first, self.second):
            if moment.ndim:
                moment[at] = 0.0

    def updates(self, at: Tensor) -> Tensor:
        """[n, D] end minus start in these lanes."""
        return self.params[at] - self.start[at]

    def step(self, gradients: Gradients) -> None:
        """One step of the optimiser in the lanes that are at work."""
        grads = gradients(self.layout.unflatten(self.params))
        self._advance(torch.cat([grads[name].reshape(len(self.lr), -1) for name in self.layout.names], dim=1))
        self.num_steps += self.at_work

    def _advance(self, grad: Tensor) -> None:
        """Move whoever is at work along gradients [lanes, D] that lie as the vectors do."""
        walk = local.Walk(self.params, self.first, self.second, self.num_steps)
        correction = Correction(self.prox, self.shift)
        moved = local.advance(self.work, walk, grad, start=self.start, correction=correction)
        pairs = (self.params, moved.params), (self.first, moved.first), (self.second, moved.second)
        for mine, new in pairs:
            if mine.ndim:
                mine.copy_(torch.where(self.at_work[:, None], new, mine))
