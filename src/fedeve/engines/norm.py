"""Group norm of many lanes at once on a GPU, and ReLU with it: one read to know a group, one to change it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.norm import norm_relu
from .batched import at_work, lanes_first
from .images import is_idle
from .turning import turn

_HELD = (8192, 16)  # values that a program holds at a time, and a thread of it
# The same for gradients of groups whose channels lie side by side, by their number: sums over pixels of many channels
# are slow between warps. The fastest of those tried for ResNet-18 on an H200.
_HELD_LAST = {32: (8192, 32), 64: (4096, 16), 128: (1024, 32), 256: (1024, 32)}


@triton.jit
def _passed(grad, rectified, at, normal, weight, bias, inside, RELU: tl.constexpr):
    """grad, if RELU where the output was above zero: where `rectified` is, or without a skip x_hat w + b."""
    error = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if rectified is None:
            error = tl.where(normal * weight + bias <= 0, 0.0, error)
        else:
            error = tl.where(tl.load(rectified + at, mask=inside, other=0.0) <= 0, 0.0, error)
    return error


@triton.jit(do_not_specialize=["TO_W", "TO_B"])
def _forward(
    x, skip, w, b, TO_W, TO_B, out, mean, rstd, at_work, EPS,
    RELU: tl.constexpr, IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    LAST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One group of one image: x_hat w + b, plus `skip` if there is one, and if RELU nothing below zero.

    It has P pixels of C / G channels, and its channels lie side by side if LAST, else its pixels. The variance is taken
    around the group's first value, so one read gives both moments.
    """
    SIZE: tl.constexpr = C // G
    STEP: tl.constexpr = C if LAST else 1
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = image // IMAGES
    if is_idle(at_work, lane):
        return
    channel, pixel = tl.arange(0, BC)[None, :], tl.arange(0, BP)[:, None]
    first = image * (C * P) + group * (SIZE if LAST else SIZE * P)
    at = first + (pixel * C + channel if LAST else channel * P + pixel)
    pivot = tl.load(x + first).to(tl.float32)
    total, squares = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        value = tl.load(x + at + start * STEP, mask=inside, other=0.0).to(tl.float32)
        gap = tl.where(inside, value - pivot, 0.0)
        total += gap
        squares += gap * gap
    away = tl.sum(total) / (SIZE * P)
    scale = 1 / tl.sqrt(tl.maximum(tl.sum(squares) / (SIZE * P) - away * away, 0.0) + EPS)
    middle = pivot + away
    tl.store(mean + image * G + group, middle)
    tl.store(rstd + image * G + group, scale)
    weight = tl.load(w + lane * TO_W + group * SIZE + channel, mask=channel < SIZE, other=0.0)
    bias = tl.load(b + lane * TO_B + group * SIZE + channel, mask=channel < SIZE, other=0.0)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        value = tl.load(x + at + start * STEP, mask=inside, other=0.0).to(tl.float32)
        value = (value - middle) * scale * weight + bias
        if skip is not None:
            value += tl.load(skip + at + start * STEP, mask=inside, other=0.0)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # what is not a number stays
        tl.store(out + at + start * STEP, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["TO_W", "TO_B"])
