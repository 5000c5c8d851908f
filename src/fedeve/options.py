"""What commands share: options that are told to each of them once, and how they are stopped."""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, get_type_hints

import typer
import typer.core

Command = Callable[..., None]
MOST_THREADS, MOST_LANES = 1024, 4096  # beyond these a number is a slip of the hand
STOPPED = 130
_STOPS = (signal.SIGINT, signal.SIGTERM)


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


class Argument(typer.core.TyperArgument):
    """An argument that keeps its help: from version 8.5 on, Click forgets what Typer was told."""

    def __init__(self, *, help: str | None = None, **rest: Any) -> None:
        super().__init__(help=help, **rest)
        self.words = help or ""

    def get_help_record(self, ctx: Any) -> Any:
        found = super().get_help_record(ctx)
        if found is None or self.words in found[1]:
            return found
        return found[0], f"{self.words}  {found[1]}"


def a_number(value: float) -> float:
    """For an option's `callback`: refuse nan, which is neither below nor above any limit."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C or a polite kill ends the process with one line and exit code 130, wherever it is.

    It is for the time before a command has anything to lose, in which an exception could surface in the middle of an
    import that makes something else of it.
    """

    def end(*_: object) -> None:
        os.write(2, b"fedeve: stopped\n")
        os._exit(STOPPED)

    with _handled_by(end):
        yield


@contextmanager
def stoppable(words: str = "stopped") -> Iterator[None]:
    """Within it Ctrl-C or a polite kill raises, so that work is saved; it ends with a line and exit code 130."""
    with _handled_by(signal.default_int_handler):
        try:
            yield
        except KeyboardInterrupt as stop:
            print(f"fedeve: {str(stop) or words}", file=sys.stderr)
            raise typer.Exit(STOPPED) from None


@contextmanager
def _handled_by(handler: Callable[..., Any]) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in _STOPS]
    try:
        yield
    finally:
        for number, earlier in zip(_STOPS, before, strict=True):
            signal.signal(number, earlier)
