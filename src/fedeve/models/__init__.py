"""Models by name: plain modules without running statistics, made for a federation's inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import FedeveError, unknown
from .din import DIN
from .lenet import CNN, LeNet5, Linear
from .resnet import ResNet18

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": Linear,
    "lenet5": LeNet5,
    "cnn": CNN,
    "resnet18": ResNet18,
    "din": DIN,
}
"""Each is called with an input shape and a number of outputs, and with its options by keyword."""


def create(
    name: str, input_shape: tuple[int, ...], num_outputs: int, *, cardinalities: tuple[int, ...] = (), **options: Any
) -> nn.Module:
    """A model for such data; its weights come from torch's current random state.

    `cardinalities` are the numbers of values of categorical inputs, for models that embed them.
    """
    check(name, options)
    if "cardinalities" in inspect.signature(MODELS[name]).parameters:
        options["cardinalities"] = cardinalities
    return MODELS[name](input_shape, num_outputs, **options)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise unless there is a model of this name with these options."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    keywords = inspect.signature(MODELS[name]).parameters.values()
    known = {word.name for word in keywords if word.kind is word.KEYWORD_ONLY} - {"cardinalities"}
    for option in options:
        if option not in known and known:
            raise unknown(f"option 'model.{option}' of {name}", option, known)
        if option not in known:
            raise FedeveError(f"{name} has no options", got=f"model.{option}", do=f"--set model={name} leaves out all")
