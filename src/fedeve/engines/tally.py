"""`Summary.of` a cohort on a GPU: two reads of the updates, where PyTorch's float64 copies of them take twenty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..method import Vectors
from ..summary import Summary

_BLOCK = 512


@triton.jit
def _read(at, inside):
    """Values, zero where they are not finite, and which are not."""
    value = tl.load(at, mask=inside, other=0.0)
    fine = tl.abs(value) < float("inf")
    return tl.where(fine, value, 0.0).to(tl.float64), ~fine


@triton.jit
def _tally(updates, shares, known, center, mean, scatter, broken, D, S: tl.constexpr, BLOCK: tl.constexpr):
    """Of one block of the S vectors: plain mean, weighted mean, sum of squares around the first, who is not finite."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    total = tl.zeros((BLOCK,), tl.float64)
    for k in range(S):
        value, bad = _read(updates + k * D + at, inside)
        total += value
        tl.store(broken + block * S + k, tl.sum(bad.to(tl.int32)))
    middle = total / S
    away, square = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for k in range(S):
        gap = _read(updates + k * D + at, inside)[0] - middle
        away += tl.load(shares + k) * gap
        square += gap * gap
    tl.store(center + at, middle, mask=inside)
    tl.store(mean + at, tl.where(tl.load(known) > 0, middle + away, 0.0), mask=inside)
    tl.store(scatter + block, tl.sum(tl.where(inside, square, 0.0)))


def tally(updates: Tensor, weights: Tensor, extras: Vectors) -> tuple[Summary, Tensor]:
    """The summary of `updates` [S, D] with `weights` [S], and whose are finite [S]; sums as `Summary.of` has them."""
    count, dim = updates.shape
    weights = weights.double()
    weight = weights.sum()
    shares = weights / torch.where(weight > 0, weight, 1.0)
    center, mean = (updates.new_empty(dim, dtype=torch.float64) for _ in range(2))
    blocks = triton.cdiv(dim, _BLOCK)
    scatter = updates.new_empty(blocks, dtype=torch.float64)
    broken = updates.new_empty(blocks, count, dtype=torch.int32)
    _tally[(blocks,)](updates.contiguous(), shares, weight, center, mean, scatter, broken, dim, count, _BLOCK)
    means = {name: value.mean(-2, dtype=torch.float64) for name, value in extras.items()}
    summary = Summary(torch.full_like(weight, count), weight, mean, center, scatter.sum(), means)
    return summary, broken.sum(0) == 0
