"""How figures look and where they go: one style, each figure as SVG, PNG and CSV, all listed in figures.json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..errors import FedeveError, Words
from ..record import write_atomically

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
INDEX = "figures.json"

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "fedeve", "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9,
    "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "lines.linewidth": 1.6, "axes.grid": True, "grid.color": "#8a93a3", "grid.alpha": 0.3, "grid.linewidth": 0.6,
    "axes.axisbelow": True, "figure.facecolor": "white", "axes.facecolor": "white",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure: what it says, how it is drawn, and its numbers."""

    name: str
    title: str
    caption: str
    """What is shown, in which setting."""
    reading: str
    """Two sentences: how to read it, and what is seen."""
    width: float
    height: float
    """In inches."""
    draw: Callable[[Figure], None]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Every number that is drawn."""


def save(drawing: Drawing, out: Path) -> dict[str, str]:
    """Write a figure's three files and put it into the folder's figures.json; returns its entry there."""
    pictures = _render(drawing)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(drawing.columns)
    writer.writerows([_plain(value) for value in row] for row in drawing.rows)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = Words(f"{out}: {error.strerror}")
        raise FedeveError("cannot write here", got=found, do="choose another folder") from error
    for suffix, content in {**pictures, "csv": table.getvalue().encode()}.items():
        write_atomically(out / f"{drawing.name}.{suffix}", content)
    entry = {"title": drawing.title, **{kind: f"{drawing.name}.{kind}" for kind in ("svg", "png", "csv")}}
    entry |= {"reading": drawing.reading, "caption": drawing.caption}
    others = [other for other in listed(out) if other.get("svg") != entry["svg"]]
    entries = sorted([*others, entry], key=lambda each: str(each.get("svg")))
    write_atomically(out / INDEX, (json.dumps(entries, indent=1, ensure_ascii=False) + "\n").encode())
    return entry


def listed(out: Path) -> list[dict[str, str]]:
    """The entries of a folder's figures.json, none if there is no such file yet."""
    path = out / INDEX
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_bytes())
        assert isinstance(entries, list)
    except (ValueError, AssertionError):
        raise FedeveError(f"{path} is damaged", got=path.read_bytes()[:40], do="remove it") from None
    return entries


def _render(drawing: Drawing) -> dict[str, bytes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(drawing.width, drawing.height), layout="constrained")
        drawing.draw(figure)
        found = {}
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            found[kind] = buffer.getvalue()
    return found


def _plain(value: Any) -> Any:
    return f"{value:.10g}" if isinstance(value, float) else "" if value is None else value
