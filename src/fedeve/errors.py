"""The one error users meet, in three parts: what is wrong, the value got, what to do.

It is raised at the doors (configuration, data file, reply, command line) and nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedeveError(ValueError):
    """Bad input, said in one line: `what` is wrong, the value `got`, and what to `do` about it."""

    def __init__(self, what: str, *, got: object, do: str) -> None:
        self.what, self.got, self.do = what, got, do
        super().__init__(f"{what}: got {_short(got)}; {do}")


def unknown(kind: str, name: object, known: Iterable[str]) -> FedeveError:
    """The error for a name that is not among the `known` ones, with the nearest of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}? " if near else ""
    return FedeveError(f"unknown {kind}", got=name, do=f"{advice}known: {', '.join(names)}")


def _short(value: object) -> str:
    # An f-string or path is shown as it is; anything long is cut so that the error stays one line.
    text = value if isinstance(value, Words) else repr(value)
    text = " ".join(str(text).split())
    return text if len(text) <= 200 else text[:197] + "..."


class Words(str):
    """A description standing in for a value too large to show (`a vector of 7 numbers`)."""
