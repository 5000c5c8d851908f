"""Convolutions of many lanes with few channels, as LeNet-5's: plain sums, where matrix units would multiply padding.

A thread has some pixels and all channels of them, or, for the gradient of a kernel, all channels and some of the
kernel's elements: every number that is loaded is used often. Products are float32's whatever the precision asked for.
In TF32, matrix units are faster where a sum is long and no border is in the way: `convolution.py` keeps those.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .batched import at_work
from .images import Pair, is_idle

MOST_CHANNELS = 16
# Of an output, how many pixels one program takes. Of a kernel's gradient, how many it sums, for how many elements of
# the kernel, and how many sums a warp has under way. The fastest of those tried for LeNet-5 on an H200.
_PIXELS = 512
_PIECE, _ELEMENTS, _SUMS = 1024, 4, 2048


@triton.jit
def _convolve(
    x, w, bias, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HAS_BIAS: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out[lane, n, o, p, q] = bias[lane, o] + sum over k = (c, kh, kw) of w[lane, o, k] x[lane, n, c, p+kh, q+kw]."""
    K: tl.constexpr = C * KH * KW
    lane = tl.program_id(1).to(tl.int64)
    if is_idle(at_work, lane):
        return
    o = tl.arange(0, BO)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = m < NUM * P * Q
    n, pixel = m // (P * Q), m % (P * Q)
    i, j = pixel // Q * SH - PH, pixel % Q * SW - PW
    x += lane * NUM * (C * H * W) + tl.where(there, n * (C * H * W) + i * W + j, 0)
    w += lane * (O * K) + o * K
    total = tl.zeros((BO, BM), tl.float32)
    for _ in range(C):
        for k in tl.static_range(KH * KW):
            if PH + PW > 0:
                # Rows and columns before the first one are large as unsigned numbers.
                row, column = (i + k // KW).to(tl.uint32), (j + k % KW).to(tl.uint32)
                pixels = tl.load(x + (k // KW * W + k % KW), mask=there & (row < H) & (column < W), other=0.0)
            else:
                pixels = tl.load(x + (k // KW * W + k % KW))
            total += tl.load(w + k, mask=o < O, other=0.0)[:, None] * pixels[None, :]
        x += H * W
        w += KH * KW
    if HAS_BIAS:
        total += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    at = lane * NUM * (O * P * Q) + (n * (O * P * Q) + pixel)[None, :] + o[:, None] * (P * Q)
    tl.store(out + at, total, mask=(o < O)[:, None] & there[None, :])


@triton.jit
def _kernel_gradient(
    x, grad, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[lane, piece, o, k] = sum over the piece's pixels of grad[lane, n, o, p, q] x[lane, n, c, p+kh, q+kw]."""
    K: tl.constexpr = C * KH * KW
    both = tl.program_id(1)
    lane, piece = (both // PIECES).to(tl.int64), both % PIECES
    if is_idle(at_work, lane):
        return
    o = tl.arange(0, BO)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    kh, kw = k // KW % KH, k % KW
    within = tl.where(k < K, k // (KH * KW) * (H * W) + kh * W + kw, 0)
    x += lane * NUM * (C * H * W)
    grad += lane * NUM * (O * P * Q)
    total = tl.zeros((BK, BO, BM), tl.float32)
    for first in range(0, PIECE, BM):
        m = piece * PIECE + first + tl.arange(0, BM)
        there = m < NUM * P * Q
        n, pixel = m // (P * Q), m % (P * Q)
        i, j = pixel // Q * SH - PH, pixel % Q * SW - PW
        begin = tl.where(there, n * (C * H * W) + i * W + j, 0)
        if PH + PW > 0:
            row, column = (i[None, :] + kh[:, None]).to(tl.uint32), (j[None, :] + kw[:, None]).to(tl.uint32)
            inside = (row < H) & (column < W) & (k < K)[:, None] & there[None, :]
            patch = tl.load(x + within[:, None] + begin[None, :], mask=inside, other=0.0)
        else:
            patch = tl.load(x + within[:, None] + begin[None, :])
        at = (n * (O * P * Q) + pixel)[None, :] + o[:, None] * (P * Q)
        error = tl.load(grad + at, mask=(o < O)[:, None] & there[None, :], other=0.0)
        total += patch[:, None, :] * error[None, :, :]
    at = ((lane * PIECES + piece) * O + o[None, :]) * K + k[:, None]
    tl.store(out + at, tl.sum(total, axis=2), mask=(o < O)[None, :] & (k < K)[:, None])


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, out: Tensor) -> Tensor:
    """`out` [lanes, N, O, P, Q] of x [lanes, N, C, H, W], w [lanes, O, C, KH, KW] and bias [lanes, O]."""
    lanes, num, outputs, high, wide = out.shape
    grid = (triton.cdiv(num * high * wide, _PIXELS), lanes)
    _convolve[grid](
        x, w, w if bias is None else bias, out, at_work(lanes), num, *x.shape[2:], outputs, high, wide, *w.shape[3:],
        *stride, *padding,
        HAS_BIAS=bias is not None, BO=triton.next_power_of_2(outputs), BM=_PIXELS, num_warps=2,
    )  # fmt: skip
    return out


def kernel_gradient(x: Tensor, grad: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """[lanes, pieces, O, C, KH, KW] of x [lanes, N, C, H, W] and grad [lanes, N, O, P, Q]; the sum of pieces counts."""
    (lanes, num, channels), (outputs, high, wide) = x.shape[:3], grad.shape[2:]
    num_pixels, block = num * high * wide, triton.next_power_of_2(outputs)
    depth = _SUMS // _ELEMENTS // block
    piece = triton.cdiv(min(num_pixels, _PIECE), depth) * depth
    pieces = triton.cdiv(num_pixels, piece)
    out = x.new_empty(lanes, pieces, outputs, channels, *size)
    grid = (triton.cdiv(channels * size[0] * size[1], _ELEMENTS), lanes * pieces)
    _kernel_gradient[grid](
        x, grad, out, at_work(lanes), num, *x.shape[2:], outputs, high, wide, *size, *stride, *padding,
        PIECES=pieces, PIECE=piece, BO=block, BM=depth, BK=_ELEMENTS, num_warps=1,
    )  # fmt: skip
    return out