def _gradients(
    grad, x, w, b, TO_W, TO_B, mean, rstd, rectified, for_x, for_skip, by_image, at_work,
    RELU: tl.constexpr, IMAGES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    LAST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of one group of one image: d_x = rstd (g - mean(g) - x_hat mean(g x_hat)), g = e w, and e what passes of grad.

    d_skip = e. The image's part of d_w = sum of e x_hat and of d_b = sum of e goes to `by_image` [images, 2, C]. The
    second time a group is read from its end, of which the cache still has most.
    """
    SIZE: tl.constexpr = C // G
    STEP: tl.constexpr = C if LAST else 1
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = image // IMAGES
    if is_idle(at_work, lane):
        return
    channel, pixel = tl.arange(0, BC)[None, :], tl.arange(0, BP)[:, None]
    first = image * (C * P) + group * (SIZE if LAST else SIZE * P)
    at = first + (pixel * C + channel if LAST else channel * P + pixel)
    middle, scale = tl.load(mean + image * G + group), tl.load(rstd + image * G + group)
    weight = tl.load(w + lane * TO_W + group * SIZE + channel, mask=channel < SIZE, other=0.0)
    bias = tl.load(b + lane * TO_B + group * SIZE + channel, mask=channel < SIZE, other=0.0)
    plain, along = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    for start in range(0, P, BP):
        inside = (start + pixel < P) & (channel < SIZE)
        here = at + start * STEP
        value = (tl.load(x + here, mask=inside, other=0.0).to(tl.float32) - middle) * scale
        error = _passed(grad, rectified, here, value, weight, bias, inside, RELU)
        if for_skip is not None:
            tl.store(for_skip + here, error.to(for_skip.dtype.element_ty), mask=inside)
        plain += error
        along += error * value
    by_bias, by_weight = tl.sum(plain, 0)[None, :], tl.sum(along, 0)[None, :]
    by_image += image * (2 * C) + group * SIZE
    tl.store(by_image + channel, by_weight, mask=channel < SIZE)
    tl.store(by_image + C + channel, by_bias, mask=channel < SIZE)
    by_one, by_x = tl.sum(weight * by_bias) / (SIZE * P), tl.sum(weight * by_weight) / (SIZE * P)
    tl.debug_barrier()  # who reads `for_skip` below need not have written it
    for before in range(0, P, BP):
        start = (P - 1) // BP * BP - before
        inside = (start + pixel < P) & (channel < SIZE)
        here = at + start * STEP
        value = (tl.load(x + here, mask=inside, other=0.0).to(tl.float32) - middle) * scale
        if for_skip is None:
            error = _passed(grad, rectified, here, value, weight, bias, inside, RELU)
        else:
            error = tl.load(for_skip + here, mask=inside, other=0.0).to(tl.float32)
        slope = scale * (error * weight - by_one - value * by_x)
        tl.store(for_x + here, slope.to(for_x.dtype.element_ty), mask=inside)


def _has_channels_last(x: Tensor) -> bool:
    """Whether images [lanes, N, C, H, W] lie with their channels side by side."""
    return x.ndim == 5 and x.shape[2] > 1 and x.permute(0, 1, 3, 4, 2).is_contiguous()


def _packed(x: Tensor) -> Tensor:
    return x if _has_channels_last(x) else x.contiguous()


def _like(x: Tensor, other: Tensor) -> Tensor:
    """`other`, lying as x does."""
    return other if other.stride() == x.stride() else torch.empty_like(x).copy_(other)


def _apart(w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Weights and biases [lanes, C] as they lie in the models' vectors, and how far from lane to lane."""
    w, b = (part if part.stride(1) == 1 else part.contiguous() for part in (w, b))
    return w, b, w.stride(0), b.stride(0)


def _sizes(x: Tensor, groups: int, *, backward: bool = False) -> dict[str, Any]:
    channels, pixels, is_last = x.shape[2], x[0, 0, 0].numel(), _has_channels_last(x)
    across = triton.next_power_of_2(channels // groups)
    held, by_thread = _HELD_LAST[min(256, max(32, across))] if backward and is_last else _HELD
    down = min(triton.next_power_of_2(pixels), max(1, held // across))
    sizes = {"IMAGES": x.shape[1], "C": channels, "G": groups, "P": pixels, "LAST": is_last}
    return {**sizes, "BP": down, "BC": across, "num_warps": min(16, max(1, down * across // (32 * by_thread)))}


def normalise(
    x: Tensor, skip: Tensor | None, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x and skip [lanes, N, C, ...], w and b [lanes, C]: the output, and mean and 1/deviation [lanes, N, groups]."""
    lanes, num = x.shape[:2]
    x = _packed(x)
    out = torch.empty_like(x)
    mean, rstd = w.new_empty(lanes, num, groups), w.new_empty(lanes, num, groups)
    inputs = (x, None if skip is None else _like(x, skip), *_apart(w, b))
    _forward[(groups, lanes * num)](*inputs, out, mean, rstd, at_work(lanes), eps, relu, **_sizes(x, groups))
    return out, mean, rstd


def gradients(
    grad: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `normalise` passes back to x, w, b and skip, which had a part in `out` if that is given, else nothing."""
    (lanes, num, channels), groups = x.shape[:3], mean.shape[2]
    x = _packed(x)
    grad, out = _like(x, grad), None if out is None else _like(x, out)
    for_x, for_skip = torch.empty_like(x), None if out is None else torch.empty_like(x)
    by_image = w.new_empty(lanes, num, 2, channels)  # of w and b
    inputs = (grad, x, *_apart(w, b), mean.contiguous(), rstd.contiguous(), out)
    _gradients[(groups, lanes * num)](
        *inputs, for_x, for_skip, by_image, at_work(lanes), relu, **_sizes(x, groups, backward=True)
    )
    summed = turn(by_image[..., None], torch.float32, at_work(lanes))  # always in the same order
    for_w, for_b = summed[:, :, 0].unbind(1)
    return for_x, for_w, for_b, x.new_zeros(lanes, 0) if for_skip is None else for_skip


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        with_lane: list[Any] = [value[None] if isinstance(value, Tensor) else value for value in inputs]
        return tuple(value[0] for value in gradients(*with_lane))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return gradients(*lanes_first(info, dims, inputs, packed=False)), (0, 0, 0, 0)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, skip: Tensor | None, w: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = normalise(x[None], None if skip is None else skip[None], w[None], b[None], *rest)
        return found[0][0], found[1][0], found[2][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, skip, w, b, _groups, _eps, ctx.relu = inputs
        out, mean, rstd = output
        ctx.has_skip = skip is not None
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)  # else zeros are made for what has none
        ctx.save_for_backward(x, w, b, mean, rstd, *[out][: ctx.has_skip])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _mean: Any, _rstd: Any) -> Any:
        *saved, out = ctx.saved_tensors if ctx.has_skip else (*ctx.saved_tensors, None)
        for_x, for_w, for_b, for_skip = _Backward.apply(grad, *saved, out, ctx.relu)
        return for_x, for_skip if ctx.has_skip else None, for_w, for_b, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        return normalise(*lanes_first(info, dims, inputs, packed=False)), (0, 0, 0)


def _suits(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether these are for such values: float32 or bfloat16 with weights, and channels that the groups divide."""
    small = x.dtype in (torch.float32, torch.bfloat16)
    if weight is None or bias is None or not small or weight.dtype != torch.float32 or x.ndim < 3:
        return False
    return x.shape[1] % num_groups == 0


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As `torch.nn.functional.group_norm`, to which it leaves what has no weights or other types."""
    if not _suits(input, num_groups, weight, bias):
        return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    return _Norm.apply(input, None, weight, bias, num_groups, eps, False)[0]


def rectified(
    x: Tensor, skip: Tensor | None, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """As `norm_relu`, to which it leaves what `group_norm` leaves, and a skip of another shape or type."""
    alike = skip is None or (skip.shape == x.shape and skip.dtype == x.dtype)
    if not alike or not _suits(x, num_groups, weight, bias):
        return norm_relu(x, skip, num_groups, weight, bias, eps)
    return _Norm.apply(x, skip, weight, bias, num_groups, eps, True)[0]
