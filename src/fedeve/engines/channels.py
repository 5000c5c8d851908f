"""Convolutions of many lanes at once in bfloat16, with the channels last: `convolution.py` has the other precisions.

A pixel's channels lie side by side, so a patch is a few long reads, and the products run on the tensor cores at their
pace. Sums and weights are float32. As there: no atomics, no tuning by the clock, and a lane's bits do not depend on
who else is there.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import at_work, descent, lanes_first
from .descent import corrected
from .images import Pair, block_of, inside, is_idle
from .turning import turn

MULTIPLE = 16  # what a matrix product needs of the channels


@triton.jit
def _convolve(
    x, w, TO_W, out, at_work, NUM,
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
    w += lane * TO_W
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
    grad, w, TO_W, out, at_work, NUM,
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
    w += lane * TO_W
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
def _halves(x):
    """The upper and the lower half of a matrix."""
    return tl.split(x.reshape(2, x.shape[0] // 2, x.shape[1]).permute(1, 2, 0))


@triton.jit
def _move(slope, first, small, vector, start, shift, lr, prox, shifted, lane, k, O: tl.constexpr, K: tl.constexpr):
    """A step of plain SGD of some rows of a kernel, from the first on."""
    o = first + tl.arange(0, slope.shape[0])
    at, inside = o[:, None] * K + k[None, :], (o < O)[:, None] & (k < K)[None, :]
    here = tl.load(vector + at, mask=inside)
    here -= tl.load(lr + lane) * corrected(slope, here, start, shift, prox, shifted, lane, at, inside)
    tl.store(vector + at, here, mask=inside)
    tl.store(small + at, here.to(small.dtype.element_ty), mask=inside)


@triton.jit
def _kernel_gradient(
    x, grad, out, small, vector, start, shift, lr, prox, shifted, STRIDE, FIRST, at_work, NUM,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out[lane, piece, o, tap, c] = sum over the piece's pixels of grad[lane, n, p, q, o] x[lane, n, p+kh, q+kw, c].

    Where there is a `vector` the lane's kernel, which lies in it from FIRST on, is moved instead: a step of plain SGD.
    """
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
    if vector is None:
        at = ((lane * PIECES + piece) * O + o[:, None]) * K + k[None, :]
        tl.store(out + at, total, mask=(o < O)[:, None] & (k < K)[None, :])
    else:
        begin = lane * STRIDE + FIRST
        rest = (small + begin, vector + begin, start + begin, shift + begin, lr, prox, shifted, lane, k, O, K)
        first = tl.program_id(1) * BO
        above, below = _halves(total)
        one, two = _halves(above)
        _move(one, first, *rest)
        _move(two, first + BO // 4, *rest)
        one, two = _halves(below)
        _move(one, first + BO // 2, *rest)
        _move(two, first + BO // 4 * 3, *rest)


class Tile(NamedTuple):
    """What a program takes of pixels and outputs, of how many inputs at a time, and by how many warps."""

    pixels: int
    outputs: int
    inputs: int
    warps: int


# By the number of outputs. The fastest of those tried for ResNet-18 on an H200, as are the numbers below.
_TILES = {
    64: Tile(128, 64, 64, 4),
    128: Tile(128, 128, 64, 4),
    256: Tile(128, 128, 64, 4),
    512: Tile(128, 256, 64, 8),
}
_PIECE = 4096  # of a kernel's gradient: pixels that one program sums at the most


def dtype_of(precision: str) -> torch.dtype:
    """What the operands are stored in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _products(precision: str) -> str:
    return "tf32" if precision == "bf16" else precision  # which a product of bfloat16 does not look at


def taps(w: Tensor, precision: str) -> Tensor:
    """Kernels [lanes, O, C, KH, KW] as the products want them: [lanes, O, KH KW, C], a lane's side by side."""
    down = descent()
    there = None if down is None else down.copy_of(w.flatten(3).mT)
    return turn(w.flatten(3)[:, None], dtype_of(precision), at_work(len(w))) if there is None else there


def last(x: Tensor, precision: str) -> Tensor:
    """Images [lanes, N, C, H, W] as [lanes, N, H, W, C], side by side; no copy where they lie so already."""
    return x.permute(0, 1, 3, 4, 2).to(dtype_of(precision)).contiguous()


def _tile(outputs: int, inputs: int, precision: str) -> Tile:
    """For a product with so many outputs, which sums over taps and over so many inputs in each."""
    block = block_of(outputs, 512)
    tile = _TILES[block] if precision == "bf16" and block in _TILES else Tile(128, min(128, block), 32, 4)
    return tile._replace(inputs=min(tile.inputs, inputs & -inputs))  # a power of two that divides them


def convolve(x: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """[lanes, N, P, Q, O] of x [lanes, N, H, W, C] and taps w [lanes, O, taps, C]."""
    (lanes, num, height, width, channels), outputs = x.shape, w.shape[1]
    high, wide = (
        (length + 2 * p - k) // s + 1 for length, p, k, s in zip((height, width), padding, size, stride, strict=True)
    )
    out = x.new_empty(lanes, num, high, wide, outputs)
    tile = _tile(outputs, channels, precision)
    grid = (triton.cdiv(num * high * wide, tile.pixels), triton.cdiv(outputs, tile.outputs), lanes)
    _convolve[grid](
        x, w, w.stride(0), out, at_work(lanes), num,
        channels, height, width, outputs, high, wide, *size, *stride, *padding,
        PRECISION=_products(precision), BM=tile.pixels, BO=tile.outputs, BK=tile.inputs,
        num_warps=tile.warps, num_stages=3,
    )  # fmt: skip
    return out


def input_gradient(
    grad: Tensor, w: Tensor, shape: Pair, size: Pair, stride: Pair, padding: Pair, precision: str
) -> Tensor:
    """[lanes, N, H, W, C] for shape = (H, W), of grad [lanes, N, P, Q, O] and taps w [lanes, O, taps, C]."""
    (lanes, num, high, wide, outputs), channels = grad.shape, w.shape[3]
    out = grad.new_empty(lanes, num, *shape, channels)
    tile = _tile(channels, outputs, precision)
    for down, right in product(range(min(stride[0], shape[0])), range(min(stride[1], shape[1]))):
        pixels = triton.cdiv(shape[0] - down, stride[0]) * triton.cdiv(shape[1] - right, stride[1])
        grid = (triton.cdiv(num * pixels, tile.pixels), triton.cdiv(channels, tile.outputs), lanes)
        _input_gradient[grid](
            grad, w, w.stride(0), out, at_work(lanes), num,
            channels, *shape, outputs, high, wide, *size, *stride, *padding, down, right,
            PRECISION=_products(precision), BM=tile.pixels, BC=tile.outputs, BK=tile.inputs,
            num_warps=tile.warps, num_stages=3,
        )  # fmt: skip
    return out


def kernel_gradient(
    x: Tensor, grad: Tensor, size: Pair, stride: Pair, padding: Pair, precision: str, w: Tensor | None = None
) -> Tensor:
    """[lanes, O, taps, C] of x [lanes, N, H, W, C] and grad [lanes, N, P, Q, O].

    Spent, where it could move the taps w [lanes, O, taps, C] at once.
    """
    (lanes, num, height, width, channels), (high, wide, outputs) = x.shape, grad.shape[2:]
    num_taps, num_pixels = size[0] * size[1], num * high * wide
    depth = 64 if precision == "bf16" else 32
    pieces = triton.cdiv(num_pixels, _PIECE)
    piece = triton.cdiv(num_pixels, pieces * depth) * depth
    down = descent()
    first = None if down is None or w is None or pieces > 1 else down.takes(w)
    if down is None or first is None:
        out = x.new_empty(lanes, pieces, outputs, num_taps, channels, dtype=torch.float32)
        moving: tuple[Any, ...] = (out, None, None, None, None, None, None, None, 0, 0)
    else:
        out = down.spent.expand(lanes, 1, outputs, num_taps, channels)
        moving = (None, down.small, *down.standing[:6], down.standing.params.stride(0), first)
    block, block_k = block_of(outputs, 128), block_of(num_taps * channels, 128)
    warps, registers = (8, 128) if outputs > 128 and precision == "bf16" else (4, None)
    grid = (triton.cdiv(num_taps * channels, block_k), triton.cdiv(outputs, block), lanes * pieces)
    _kernel_gradient[grid](
        x, grad, *moving, at_work(lanes), num, channels, height, width, outputs, high, wide, *size, *stride, *padding,
        PIECES=pieces, PIECE=piece, PRECISION=_products(precision), BO=block, BK=block_k, BM=depth,
        num_warps=warps, num_stages=3, maxnreg=registers,
    )  # fmt: skip
    if pieces == 1:
        return out[:, 0]
    return turn(out.flatten(2)[:, :, None, None], torch.float32, at_work(lanes)).view(out[:, 0].shape)


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
    for_x = x.new_zeros(x.shape[0], 0)
    if needs_x:  # first: the kernels may be others when their gradient is there
        for_x = input_gradient(error, w, tuple(x.shape[-2:]), *rest).permute(0, 1, 4, 2, 3).to(x.dtype)  # type: ignore[arg-type]
    for_w = kernel_gradient(last(x, precision), error, *rest, w)
    return for_x, for_w.unflatten(2, size).movedim(-1, -3)


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
