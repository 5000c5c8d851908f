"""One step of plain SGD in all lanes, on a GPU: what `local.advance` does, in one pass over the vectors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _descend(vector, start, shift, grad, lr, prox, active, D, BLOCK: tl.constexpr):
    """vector -= lr (grad + prox (vector - start) + shift), in the lanes that are at work."""
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(active + lane):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < D
        at += lane * D
        here = tl.load(vector + at, mask=inside)
        slope = tl.load(grad + at, mask=inside)
        slope += tl.load(prox + lane) * (here - tl.load(start + at, mask=inside)) + tl.load(shift + at, mask=inside)
        tl.store(vector + at, here - tl.load(lr + lane) * slope, mask=inside)


def descend(
    params: Tensor, grad: Tensor, *, start: Tensor, shift: Tensor, lr: Tensor, prox: Tensor, active: Tensor
) -> None:
    """Move `params` [lanes, D] in place; `lr`, `prox` and `active` are [lanes]."""
    lanes, dim = params.shape
    grid = (triton.cdiv(dim, _BLOCK), lanes)
    _descend[grid](params, start, shift, grad, lr, prox, active, dim, BLOCK=_BLOCK)
