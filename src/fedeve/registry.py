"""Folders as registries: what a package's modules define is what exists, so that adding one is adding a file."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from typing import TypeVar

T = TypeVar("T")


@functools.cache
def subclasses_in(package: str, base: type[T]) -> dict[str, type[T]]:
    """The public, concrete subclasses of `base` that the modules of `package` define, by lower-case name, sorted."""
    found: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        for name, value in vars(module).items():
            mine = isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
            if mine and not inspect.isabstract(value) and not name.startswith("_"):
                found[name.lower()] = value
    return dict(sorted(found.items()))
