"""Layout: the only place that knows parameter names and shapes. Everywhere else a model is one flat vector.

A vector is what methods, engines, checkpoints and messages handle; `Layout` turns it into a module's named tensors
and back. Running a model is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .errors import FedeveError, Words

_WITH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a module's trainable parameters, in the module's order.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.num_params, layout.names
    (8, ('weight', 'bias'))
    >>> layout.unflatten(torch.arange(8.0))["bias"]
    tensor([6., 7.])
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's trainable parameters; frozen ones stay with the module and are never sent."""
        _refuse_statistics(module)
        named = {name: param for name, param in module.named_parameters() if param.requires_grad}
        if not named:
            raise FedeveError(
                "the model has nothing to train", got=Words(type(module).__name__), do="give a module with parameters"
            )
        return cls(tuple(named), tuple(param.shape for param in named.values()))

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def num_params(self) -> int:
        return sum(self.sizes)

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """The vector [D] of these tensors."""
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views into a vector [..., D], each [..., *shape]."""
        # split, not slices: under vmap(grad) the backward of split is one concatenation instead of a sum of paddings.
        parts = vector.split(self.sizes, dim=-1)
        lanes = vector.shape[:-1]
        return {n: part.reshape(lanes + shape) for n, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def to_numpy(self, vector: Tensor) -> list[NDArray[np.floating]]:
        """Arrays in the module's order, as message formats want them."""
        return [tensor.detach().cpu().numpy() for tensor in self.unflatten(vector).values()]

    def from_numpy(self, arrays: list[NDArray[np.floating]]) -> Tensor:
        """The vector of arrays in the module's order."""
        shapes = [tuple(array.shape) for array in arrays]
        if shapes != [tuple(shape) for shape in self.shapes]:
            raise FedeveError(
                "the arrays do not fit the model",
                got=Words(f"shapes {shapes}"),
                do=f"send {len(self.shapes)} arrays of shapes {[tuple(s) for s in self.shapes]}",
            )
        # Copied, since arrays that come out of messages are often read-only.
        return torch.cat([torch.from_numpy(np.array(array)).reshape(-1) for array in arrays])


def _refuse_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _WITH_STATISTICS) and part.track_running_stats:
            raise FedeveError(
                "the model keeps running statistics, which cannot be averaged like parameters",
                got=Words(f"{type(part).__name__} at {name or 'the top'!r}"),
                do="use GroupNorm or LayerNorm, or track_running_stats=False",
            )
