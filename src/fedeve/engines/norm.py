"""Group norm of many lanes at once on a GPU: one read to know a group, one to change it, in either direction."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import lanes_first
from .turning import turn

_BLOCK = 4096


@triton.jit
def _forward(
    x, w, b, out, mean, rstd, EPS,
    IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    LAST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One group of one image; P pixels of C / G channels, whose channels lie side by side if LAST, else its pixels."""
    SIZE: tl.constexpr = C // G
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel, pixel = tl.arange(0, BC)[None, :], tl.arange(0, BP)[:, None]
    first = image * (C * P) + group * (SIZE if LAST else SIZE * P)
    at = first + (pixel * C + channel if LAST else channel * P + pixel)
    total = tl.zeros((BP, BC), tl.float32)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        total += tl.load(x + at + start * (C if LAST else 1), mask=inside, other=0.0)
    middle = tl.sum(total) / (SIZE * P)
    total = tl.zeros((BP, BC), tl.float32)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        value = tl.load(x + at + start * (C if LAST else 1), mask=inside, other=0.0)
        gap = tl.where(inside, value.to(tl.float32) - middle, 0.0)
        total += gap * gap
    scale = 1 / tl.sqrt(tl.sum(total) / (SIZE * P) + EPS)
    tl.store(mean + image * G + group, middle)
    tl.store(rstd + image * G + group, scale)
    own = image // IMAGES * C + group * SIZE + channel
    weight, bias = tl.load(w + own, mask=channel < SIZE, other=0.0), tl.load(b + own, mask=channel < SIZE, other=0.0)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        value = tl.load(x + at + start * (C if LAST else 1), mask=inside, other=0.0).to(tl.float32)
        value = (value - middle) * scale * weight + bias
        tl.store(out + at + start * (C if LAST else 1), value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    grad, x, w, mean, rstd, out, for_w, for_b,
    IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    LAST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of one group of one image, with g = grad w: d_x = rstd (g - mean(g) - x_hat mean(g x_hat)).

    The image's part of d_w = sum of grad x_hat and d_b = sum of grad goes to `for_w` and `for_b` [images, C].
    """
    SIZE: tl.constexpr = C // G
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel, pixel = tl.arange(0, BC)[None, :], tl.arange(0, BP)[:, None]
    first = image * (C * P) + group * (SIZE if LAST else SIZE * P)
    at = first + (pixel * C + channel if LAST else channel * P + pixel)
    middle, scale = tl.load(mean + image * G + group), tl.load(rstd + image * G + group)
    plain, along = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        error = tl.load(grad + at + start * (C if LAST else 1), mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at + start * (C if LAST else 1), mask=inside, other=0.0).to(tl.float32)
        plain += error
        along += error * (value - middle) * scale
    by_bias, by_weight = tl.sum(plain, 0)[None, :], tl.sum(along, 0)[None, :]
    tl.store(for_b + image * C + group * SIZE + channel, by_bias, mask=channel < SIZE)
    tl.store(for_w + image * C + group * SIZE + channel, by_weight, mask=channel < SIZE)
    weight = tl.load(w + image // IMAGES * C + group * SIZE + channel, mask=channel < SIZE, other=0.0)
    by_one, by_x = tl.sum(weight * by_bias) / (SIZE * P), tl.sum(weight * by_weight) / (SIZE * P)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        error = tl.load(grad + at + start * (C if LAST else 1), mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at + start * (C if LAST else 1), mask=inside, other=0.0).to(tl.float32)
        slope = scale * (error * weight - by_one - (value - middle) * scale * by_x)
        tl.store(out + at + start * (C if LAST else 1), slope.to(out.dtype.element_ty), mask=inside)


def _has_channels_last(x: Tensor) -> bool:
    """Whether images [lanes, N, C, H, W] lie with their channels side by side."""
    return x.ndim == 5 and x.shape[2] > 1 and x.permute(0, 1, 3, 4, 2).is_contiguous()


def _sizes(x: Tensor, groups: int) -> dict[str, Any]:
    channels, pixels, is_last = x.shape[2], x[0, 0, 0].numel(), _has_channels_last(x)
    across = triton.next_power_of_2(channels // groups)
    down = min(triton.next_power_of_2(pixels), max(1, _BLOCK // across))
    sizes = {"IMAGES": x.shape[1], "C": channels, "G": groups, "P": pixels}
    return {**sizes, "LAST": is_last, "BP": down, "BC": across, "num_warps": 8 if down * across == _BLOCK else 4}


def normalise(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of x [lanes, N, C, ...], w and b [lanes, C]: the output, and mean and 1/deviation [lanes, N, groups]."""
    lanes, num = x.shape[:2]
    x = x if _has_channels_last(x) else x.contiguous()
    out = torch.empty_like(x)
    mean, rstd = w.new_empty(lanes, num, groups), w.new_empty(lanes, num, groups)
    _forward[(groups, lanes * num)](x, w.contiguous(), b.contiguous(), out, mean, rstd, eps, **_sizes(x, groups))
    return out, mean, rstd


def gradients(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `normalise` passes back to x, w and b."""
    (lanes, num, channels), groups = x.shape[:3], mean.shape[2]
    x = x if _has_channels_last(x) else x.contiguous()
    grad = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
    for_x = torch.empty_like(x)
    by_image = w.new_empty(2, lanes, num, channels)  # of w and b
    inputs = (grad, x, w.contiguous(), mean.contiguous(), rstd.contiguous(), for_x, *by_image)
    _gradients[(groups, lanes * num)](*inputs, **_sizes(x, groups))
    summed = turn(by_image.flatten(0, 1)[:, :, None, :, None], torch.float32)  # always in the same order
    for_w, for_b = summed.reshape(2, lanes, channels)
    return for_x, for_w, for_b


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for_x, for_w, for_b = gradients(*(value[None] for value in inputs))
        return for_x[0], for_w[0], for_b[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        return gradients(*lanes_first(info, dims, inputs, packed=False)), (0, 0, 0)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, rstd = normalise(x[None], w[None], b[None], groups, eps)
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
        return normalise(*lanes_first(info, dims, inputs, packed=False)), (0, 0, 0)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As `torch.nn.functional.group_norm`, to which it leaves what has no weights or other types."""
    small = input.dtype in (torch.float32, torch.bfloat16)
    if weight is None or bias is None or not small or weight.dtype != torch.float32 or input.ndim < 3:
        return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    return _Norm.apply(input, weight, bias, num_groups, eps)[0]
