"""What there is: methods and data sets with their settings, as plain values and as the README's table."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from ..data.datasets import Dataset, all_datasets
from ..methods import all_methods
from ..settings import describe


def methods() -> dict[str, dict[str, Any]]:
    """Every method: what it is, its settings, its cost in vectors, its reference."""
    return {
        name: {
            "summary": _first_sentence(cls),
            "settings": describe(cls),
            "cost": _section(cls, "Cost"),
            "reference": _section(cls, "Reference"),
        }
        for name, cls in all_methods().items()
    }


def methods_markdown() -> str:
    """The table of methods in the README."""
    lines = ["| method | what it is | hyper-parameters | cost |", "|---|---|---|---|"]
    for name, about in methods().items():
        values = ", ".join(f"`{key}={default!r}`" for key, (default, _) in about["settings"].items())
        summary = about["summary"].replace("|", "\\|")
        lines.append(f"| `{name}` | {summary} | {values} | {about['cost']} |")
    return "\n".join(lines)


def datasets() -> dict[str, dict[str, Any]]:
    """Every data set: what it is, where it comes from, its settings."""
    return {
        name: {
            "summary": _first_sentence(cls),
            "source": cls.source,
            "licence": cls.licence,
            "citation": cls.citation,
            "homepage": getattr(cls, "homepage", ""),
            "files": [dataclasses.asdict(remote) for remote in getattr(cls, "remotes", ())],
            "settings": describe(cls),
        }
        for name, cls in all_datasets().items()
    }


def common_data_settings() -> dict[str, tuple[Any, str]]:
    """The settings that every data set has."""
    return describe(Dataset)


def _first_sentence(cls: type) -> str:
    return " ".join(inspect.getdoc(cls).split("\n\n")[0].split()) if inspect.getdoc(cls) else ""  # type: ignore[union-attr]


def _section(cls: type, name: str) -> str:
    """The text after `Name:` in a docstring, up to its full stop at a line's end."""
    lines = (inspect.getdoc(cls) or "").splitlines()
    found = next((number for number, line in enumerate(lines) if line.startswith(f"{name}:")), None)
    if found is None:
        return ""
    text = [lines[found].removeprefix(f"{name}:").strip()]
    for line in lines[found + 1 :]:
        if not line.strip() or ":" in line.split(" ")[0]:
            break
        text.append(line.strip())
    return " ".join(text)
