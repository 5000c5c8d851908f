"""Convolutions of many lanes at once in bfloat16, with the channels last: `convolution.py` has the other precisions.

A pixel's channels lie side by side, so a patch is a few long reads, and the products run on the tensor cores at their
pace. Sums and weights are float32. As there: no atomics, no tuning by the clock, and a lane's bits do not depend on
who else is there.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import at_work, lanes_first
from .images import Pair, block_of, inside, is_idle
from .turning import turn

MULTIPLE = 16  # what a matrix product needs of the channels


@triton.jit
def _convolve(
    x, w, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[lane, n, p, q, o] = sum over taps and c of w[lane, o, tap, c] x[lane, n, p+kh, q+kw, c]."""
    TAPS: tl.constexpr = KH * KW
    PARTS: tl.constexpr = C // BK
    lane = tl.program_id(2).to(tl.int64)
    if is_idle(at_work, lane):
        return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    k = tl.arange(0, BK)
    n, pixel = m // (P * Q), m % (P * Q)
    i, j = pixel // Q * SH - PH, pixel % Q * SW - PW
    begin = (n * (H * W) + i * W + j) * C
    bits = tl.where(m < NUM * P * Q, inside(i, j, H, W, KH, KW, PH, PW), 0) if PH + PW > 0 else m
    x += lane * NUM * (H * W * C)
    w += lane * (O * TAPS * C)
    total = tl.zeros((BM, BO), tl.float32)
    for step in range(TAPS * PARTS):
        tap, first = step // PARTS, step % PARTS * BK
        there = (bits >> tap) & 1 != 0 if PH + PW > 0 else m < NUM * P * Q
        away = (tap // KW * W + tap % KW) * C + first
        patch = tl.load(x + (begin[:, None] + (away + k)[None, :]), mask=there[:, None], other=0.0)
        at = o[None, :] * (TAPS * C) + tap * C + (first + k)[:, None]
        kernel = tl.load(w + at, mask=(o < O)[None, :], other=0.0)
        total = tl.dot(patch, kernel, total, input_precision=PRECISION)
    at = lane * NUM * (P * Q * O) + m[:, None] * O + o[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < NUM * P * Q)[:, None] & (o < O)[None, :])


