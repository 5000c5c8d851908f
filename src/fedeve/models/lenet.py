"""Small image models: a linear classifier, LeNet-5, and the CNN of the federated-learning literature."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..errors import FedeveError


class Linear(nn.Sequential):
    """Multinomial logistic regression on the flattened input."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


class _ImageModel(nn.Module):
    """Convolutions, then fully connected layers; takes [B, H, W] or [B, C, H, W]."""

    features: nn.Sequential
    head: nn.Sequential

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.ndim == 3 else x
        logits: Tensor = self.head(self.features(x))
        return logits


class LeNet5(_ImageModel):
    """LeNet-5: 61,706 parameters for 10 classes of 28x28, 66,126 for 62."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = _image_shape(input_shape, smallest=12)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        flat = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )


class CNN(_ImageModel):
    """The FEMNIST network of published simulator timings: 1.2 million parameters for 28x28. No dropout."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = _image_shape(input_shape, smallest=6)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, num_classes))


def _image_shape(shape: tuple[int, ...], *, smallest: int) -> tuple[int, int, int]:
    channels, height, width = (1, *shape) if len(shape) == 2 else shape if len(shape) == 3 else (0, 0, 0)
    if min(height, width) < smallest:
        raise FedeveError(
            "this model wants images",
            got=shape,
            do=f"use inputs of shape [H, W] or [C, H, W] of at least {smallest}x{smallest}, or model 'linear'",
        )
    return channels, height, width
