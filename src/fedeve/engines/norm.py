"""Group norm of many lanes at once on a GPU: one read to know a group, one to change it, in either direction."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import lanes_first

_BLOCK = 1024


@triton.jit
def _forward(
    x, w, b, out, mean, rstd, EPS,
    IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of one image; P pixels of C / G channels."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count: tl.constexpr = C // G * P
    first = (image * G + group) * count
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + first + at, mask=at < count, other=0.0)
    middle = tl.sum(total) / count
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        gap = tl.where(at < count, tl.load(x + first + at, mask=at < count, other=0.0) - middle, 0.0)
        total += gap * gap
    scale = 1 / tl.sqrt(tl.sum(total) / count + EPS)
    tl.store(mean + image * G + group, middle)
    tl.store(rstd + image * G + group, scale)
    own = image // IMAGES * C + group * (C // G)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        value = (tl.load(x + first + at, mask=inside) - middle) * scale
        weight = tl.load(w + own + at // P, mask=inside)
        tl.store(out + first + at, value * weight + tl.load(b + own + at // P, mask=inside), mask=inside)


@triton.jit
def _input_gradient(
    grad, x, w, mean, rstd, out,
    IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_x = rstd (g - mean(g) - x_hat mean(g x_hat)) with g = grad w, of one group of one image."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count: tl.constexpr = C // G * P
    first, own = (image * G + group) * count, image // IMAGES * C + group * (C // G)
    middle, scale = tl.load(mean + image * G + group), tl.load(rstd + image * G + group)
    plain, along = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + first + at, mask=inside, other=0.0) * tl.load(w + own + at // P, mask=inside, other=0.0)
        plain += g
        along += g * (tl.load(x + first + at, mask=inside, other=0.0) - middle) * scale
    by_one, by_x = tl.sum(plain) / count, tl.sum(along) / count
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + first + at, mask=inside) * tl.load(w + own + at // P, mask=inside)
        x_hat = (tl.load(x + first + at, mask=inside) - middle) * scale
        tl.store(out + first + at, scale * (g - by_one - x_hat * by_x), mask=inside)


@triton.jit
def _affine_gradient(
    grad, x, mean, rstd, for_w, for_b,
    IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one channel in one lane: d_w = sum of grad x_hat, d_b = sum of grad."""
    channel, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = channel // (C // G)
    weight, bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, IMAGES * P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside, image = at < IMAGES * P, lane * IMAGES + at // P
        place = (image * C + channel) * P + at % P
        g = tl.load(grad + place, mask=inside, other=0.0)
        middle = tl.load(mean + image * G + group, mask=inside, other=0.0)
        scale = tl.load(rstd + image * G + group, mask=inside, other=0.0)
        weight += g * (tl.load(x + place, mask=inside, other=0.0) - middle) * scale
        bias += g
    tl.store(for_w + lane * C + channel, tl.sum(weight))
    tl.store(for_b + lane * C + channel, tl.sum(bias))


def normalise(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of x [lanes, N, C, ...], w and b [lanes, C]: the output, and mean and 1/deviation [lanes, N, groups]."""
    lanes, num, channels = x.shape[:3]
    out = torch.empty_like(x)
    mean, rstd = x.new_empty(lanes, num, groups), x.new_empty(lanes, num, groups)
    sizes = {"C": channels, "G": groups, "P": x[0, 0, 0].numel(), "BLOCK": _BLOCK}
    _forward[(groups, lanes * num)](x, w, b, out, mean, rstd, eps, num, **sizes)
    return out, mean, rstd


def gradients(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `normalise` passes back to x, w and b."""
    (lanes, num, channels), groups = x.shape[:3], mean.shape[2]
    for_x, for_w, for_b = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
    sizes = {"C": channels, "G": groups, "P": x[0, 0, 0].numel(), "BLOCK": _BLOCK}
    _input_gradient[(groups, lanes * num)](grad, x, w, mean, rstd, for_x, num, **sizes)
    _affine_gradient[(channels, lanes)](grad, x, mean, rstd, for_w, for_b, num, **sizes)
    return for_x, for_w, for_b


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for_x, for_w, for_b = gradients(*(value[None].contiguous() for value in inputs))
        return for_x[0], for_w[0], for_b[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        return gradients(*lanes_first(info, dims, inputs)), (0, 0, 0)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, rstd = normalise(x[None].contiguous(), w[None], b[None], groups, eps)
        return out[0], mean[0], rstd[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.save_for_backward(inputs[0], inputs[1], output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _mean: Any, _rstd: Any) -> Any:
        return *_Backward.apply(grad, *ctx.saved_tensors), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        return normalise(*lanes_first(info, dims, inputs)), (0, 0, 0)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As `torch.nn.functional.group_norm`, to which it leaves what has no weights or is not float32."""
    if weight is None or bias is None or input.dtype != torch.float32 or input.ndim < 3:
        return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    return _Norm.apply(input, weight, bias, num_groups, eps)[0]
