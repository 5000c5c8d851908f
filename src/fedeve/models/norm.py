"""Group norm followed by ReLU, as one function: a GPU makes one pass of it where PyTorch's parts take three."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import group_norm, relu
from torch.overrides import handle_torch_function, has_torch_function


def norm_relu(
    x: Tensor, skip: Tensor | None, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """`relu(group_norm(x) + skip)`; nothing is added where there is no `skip`."""
    tensors = (x, skip, weight, bias)
    if has_torch_function(tensors):  # as in PyTorch's own functions: a mode may have a better way
        found: Tensor = handle_torch_function(norm_relu, tensors, *tensors[:2], num_groups, *tensors[2:], eps)
        return found
    inner = group_norm(x, num_groups, weight, bias, eps)
    return relu(inner if skip is None else inner + skip)


class NormReLU(nn.GroupNorm):
    """`nn.GroupNorm` whose output is rectified, after what a shortcut has brought was added."""

    def forward(self, input: Tensor, skip: Tensor | None = None) -> Tensor:
        return norm_relu(input, skip, self.num_groups, self.weight, self.bias, self.eps)
