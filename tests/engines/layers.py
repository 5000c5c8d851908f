"""What tests of hand-batched layers share: lanes of a model, and their gradients against PyTorch's in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedeve.engines.batched import Batched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LANES = 2


def lanes_of(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.stack([p.detach() + 0.3 * torch.randn(p.shape, generator=generator) for _ in range(LANES)]).to(
            DEVICE
        )
        for name, p in model.named_parameters()
    }


def assert_same_gradients(model: nn.Module, x: Tensor, precision: str, tolerance: float) -> None:
    """Of every parameter, in every lane, against PyTorch in float64."""
    params = lanes_of(model)
    model = model.to(DEVICE)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).pow(3).mean()

    exact_x = x.to(DEVICE).double() if x.is_floating_point() else x.to(DEVICE)
    exact = vmap(grad(loss))({name: value.double() for name, value in params.items()}, exact_x)
    with Batched(precision):
        ours = vmap(grad(loss))(params, x.to(DEVICE))
    for name, value in exact.items():
        gaps = (ours[name] - value).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)
        assert gaps.max() < tolerance, name


def images(channels: int = 3, size: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(LANES, 2, channels, size, size, generator=torch.Generator().manual_seed(seed))
