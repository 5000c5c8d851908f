"""What kernels share: who is at work, pairs of rows and columns, sizes of blocks, what of a patch is there."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

Pair = tuple[int, int]


def pair(value: Any) -> Pair:
    """What a layer's argument says of rows and columns."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def block_of(size: int, most: int) -> int:
    """How much of a dimension one program takes: a power of two that a matrix product accepts."""
    return min(most, max(16, int(triton.next_power_of_2(size))))


@triton.jit
def is_idle(at_work, lane):
    """Whether nobody is at work in a lane: what would be computed there is left as memory has it."""
    return False if at_work is None else tl.load(at_work + lane) == 0


@triton.jit
def inside(
    i, j, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr
):
    """For patches that begin at (i, j): one bit for every element that lies in the image and not in its padding."""
    bits = tl.zeros(i.shape, tl.int32)
    if PH + PW > 0:
        for k in tl.static_range(KH * KW):
            row, column = i + k // KW, j + k % KW
            bits |= ((row >= 0) & (row < H) & (column >= 0) & (column < W)).to(tl.int32) << k
    return bits
