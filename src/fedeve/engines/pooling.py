"""Max-pooling on a GPU whose backward pass is one read and one write: windows that do not overlap have one winner each.

PyTorch's own looks for the windows of every pixel; what overlaps, is padded or dilated is left to it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import lanes_first
from .images import Pair, pair

_BLOCK = 1024
_LONGEST = 2**31 - 1 - _BLOCK  # what fits 32 bits


@triton.jit
def _numbers(WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program's elements; divisions of long integers are slow, so they are long only where they must."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    return first * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _pool(
    x, out, winner, COUNT,
    H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of every window, the first of equals, and which it is; one that is not a number wins."""
    at = _numbers(WIDE, BLOCK)
    image, p, q = at // (P * Q), at // Q % P, at % Q
    corner = x + image * H * W + p * KH * W + q * KW
    best = tl.load(corner, mask=at < COUNT, other=0.0)
    which = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(1, KH * KW):
        value = tl.load(corner + k // KW * W + k % KW, mask=at < COUNT, other=0.0)
        better = (value > best) | (value != value)
        best, which = tl.where(better, value, best), tl.where(better, k, which)
    tl.store(out + at, best, mask=at < COUNT)
    tl.store(winner + at, which.to(tl.uint8), mask=at < COUNT)


@triton.jit
def _unpool(
    grad, winner, out, COUNT,
    H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """To every pixel its window's gradient if it won, else nothing."""
    at = _numbers(WIDE, BLOCK)
    image, i, j = at // (H * W), at // W % H, at % W
    inside = (at < COUNT) & (i // KH < P) & (j // KW < Q)
    window = image * (P * Q) + i // KH * Q + j // KW
    won = tl.load(winner + window, mask=inside, other=255) == (i % KH * KW + j % KW)
    value = tl.load(grad + window, mask=inside & won, other=0.0)
    tl.store(out + at, value, mask=at < COUNT)


def _pooled(x: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
    height, width = x.shape[-2:]
    shape = (*x.shape[:-2], height // size[0], width // size[1])
    out, winner = x.new_empty(shape), x.new_empty(shape, dtype=torch.uint8)
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _pool[grid](x, out, winner, out.numel(), height, width, *shape[-2:], *size, WIDE=x.numel() > _LONGEST, BLOCK=_BLOCK)
    return out, winner


def _unpooled(grad: Tensor, winner: Tensor, shape: Pair, size: Pair) -> Tensor:
    out = grad.new_empty(*grad.shape[:-2], *shape)
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _unpool[grid](
        grad, winner, out, out.numel(), *shape, *grad.shape[-2:], *size, WIDE=out.numel() > _LONGEST, BLOCK=_BLOCK
    )
    return out


class _Unpool(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, winner: Tensor, shape: Pair, size: Pair) -> Tensor:
        return _unpooled(grad.contiguous(), winner.contiguous(), shape, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return _unpooled(*lanes_first(info, dims, inputs)), 0


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
        return _pooled(x.contiguous(), size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape, ctx.size = tuple(inputs[0].shape[-2:]), inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else zeros are made for what has none
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return _Unpool.apply(grad, *ctx.saved_tensors, ctx.shape, ctx.size), None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _pooled(*lanes_first(info, dims, inputs)), (0, 0)


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As `torch.nn.functional.max_pool2d`, to which it leaves windows that overlap, and what else is not plain."""
    size = pair(kernel_size)
    apart = not stride or pair(stride) == size
    plain = apart and pair(padding) == (0, 0) and pair(dilation) == (1, 1) and max(size) < 16
    input = input.float() if input.dtype == torch.bfloat16 else input
    if not plain or ceil_mode or return_indices or input.dtype != torch.float32:
        theirs: Any = torch.nn.functional.max_pool2d
        return theirs(input, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode, return_indices=return_indices)
    return _Pool.apply(input, size)[0]
