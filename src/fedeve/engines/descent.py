"""One step of plain SGD or Adam in all lanes, on a GPU: what `local.advance` does, in one pass over the vectors.

Gradients come in parts, a tensor of the model each, and are read as they lie: they need not be copied into vectors
first, nor kernels' gradients be turned that `channels.py` has made with the channels last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..local import BETA1, BETA2, EPSILON

_BLOCK = 1024


@triton.jit
def _corrected(slope, here, start, shift, prox, shifted, lane, at, inside):
    """slope + prox (here - start) + shift; what adds nothing is not read."""
    strength = tl.load(prox + lane)
    if strength != 0:
        slope += strength * (here - tl.load(start + at, mask=inside))
    if tl.load(shifted + lane) != 0:
        slope += tl.load(shift + at, mask=inside)
    return slope


@triton.jit
def _slope(grad, lane, at, inside, SIZE, C: tl.constexpr, TAPS: tl.constexpr):
    """Of numbers [..., C, TAPS] of a lane's gradient, which lies as [..., TAPS, C]."""
    if TAPS > 1:
        at = at // (C * TAPS) * (C * TAPS) + at % TAPS * C + at // TAPS % C
    return tl.load(grad + lane * SIZE + at, mask=inside)


@triton.jit(do_not_specialize=["FIRST", "SIZE"])
def _descend(
    vector, grad, start, shift, lr, prox, shifted, active, D, FIRST, SIZE,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """vector -= lr corrected(grad), in the lanes that are at work; `grad` is of SIZE numbers from FIRST on."""
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(active + lane):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        slope = _slope(grad, lane, at, inside, SIZE, C, TAPS)
        at += lane * D + FIRST
        here = tl.load(vector + at, mask=inside)
        slope = _corrected(slope, here, start, shift, prox, shifted, lane, at, inside)
        tl.store(vector + at, here - tl.load(lr + lane) * slope, mask=inside)


@triton.jit(do_not_specialize=["FIRST", "SIZE"])
def _adam(
    vector, grad, first, second, bias1, bias2, start, shift, lr, prox, shifted, active, D, FIRST, SIZE,
    C: tl.constexpr, TAPS: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, vector -= lr (m / bias1) / (sqrt(v / bias2) + epsilon)."""
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(active + lane):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        slope = _slope(grad, lane, at, inside, SIZE, C, TAPS)
        at += lane * D + FIRST
        here = tl.load(vector + at, mask=inside)
        slope = _corrected(slope, here, start, shift, prox, shifted, lane, at, inside)
        m = BETA1 * tl.load(first + at, mask=inside) + (1 - BETA1) * slope
        v = BETA2 * tl.load(second + at, mask=inside) + (1 - BETA2) * (slope * slope)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        # Rounded as PyTorch rounds; Triton's own division and root are approximate.
        m, v = tl.div_rn(m, tl.load(bias1 + lane)), tl.div_rn(v, tl.load(bias2 + lane))
        away = tl.div_rn(tl.load(lr + lane) * m, tl.sqrt_rn(v) + EPSILON)
        tl.store(vector + at, here - away, mask=inside)


def _parts(params: Tensor, grads: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[int, ...], tuple[int, int]]]:
    """Of every gradient [lanes, ...]: itself; FIRST, SIZE, C and TAPS of it; and the grid for it."""
    first = 0
    for grad in grads:
        size, turned = grad[0].numel(), (1, 1)
        if not grad.is_contiguous() and grad.ndim == 5 and grad.permute(0, 1, 3, 4, 2).is_contiguous():
            turned = grad.shape[2], grad.shape[3] * grad.shape[4]
        else:
            grad = grad.contiguous()
        yield grad, (first, size, *turned), (triton.cdiv(size, _BLOCK), len(params))
        first += size
    assert first == params.shape[1]


def descend(
    params: Tensor,
    grads: Sequence[Tensor],
    *,
    start: Tensor,
    shift: Tensor,
    lr: Tensor,
    prox: Tensor,
    shifted: Tensor,
    active: Tensor,
) -> None:
    """Move `params` [lanes, D] in place; `lr`, `prox`, `shifted` (whether `shift` counts) and `active` are [lanes].

    The gradients [lanes, ...] are those of the vector's parts, in their order.
    """
    kept = (start, shift, lr, prox, shifted, active, params.shape[1])
    for grad, shape, grid in _parts(params, grads):
        _descend[grid](params, grad, *kept, *shape, BLOCK=_BLOCK)


def adam(
    params: Tensor,
    grads: Sequence[Tensor],
    *,
    first: Tensor,
    second: Tensor,
    num_steps: Tensor,
    start: Tensor,
    shift: Tensor,
    lr: Tensor,
    prox: Tensor,
    shifted: Tensor,
    active: Tensor,
) -> None:
    """Move `params` and the moments [lanes, D] in place, as `descend`; `num_steps` [lanes] were taken before."""
    bias1, bias2 = ((1 - beta ** (num_steps + 1)).to(params.dtype) for beta in (BETA1, BETA2))
    kept = (first, second, bias1, bias2, start, shift, lr, prox, shifted, active, params.shape[1])
    betas = {"BETA1": BETA1, "BETA2": BETA2, "EPSILON": EPSILON}
    for grad, shape, grid in _parts(params, grads):
        _adam[grid](params, grad, *kept, *shape, **betas, BLOCK=_BLOCK, enable_fp_fusion=False)