@triton.jit
def _input_gradient(
    grad, w, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[lane, n, i, j, c] = sum over taps and o of w[lane, o, tap, c] grad[lane, n, (i+PH-kh)/SH, (j+PW-kw)/SW, o].

    For the pixels with i = DOWN modulo SH and j = RIGHT modulo SW: the same taps divide for all of them.
    """
    HIGH: tl.constexpr = (H - DOWN + SH - 1) // SH  # how many such pixels there are
    WIDE: tl.constexpr = (W - RIGHT + SW - 1) // SW
    KH0: tl.constexpr = (DOWN + PH) % SH  # the first of their taps, and how many there are
    KW0: tl.constexpr = (RIGHT + PW) % SW
    ROWS: tl.constexpr = (KH - KH0 + SH - 1) // SH
    COLUMNS: tl.constexpr = (KW - KW0 + SW - 1) // SW
    PARTS: tl.constexpr = O // BK
    lane = tl.program_id(2).to(tl.int64)
    if is_idle(at_work, lane):
        return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    k = tl.arange(0, BK)
    n, pixel = m // (HIGH * WIDE), m % (HIGH * WIDE)
    p, q = pixel // WIDE + (DOWN + PH) // SH, pixel % WIDE + (RIGHT + PW) // SW  # the error that the first tap meets
    bits = tl.zeros((BM,), tl.int32)
    for number in tl.static_range(ROWS * COLUMNS):
        above, left = p - number // COLUMNS, q - number % COLUMNS
        there = (above >= 0) & (above < P) & (left >= 0) & (left < Q) & (m < NUM * (HIGH * WIDE))
        bits |= there.to(tl.int32) << number
    begin = (n * (P * Q) + p * Q + q) * O
    grad += lane * NUM * (P * Q * O)
    w += lane * (O * KH * KW * C)
    total = tl.zeros((BM, BC), tl.float32)
    for step in range(ROWS * COLUMNS * PARTS):
        tap, first = step // PARTS, step % PARTS * BK
        row, column = tap // COLUMNS, tap % COLUMNS
        away = first - (row * Q + column) * O
        known = (bits >> tap) & 1 != 0
        error = tl.load(grad + (begin[:, None] + (away + k)[None, :]), mask=known[:, None], other=0.0)
        at = (first + k)[:, None] * (KH * KW * C) + ((KH0 + row * SH) * KW + KW0 + column * SW) * C + c[None, :]
        kernel = tl.load(w + at, mask=(c < C)[None, :], other=0.0)
        total = tl.dot(error, kernel, total, input_precision=PRECISION)
    i, j = pixel // WIDE * SH + DOWN, pixel % WIDE * SW + RIGHT
    at = lane * NUM * (H * W * C) + (n * (H * W) + i * W + j)[:, None] * C + c[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < NUM * (HIGH * WIDE))[:, None] & (c < C)[None, :])


@triton.jit
def _kernel_gradient(
    x, grad, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out[lane, piece, o, tap, c] = sum over the piece's pixels of grad[lane, n, p, q, o] x[lane, n, p+kh, q+kw, c]."""
    K: tl.constexpr = KH * KW * C
    both = tl.program_id(2)
    lane, piece = (both // PIECES).to(tl.int64), both % PIECES
    if is_idle(at_work, lane):
        return
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    tap = k // C
    away = tl.multiple_of(tl.max_contiguous((tap // KW * W + tap % KW) * C + k % C, 16), 16)
    x += lane * NUM * (H * W * C)
    grad += lane * NUM * (P * Q * O)
    total = tl.zeros((BO, BK), tl.float32)
    for first in range(0, PIECE, BM):
        m = piece * PIECE + first + tl.arange(0, BM)
        n, pixel = m // (P * Q), m % (P * Q)
        i, j = pixel // Q * SH - PH, pixel % Q * SW - PW
        begin = (n * (H * W) + i * W + j) * C
        there = (m < NUM * P * Q)[:, None] & (k < K)[None, :]
        if PH + PW > 0:
            there &= (inside(i, j, H, W, KH, KW, PH, PW)[:, None] >> tap[None, :]) & 1 != 0
        patch = tl.load(x + (begin[:, None] + away[None, :]), mask=there, other=0.0)
        known = (m < NUM * P * Q)[:, None] & (o < O)[None, :]
        error = tl.load(grad + (m[:, None] * O + o[None, :]), mask=known, other=0.0)
        total = tl.dot(tl.trans(error), patch, total, input_precision=PRECISION)
    at = ((lane * PIECES + piece) * O + o[:, None]) * K + k[None, :]
    tl.store(out + at, total, mask=(o < O)[:, None] & (k < K)[None, :])


_PIXELS, _OUTPUTS, _INPUTS = 128, 128, 64  # what a program takes of pixels, of outputs, and of inputs at a time
_PIECE, _DEPTH, _LONG = 2048, 64, 128  # of a kernel's gradient: pixels summed by a program, at a time, its inputs


def dtype_of(precision: str) -> torch.dtype:
    """What the operands are stored in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _products(precision: str) -> str:
    return "tf32" if precision == "bf16" else precision  # which a product of bfloat16 does not look at


def taps(w: Tensor, precision: str) -> Tensor:
    """Kernels [lanes, O, C, KH, KW] as the products want them: [lanes, O, KH KW, C]."""
    return turn(w.flatten(3)[:, None], dtype_of(precision), at_work(len(w)))


def last(x: Tensor, precision: str) -> Tensor:
    """Images [lanes, N, C, H, W] as [lanes, N, H, W, C], side by side; no copy where they lie so already."""
    return x.permute(0, 1, 3, 4, 2).to(dtype_of(precision)).contiguous()


def _at_once(size: int, precision: str) -> int:
    """Of a sum over so many channels, how many at a time: the largest power of two that divides them, within limits."""
    return min(_INPUTS if precision == "bf16" else 32, size & -size)


def convolve(x: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """[lanes, N, P, Q, O] of x [lanes, N, H, W, C] and taps w [lanes, O, taps, C]."""
    (lanes, num, height, width, channels), outputs = x.shape, w.shape[1]
    high, wide = (
        (length + 2 * p - k) // s + 1 for length, p, k, s in zip((height, width), padding, size, stride, strict=True)
    )
    out = x.new_empty(lanes, num, high, wide, outputs)
    block = block_of(outputs, _OUTPUTS)
    grid = (triton.cdiv(num * high * wide, _PIXELS), triton.cdiv(outputs, block), lanes)
    _convolve[grid](
        x, w, out, at_work(lanes), num, channels, height, width, outputs, high, wide, *size, *stride, *padding,
        PRECISION=_products(precision), BM=_PIXELS, BO=block, BK=_at_once(channels, precision),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def input_gradient(
    grad: Tensor, w: Tensor, shape: Pair, size: Pair, stride: Pair, padding: Pair, precision: str
) -> Tensor:
    """[lanes, N, H, W, C] for shape = (H, W), of grad [lanes, N, P, Q, O] and taps w [lanes, O, taps, C]."""
    (lanes, num, high, wide, outputs), channels = grad.shape, w.shape[3]
    out = grad.new_empty(lanes, num, *shape, channels)
    block = block_of(channels, _OUTPUTS)
    for down, right in product(range(min(stride[0], shape[0])), range(min(stride[1], shape[1]))):
        pixels = triton.cdiv(shape[0] - down, stride[0]) * triton.cdiv(shape[1] - right, stride[1])
        grid = (triton.cdiv(num * pixels, _PIXELS), triton.cdiv(channels, block), lanes)
        _input_gradient[grid](
            grad, w, out, at_work(lanes), num, channels, *shape, outputs, high, wide, *size, *stride, *padding,
            down, right,
            PRECISION=_products(precision), BM=_PIXELS, BC=block, BK=_at_once(outputs, precision),
            num_warps=8 if block > 64 else 4, num_stages=3,
        )  # fmt: skip
    return out


def kernel_gradient(x: Tensor, grad: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """[lanes, O, C, taps] of x [lanes, N, H, W, C] and grad [lanes, N, P, Q, O]; its channels may lie last."""
    (lanes, num, height, width, channels), (high, wide, outputs) = x.shape, grad.shape[2:]
    num_taps, num_pixels = size[0] * size[1], num * high * wide
    depth = _DEPTH if precision == "bf16" else 32
    piece = triton.cdiv(min(num_pixels, _PIECE), depth) * depth
    pieces = triton.cdiv(num_pixels, piece)
    out = x.new_empty(lanes, pieces, outputs, num_taps, channels, dtype=torch.float32)
    block, block_k = block_of(outputs, _LONG), block_of(num_taps * channels, _LONG)
    grid = (triton.cdiv(num_taps * channels, block_k), triton.cdiv(outputs, block), lanes * pieces)
    _kernel_gradient[grid](
        x, grad, out, at_work(lanes), num, channels, height, width, outputs, high, wide, *size, *stride, *padding,
        PIECES=pieces, PIECE=piece, PRECISION=_products(precision), BO=block, BK=block_k, BM=depth,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return turn(out, torch.float32, at_work(lanes)) if pieces > 1 else out[:, 0].transpose(2, 3)


def _forward(x: Tensor, w: Tensor, stride: Pair, padding: Pair, precision: str) -> tuple[Tensor, Tensor]:
    """The output as [lanes, N, O, P, Q], its channels side by side, and the kernels' taps, for the way back."""
    small = taps(w, precision)
    size = (w.shape[3], w.shape[4])
    return convolve(last(x, precision), small, size, stride, padding, precision).permute(0, 1, 4, 2, 3), small


def _backward(
    grad: Tensor, x: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str, needs_x: bool
) -> tuple[Tensor, Tensor]:
    """What is passed back to images [lanes, N, C, H, W] (zeros of no size where not needed) and kernels."""
    error, rest = last(grad, precision), (size, stride, padding, precision)
    for_w = kernel_gradient(last(x, precision), error, *rest).unflatten(3, size)
    if not needs_x:
        return x.new_zeros(x.shape[0], 0), for_w
    return input_gradient(error, w, tuple(x.shape[-2:]), *rest).permute(0, 1, 4, 2, 3).to(x.dtype), for_w  # type: ignore[arg-type]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        for_x, for_w = _backward(grad[None], x[None], w[None], *rest)
        return for_x[0], for_w[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _backward(*lanes_first(info, dims, inputs, packed=False)), (0, 0)


class Convolution(torch.autograd.Function):
    """Of images and kernels whose channels are multiples of `MULTIPLE`; `apply(x, w, stride, padding, precision)`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, small = _forward(x[None], w[None], *rest)
        return out[0], small[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, *ctx.rest = inputs
        ctx.size = tuple(w.shape[-2:])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else zeros are made for what has none
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _taps: Any) -> Any:
        needs_x = ctx.needs_input_grad[0]
        for_x, for_w = _Gradients.apply(grad, *ctx.saved_tensors, ctx.size, *ctx.rest, needs_x)
        return for_x if needs_x else None, for_w, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _forward(*lanes_first(info, dims, inputs, packed=False)), (0, 0)


def suits(weight: Tensor, precision: str) -> bool:
    """Whether these are for kernels [O, C, KH, KW]: TF32's products are slow where their factors lie side by side."""
    return precision == "bf16" and weight.shape[0] % MULTIPLE == 0


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """As `torch.conv2d` of images [N, C, H, W]; the output is stored in what the operands are."""
    missing = -weight.shape[1] % MULTIPLE
    if missing:
        input, weight = (torch.nn.functional.pad(part, (0, 0, 0, 0, 0, missing)) for part in (input, weight))
    out: Tensor = Convolution.apply(input, weight, stride, padding, precision)[0]
    return out if bias is None else out + bias.to(out.dtype)[:, None, None]
