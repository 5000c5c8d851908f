"""Options that several commands share: a dataclass whose fields are typer's options, told to each of them once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_options(kind: type[Any]) -> Callable[[Command], Command]:
    """A decorator: the command has every field of `kind` as an option of its own, and gets them as `options`."""
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        signature = inspect.Signature([*own, *shared])

        @functools.wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = kind(**{parameter.name: bound.arguments.pop(parameter.name) for parameter in shared})
            command(**bound.arguments, options=options)

        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
        return wrapped

    return decorate
