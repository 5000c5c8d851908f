"""One step of plain SGD or Adam in all lanes, on a GPU: what `local.advance` does, in one pass over the vectors.

Gradients come in parts, a tensor of the model each, and are read as they lie: they need not be copied into vectors
first. SGD need not even write them all: `Descent` lets a layer move its weights where their gradient is summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..local import BETA1, BETA2, EPSILON

_BLOCK = 1024


@triton.jit
def corrected(slope, here, start, shift, prox, shifted, lane, at, inside):
    """slope + prox (here - start) + shift; what adds nothing is not read."""
    strength = tl.load(prox + lane)
    if strength != 0:
        slope += strength * (here - tl.load(start + at, mask=inside))
    if tl.load(shifted + lane) != 0:
        slope += tl.load(shift + at, mask=inside)
    return slope


@triton.jit
def _descend(
    vector, start, shift, lr, prox, shifted, active, small, STRIDE, grad, APART, FIRST, SIZE, BLOCK: tl.constexpr
):  # fmt: skip
    """vector -= lr corrected(grad), in the lanes that are at work; `grad` [SIZE] is of what is from FIRST on."""
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(active + lane):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        slope = tl.load(grad + lane * APART + at, mask=inside)
        at += lane * STRIDE + FIRST
        here = tl.load(vector + at, mask=inside)
        here -= tl.load(lr + lane) * corrected(slope, here, start, shift, prox, shifted, lane, at, inside)
        tl.store(vector + at, here, mask=inside)
        if small is not None:
            tl.store(small + at, here.to(small.dtype.element_ty), mask=inside)


@triton.jit
def _adam(
    vector, start, shift, lr, prox, shifted, active, first, second, bias1, bias2, STRIDE, grad, APART, FIRST, SIZE,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, vector -= lr (m / bias1) / (sqrt(v / bias2) + epsilon)."""
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(active + lane):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        slope = tl.load(grad + lane * APART + at, mask=inside)
        at += lane * STRIDE + FIRST
        here = tl.load(vector + at, mask=inside)
        slope = corrected(slope, here, start, shift, prox, shifted, lane, at, inside)
        m = BETA1 * tl.load(first + at, mask=inside) + (1 - BETA1) * slope
        v = BETA2 * tl.load(second + at, mask=inside) + (1 - BETA2) * (slope * slope)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        # Rounded as PyTorch rounds; Triton's own division and root are approximate.
        m, v = tl.div_rn(m, tl.load(bias1 + lane)), tl.div_rn(v, tl.load(bias2 + lane))
        away = tl.div_rn(tl.load(lr + lane) * m, tl.sqrt_rn(v) + EPSILON)
        tl.store(vector + at, here - away, mask=inside)


class Standing(NamedTuple):
    """Where lanes stand, vectors [lanes, D] that lie equally far apart, and how they go on, numbers [lanes]."""

    params: Tensor
    start: Tensor
    shift: Tensor
    lr: Tensor
    prox: Tensor
    shifted: Tensor
    """Whether `shift` counts."""
    active: Tensor


def _parts(grads: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, tuple[int, int]]]:
    """Every gradient [lanes, ...], where it begins in the vectors, and the grid for it."""
    first = 0
    for grad in grads:
        size = grad[0].numel()
        yield grad, first, (triton.cdiv(size, _BLOCK), len(grad))
        first += size


def _lying(grad: Tensor, first: int) -> tuple[Tensor, int, int, int]:
    """A gradient with the numbers of each lane side by side; APART, FIRST and SIZE of it."""
    grad = grad if grad[0].is_contiguous() else grad.contiguous()
    return grad, grad.stride(0), first, grad[0].numel()


class Descent:
    """Plain SGD in lanes, moved part by part, with a copy of the params for matrix products beside them.

    A layer that finds its weights in the copy may move them itself where it has their gradient, and passes `spent` on
    in its place. That is right where nobody else needs the weights of before: `copy_of` counts who reads them, and what
    comes back of a gradient tells whether there was anybody else. So the first step must be one in which no lane is at
    work.
    """

    def __init__(self, standing: Standing, small: Tensor | None = None) -> None:
        self.standing, self.small = standing, small
        self.spent = standing.params.new_full((), float("nan"))
        self._reads: Counter[int] = Counter()
        self.moved: set[int] = set()
        """Where the weights begin that layers have moved in this step."""
        self._shared: set[int] = set()

    def begin(self) -> None:
        """Another step."""
        self._reads.clear()
        self.moved.clear()

    def copy_of(self, part: Tensor) -> Tensor | None:
        """The copy's view of a view of the params, to read; None where there is no copy or it is no such view."""
        storage = part.untyped_storage().data_ptr()
        if self.small is None or storage != self.standing.params.untyped_storage().data_ptr():
            return None
        self._reads[int(part.storage_offset())] += 1
        return self.small.as_strided(part.shape, part.stride(), part.storage_offset())

    def takes(self, part: Tensor) -> int | None:
        """Where a view of the copy begins, if its weights may be moved now; from then on they count as moved."""
        if self.small is None or part.untyped_storage().data_ptr() != self.small.untyped_storage().data_ptr():
            return None
        first = int(part.storage_offset())
        if self._reads[first] != 1 or first in self._shared:
            return None
        self.moved.add(first)
        return first

    def move(self, grads: Sequence[Tensor]) -> None:
        """Move the params by gradients [lanes, ...], in the order of the vectors' parts; what is spent has done so."""
        params = self.standing.params
        for grad, first, grid in _parts(grads):
            if grad.data_ptr() == self.spent.data_ptr():
                continue
            if first in self.moved:
                self._shared.add(first)
            _descend[grid](*self.standing, self.small, params.stride(0), *_lying(grad, first), BLOCK=_BLOCK)


def adam(standing: Standing, grads: Sequence[Tensor], *, first: Tensor, second: Tensor, num_steps: Tensor) -> None:
    """Move the params and the moments [lanes, D] in place; `num_steps` [lanes] were taken before."""
    params = standing.params
    bias1, bias2 = ((1 - beta ** (num_steps + 1)).to(params.dtype) for beta in (BETA1, BETA2))
    kept = (*standing, first, second, bias1, bias2, params.stride(0))
    betas = {"BETA1": BETA1, "BETA2": BETA2, "EPSILON": EPSILON}
    for grad, begin, grid in _parts(grads):
        _adam[grid](*kept, *_lying(grad, begin), **betas, BLOCK=_BLOCK, enable_fp_fusion=False)
