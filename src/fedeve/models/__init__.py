"""Models by name: plain modules without running statistics."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..errors import unknown
from .lenet import CNN, LeNet5, Linear

ModelMaker = Callable[[tuple[int, ...], int], nn.Module]

MODELS: dict[str, ModelMaker] = {"linear": Linear, "lenet5": LeNet5, "cnn": CNN}


def create(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A model for inputs of this shape; its weights come from torch's current random state."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name](input_shape, num_classes)
