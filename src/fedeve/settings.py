"""Settings: fields of frozen dataclasses that carry their own help text, bounds and choices.

Methods, local work, data sets and runs are all such dataclasses, so one check at construction, one reader of
TOML tables and one generator of help texts serve them all. Reading files is not here.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from .errors import FedeveError, unknown

T = TypeVar("T")


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a help text and bounds: `low <= value <= high`, `above < value < below`."""
    metadata = {"help": help, "low": low, "above": above, "high": high, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def check(instance: Any, *, where: str = "") -> None:
    """Raise if a setting of `instance` has the wrong type or lies outside its bounds.

    A whole number where any number may stand becomes a float, and numpy's numbers become Python's, so that equal
    settings are written alike.
    """
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if "help" in field.metadata:
            plain = _as_kept(value, hints[field.name])
            _check_value(where + field.name, plain, hints[field.name], field.metadata)
            if plain is not value:
                object.__setattr__(instance, field.name, plain)  # the instance is frozen, but still being made


def as_kept(cls: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a checked table as an instance of the dataclass `cls` would keep them."""
    hints = typing.get_type_hints(cls)
    return {key: _as_kept(value, hints[key]) for key, value in table.items()}


def _as_kept(value: Any, hint: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    is_whole = isinstance(plain, int) and not isinstance(plain, bool)
    return float(plain) if is_whole and _fits(0.5, hint) else plain


def build(cls: type[T], table: Mapping[str, Any], *, where: str = "", kind: str = "setting") -> T:
    """An instance of the dataclass `cls` from a table of plain values, refusing unknown keys and bad values."""
    check_table(cls, table, where=where, kind=kind)
    return cls(**table)


def check_table(cls: type, table: Mapping[str, Any], *, where: str = "", kind: str = "setting") -> None:
    """Raise unless every key of `table` is a field of the dataclass `cls` with a value that fits it."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    for key, value in table.items():
        if key not in fields:
            raise unknown(f"{kind} {where + key!r}", key, fields)
        _check_value(where + key, value, hints[key], fields[key].metadata)


def describe(cls: type) -> dict[str, tuple[Any, str]]:
    """Every setting of a dataclass with its default and its help text."""
    return {f.name: (f.default, f.metadata["help"]) for f in dataclasses.fields(cls) if "help" in f.metadata}


_LARGEST = 2**63 - 1  # what every file format and library can hold
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def _check_value(name: str, value: Any, hint: Any, rules: Mapping[str, Any]) -> None:
    if hasattr(value, "ndim"):  # a tensor of one value per lane: each lane was checked as a number of its own
        return
    if not _fits(value, hint):
        raise FedeveError(f"{name} must be {_words(hint)}", got=value, do=f"write {_advice(rules)}")
    choices = rules.get("choices") or ()
    if choices and value not in choices:
        raise unknown(f"{name}", value, choices)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise FedeveError(f"{name} must be finite", got=value, do=f"write {_advice(rules)}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise FedeveError(f"{name} is too large", got=f"{len(str(value))} digits", do=f"write {_advice(rules)}")
    for rule, (word, holds) in _BOUNDS.items():
        bound = rules.get(rule)
        if bound is not None and not holds(value, bound):
            raise FedeveError(f"{name} must be {word} {bound:g}", got=value, do=f"write {_advice(rules)}")


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(hint) or hint)


_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "left out"}


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in typing.get_args(hint))
    return _WORDS.get(hint, str(getattr(hint, "__name__", hint)))


def _advice(rules: Mapping[str, Any]) -> str:
    bounds = [f"{word} {rules[rule]:g}" for rule, (word, _) in _BOUNDS.items() if rules.get(rule) is not None]
    what = f"one of {', '.join(rules['choices'])}" if rules.get("choices") else "a value"
    return f"{what}{' ' if bounds else ''}{' and '.join(bounds)} ({rules.get('help', 'see the documentation')})"
