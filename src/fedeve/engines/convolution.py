"""Convolutions of many lanes at once on a GPU: every lane has its own kernel, so libraries see hundreds of tiny groups.

Two Triton kernels, each a matrix product of one lane's patches, which are read where they lie: the convolution, which
is also the gradient of its input, and the gradient of its kernel. No atomics and no tuning by the clock, so a lane's
bits do not depend on who else is there. `precision` is Triton's: tf32x3 has the digits of float32, tf32 has not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import channels, narrow
from .batched import at_work, lanes_first
from .images import Pair, block_of, inside, is_idle, pair


@triton.jit
def _patches(x, begin, within, bits, k, K: tl.constexpr, KK: tl.constexpr, PADDED: tl.constexpr):
    """[k, patches]: an element lies at where its patch begins plus where it lies in any patch."""
    if PADDED:
        there = (((bits[None, :] >> (k % KK)[:, None]) & 1) != 0) & (k < K)[:, None]
        patch = tl.load(x + within[:, None] + begin[None, :], mask=there, other=0.0)
    else:
        patch = tl.load(x + within[:, None] + begin[None, :])
    return patch


@triton.jit
def _convolve(
    x, w, bias, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[lane, n, o, p, q] = bias[lane, o] + sum over k = (c, kh, kw) of w[lane, o, k] x[lane, n, c, p+kh, q+kw]."""
    K: tl.constexpr = C * KH * KW
    lane = tl.program_id(2).to(tl.int64)
    if is_idle(at_work, lane):
        return
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n, pixel = m // (P * Q), m % (P * Q)
    i, j = pixel // Q * SH - PH, pixel % Q * SW - PW
    begin = tl.where(m < NUM * P * Q, n * (C * H * W) + i * W + j, 0)
    bits = tl.where(m < NUM * P * Q, inside(i, j, H, W, KH, KW, PH, PW), 0)
    x += lane * NUM * (C * H * W)
    w += lane * (O * K)
    total = tl.zeros((BO, BM), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        within = tl.where(k < K, k // (KH * KW) * (H * W) + k // KW % KH * W + k % KW, 0)
        patch = _patches(x, begin, within, bits, k, K, KH * KW, PH + PW > 0)
        kernel = tl.load(w + o[:, None] * K + k[None, :], mask=(o < O)[:, None] & (k < K)[None, :], other=0.0)
        total += tl.dot(kernel, patch, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    at = lane * NUM * (O * P * Q) + (n * (O * P * Q) + pixel)[None, :] + o[:, None] * (P * Q)
    tl.store(out + at, total, mask=(o < O)[:, None] & (m < NUM * P * Q)[None, :])


@triton.jit
def _kernel_gradient(
    x, grad, out, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[lane, piece, o, k] = sum over the piece's pixels of grad[lane, n, o, p, q] x[lane, n, c, p+kh, q+kw]."""
    K: tl.constexpr = C * KH * KW
    both = tl.program_id(2)
    lane, piece = (both // PIECES).to(tl.int64), both % PIECES
    if is_idle(at_work, lane):
        return
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    within = tl.where(k < K, k // (KH * KW) * (H * W) + k // KW % KH * W + k % KW, 0)
    x += lane * NUM * (C * H * W)
    grad += lane * NUM * (O * P * Q)
    total = tl.zeros((BO, BK), tl.float32)
    for first in range(0, PIECE, BM):
        m = piece * PIECE + first + tl.arange(0, BM)
        n, pixel = m // (P * Q), m % (P * Q)
        there = m < NUM * P * Q
        i, j = pixel // Q * SH - PH, pixel % Q * SW - PW
        begin = tl.where(there, n * (C * H * W) + i * W + j, 0)
        bits = tl.where(there, inside(i, j, H, W, KH, KW, PH, PW), 0)
        patch = _patches(x, begin, within, bits, k, K, KH * KW, PH + PW > 0)
        at = (n * (O * P * Q) + pixel)[None, :] + o[:, None] * (P * Q)
        error = tl.load(grad + at, mask=(o < O)[:, None] & there[None, :], other=0.0)
        total += tl.dot(error, tl.trans(patch), input_precision=PRECISION)
    at = ((lane * PIECES + piece) * O + o[:, None]) * K + k[None, :]
    tl.store(out + at, total, mask=(o < O)[:, None] & (k < K)[None, :])


# Of an output, what one program takes: pixels, channels at most, and how much of the sum at a time. Of a kernel's
# gradient: how many pixels one program sums, and how many of them at a time.
_PIXELS, _CHANNELS, _INPUTS = 128, 128, 32
_PIECE, _DEPTH = 1024, 32
_MANY = 64  # inputs of one output, with which a product of few outputs pays; LeNet-5's second layer has 150


def _is_narrow(outputs: int, inputs: int, padding: Pair, precision: str) -> bool:
    """Whether plain sums are faster: with few outputs, but for TF32's products of many inputs without a border."""
    return outputs <= narrow.MOST_CHANNELS and (precision != "tf32" or padding != (0, 0) or inputs < _MANY)


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """[lanes, N, O, P, Q] of x [lanes, N, C, H, W], w [lanes, O, C, KH, KW] and bias [lanes, O]."""
    (lanes, num, channels, height, width), (outputs, rows, columns) = x.shape, (w.shape[1], *w.shape[3:])
    high = (height + 2 * padding[0] - rows) // stride[0] + 1
    wide = (width + 2 * padding[1] - columns) // stride[1] + 1
    out = x.new_empty(lanes, num, outputs, high, wide)
    if _is_narrow(outputs, channels * rows * columns, padding, precision):
        return narrow.convolve(x, w, bias, stride, padding, out)
    block = block_of(outputs, _CHANNELS if precision == "tf32" else 64)
    inputs, warps = (16, 2) if block == 16 else (_INPUTS, 8 if block > 64 else 4)
    grid = (triton.cdiv(num * high * wide, _PIXELS), triton.cdiv(outputs, block), lanes)
    _convolve[grid](
        x, w, w if bias is None else bias, out, at_work(lanes), num, channels, height, width, outputs, high, wide,
        rows, columns, *stride, *padding, HAS_BIAS=bias is not None, PRECISION=precision, BO=block, BM=_PIXELS,
        BK=inputs, num_warps=warps,
    )  # fmt: skip
    return out


def kernel_gradient(x: Tensor, grad: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """[lanes, O, C, KH, KW] of x [lanes, N, C, H, W] and grad [lanes, N, O, P, Q]."""
    (lanes, num, channels, height, width), (outputs, high, wide) = x.shape, grad.shape[2:]
    num_inputs, num_pixels = channels * size[0] * size[1], num * high * wide
    if _is_narrow(outputs, num_inputs, padding, precision):
        return narrow.kernel_gradient(x, grad, size, stride, padding).sum(1)
    few = outputs <= narrow.MOST_CHANNELS
    most = 64 if precision == "tf32" and not few else 32  # three products at once take the registers of three
    block, block_k = block_of(outputs, most), block_of(num_inputs, most)
    # Few long sums would leave the chip idle: they are cut in pieces, which are added afterwards.
    piece = triton.cdiv(min(num_pixels, _PIECE), _DEPTH) * _DEPTH
    pieces = triton.cdiv(num_pixels, piece)
    out = x.new_empty(lanes, pieces, outputs, channels, *size)
    grid = (triton.cdiv(num_inputs, block_k), triton.cdiv(outputs, block), lanes * pieces)
    _kernel_gradient[grid](
        x, grad, out, at_work(lanes), num, channels, height, width, outputs, high, wide, *size, *stride, *padding,
        PIECES=pieces, PIECE=piece, PRECISION=precision, BO=block, BM=_DEPTH, BK=block_k, num_warps=1 if few else 4,
    )  # fmt: skip
    return out.sum(1) if pieces > 1 else out[:, 0]


def input_gradient(grad: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """[lanes, N, C, H, W] for size = (H, W): the errors, spread out by the stride, convolved with turned kernels."""
    rows, columns = w.shape[3:]
    if stride != (1, 1):
        spread = grad.new_zeros(
            *grad.shape[:3], size[0] + 2 * padding[0] - rows + 1, size[1] + 2 * padding[1] - columns + 1
        )
        spread[..., :: stride[0], :: stride[1]] = grad
        grad = spread
    around = rows - 1 - padding[0], columns - 1 - padding[1]
    return convolve(grad, w.flip(3, 4).transpose(1, 2).contiguous(), None, (1, 1), around, precision)


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, w: Tensor, *rest: Any) -> Tensor:
        return input_gradient(grad[None].contiguous(), w[None].contiguous(), *rest)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return input_gradient(*lanes_first(info, dims, inputs)), 0


class _KernelGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, grad: Tensor, *rest: Any) -> Tensor:
        return kernel_gradient(x[None].contiguous(), grad[None].contiguous(), *rest)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return kernel_gradient(*lanes_first(info, dims, inputs)), 0


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        return convolve(x[None].contiguous(), w[None].contiguous(), None if bias is None else bias[None], *rest)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, bias, *ctx.rest = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        for_x = _InputGradient.apply(grad, w, tuple(x.shape[-2:]), *ctx.rest) if ctx.needs_input_grad[0] else None
        for_w = _KernelGradient.apply(x, grad, tuple(w.shape[-2:]), *ctx.rest)
        return for_x, for_w, grad.sum((0, 2, 3)) if ctx.has_bias else None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return convolve(*lanes_first(info, dims, inputs)), 0


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    precision: str,
) -> Tensor:
    """As `torch.conv2d`, to which it leaves dilations, groups, odd paddings and all that is not float32."""
    plain = groups == 1 and pair(dilation) == (1, 1) and not isinstance(padding, str) and input.ndim == 4
    plain = plain and weight[0, 0].numel() <= 31 and max(_beyond(weight, padding)) <= 0
    if plain and weight.dtype == torch.float32 and channels.suits(weight, precision):
        return channels.conv2d(input, weight, bias, pair(stride), pair(padding), precision)
    input = input.to(weight.dtype)  # what comes from layers in bfloat16
    if not plain or weight.dtype != torch.float32:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    precision = "tf32" if precision == "bf16" else precision
    return _Convolution.apply(input, weight, bias, pair(stride), pair(padding), precision)  # type: ignore[no-any-return]


def _beyond(weight: Tensor, padding: Any) -> Pair:
    """How much wider a padding is than a kernel can see."""
    rows, columns = pair(padding)
    return rows - weight.shape[-2] + 1, columns - weight.shape[-1] + 1
