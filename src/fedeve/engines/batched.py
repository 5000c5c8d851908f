"""Hand-batched layers: while `Batched` is on, functions that vmap does badly on a GPU are ours, all others PyTorch's.

They need Triton, which comes with PyTorch's CUDA builds; without it, PyTorch's own are used everywhere.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from .descent import Descent

AVAILABLE = importlib.util.find_spec("triton") is not None


def lanes_first(info: Any, dims: Sequence[int | None], inputs: Sequence[Any], *, packed: bool = True) -> list[Any]:
    """For a vmap rule: the tensors with their lane axis in front; one that all lanes share is repeated.

    `packed` lays them out in the order of their axes; otherwise they lie as they are.
    """
    tensors = [
        (value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0))
        if isinstance(value, Tensor)
        else value
        for value, dim in zip(inputs, dims, strict=True)
    ]
    return [value.contiguous() if packed and isinstance(value, Tensor) else value for value in tensors]


_ON: list[Batched] = []  # the modes that are
_ONE_THREAD = threading.RLock()  # at a time: the threads in which gradients are taken must find the mode of theirs


def at_work(lanes: int) -> Tensor | None:
    """Which of so many lanes a layer has to compute, [lanes]; None where the mode that is on does not say."""
    known = _ON[-1].at_work if _ON else None
    return known if known is not None and len(known) == lanes else None


def descent() -> Descent | None:
    """How the lanes of the mode that is on are moved, if layers may have a part in it."""
    return _ON[-1].descent if _ON else None


_PIECE = 512  # inputs of a linear layer that are summed in one matrix product


class Batched(TorchFunctionMode):
    """A mode for calls of a module under `torch.func.vmap`; convolutions have `precision`, a run's or Triton's.

    Lanes that `at_work` [lanes] says to be idle are left out by convolutions and norms, so they cost next to nothing;
    what is found there means nothing. With a `descent` gradients move its lanes, and some are spent on the way.
    """

    def __init__(self, precision: str, at_work: Tensor | None = None, descent: Descent | None = None) -> None:
        super().__init__()
        self.at_work, self.descent = at_work, descent
        from ..models.norm import norm_relu
        from .convolution import conv2d
        from .lookup import embedding
        from .norm import group_norm, rectified
        from .pooling import max_pool2d

        precision = "tf32x3" if precision == "float32" else precision
        self.ours: dict[Any, Any] = {
            torch.conv2d: lambda *args, **named: conv2d(*args, **named, precision=precision),
            torch.nn.functional.max_pool2d: max_pool2d,
            torch.nn.functional.group_norm: group_norm,
            norm_relu: rectified,
            torch.nn.functional.embedding: embedding,
            linear: _linear,
        }

    def __enter__(self) -> Any:
        _ONE_THREAD.acquire()
        _ON.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _ON.pop()
        _ONE_THREAD.release()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.ours.get(func, func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`; a long sum is cut in pieces, since one product a lane leaves the chip idle."""
    input = input.to(weight.dtype)  # what comes from layers in bfloat16
    pieces = weight.shape[1] // _PIECE
    if input.ndim != 2 or pieces < 4 or weight.shape[1] % pieces:
        return linear(input, weight, bias)
    product: Tensor = _InPieces.apply(input, weight, pieces)
    return product if bias is None else product + bias


class _InPieces(torch.autograd.Function):
    """`input @ weight.T`; only this way round is the sum long, so the gradients are plain products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, pieces: int) -> Tensor:
        left = input.unflatten(1, (pieces, -1)).transpose(0, 1)
        right = weight.unflatten(1, (pieces, -1)).permute(1, 2, 0)
        return torch.bmm(left, right).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ input, None
