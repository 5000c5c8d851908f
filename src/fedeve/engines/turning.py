"""Small matrices of many lanes turned around, or summed over pieces, always in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .images import is_idle


@triton.jit
def _turn(
    x, out, at_work, ROWS, STRIDE,
    A: tl.constexpr, B: tl.constexpr, PIECES: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """out[lane, row, b, a] = sum over the pieces of x[lane, piece, row, a, b]; STRIDE is from lane to lane."""
    PARTS: tl.constexpr = (B + BB - 1) // BB
    lane, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    if is_idle(at_work, lane):
        return
    a = tl.program_id(0) // PARTS * BA + tl.arange(0, BA)[:, None]
    b = tl.program_id(0) % PARTS * BB + tl.arange(0, BB)[None, :]
    inside = (a < A) & (b < B)
    total = tl.zeros((BA, BB), tl.float32)
    for piece in range(PIECES):
        at = lane * STRIDE + (piece * ROWS + row) * (A * B)
        total += tl.load(x + at + a * B + b, mask=inside, other=0.0)
    tl.store(out + (lane * ROWS + row) * (A * B) + b * A + a, total.to(out.dtype.element_ty), mask=inside)


def turn(x: Tensor, dtype: torch.dtype, at_work: Tensor | None = None) -> Tensor:
    """[lanes, rows, B, A] of x [lanes, pieces, rows, A, B], summed over the pieces, in the lanes that are at work."""
    lanes, pieces, rows, first, second = x.shape
    x = x if lanes and x[0].is_contiguous() else x.contiguous()
    out = x.new_empty(lanes, rows, second, first, dtype=dtype)
    one, two = min(128, triton.next_power_of_2(first)), triton.next_power_of_2(second)
    two = min(two, 1024 if first == 1 else 128, max(1, 4096 // one))
    grid = (triton.cdiv(first, one) * triton.cdiv(second, two), rows, lanes)
    _turn[grid](x, out, at_work, rows, x.stride(0), first, second, pieces, one, two)
    return out
