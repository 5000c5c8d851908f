"""One strategy class per method, made from the folder scan: `FedEve(fraction_train=0.1, server_lr=1.0, seed=7)`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from ..method import Method
from ..methods import all_methods
from .strategy import MethodStrategy


@functools.cache
def strategies() -> dict[str, type[MethodStrategy]]:
    """Every method's strategy class by the method's class name."""
    return {cls.__name__: strategy_of(cls) for cls in all_methods().values()}


def strategy_of(cls: type[Method]) -> type[MethodStrategy]:
    """The strategy class of a method: its hyper-parameters are keywords beside those of `MethodStrategy`."""
    fields = [field for field in dataclasses.fields(cls) if field.init]

    def __init__(self: MethodStrategy, *args: Any, **options: Any) -> None:  # noqa: N807
        chosen = {field.name: options.pop(field.name) for field in fields if field.name in options}
        MethodStrategy.__init__(self, cls(**chosen), *args, **options)

    own = list(inspect.signature(MethodStrategy.__init__).parameters.values())
    before = [parameter for parameter in own if parameter.name not in ("method", "options")]
    hyper = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields]
    __init__.__signature__ = inspect.Signature([*before, *hyper, own[-1]])  # type: ignore[attr-defined]
    what = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    about = f"{what}\n\nA Flower strategy; further keywords as `MethodStrategy` has them."
    members = {"__init__": __init__, "__doc__": about, "__module__": "fedeve.flower"}
    members["hyper_parameters"] = tuple(field.name for field in fields)
    return type(cls.__name__, (MethodStrategy,), members)
