"""Curves: what a page needs of every run to draw it and to trace it, thinned to what an eye can see.

A curve of more than `POINTS` points is cut into stretches of equally many rounds and each is replaced by its mean.
Values of curves have four significant digits. Tables are computed elsewhere, from everything.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import Record
from .results import DONE, Entry, Section
from .tables import Metric, chosen_row, metric_named

POINTS = 300
DIGITS = 4
_FACTS = {
    "gain": "Kalman gain",
    "period_drift": "period drift per parameter",
    "client_drift": "client drift per parameter",
    "variance": "posterior variance",
}


def section_data(section: Section) -> dict[str, Any]:
    """A section for the page: its names, what can be drawn, and every run."""
    rows, columns, chosen = section.rows, section.columns, chosen_row(section)
    grids = _Grids()
    # Seeds are averaged round by round: where one has facts only as means of lines, so have the others.
    means = any(e.record is not None and e.record.is_packed for e in section.entries)
    runs = [
        {"row": rows.index(e.row), "column": columns.index(e.column), **_run(e, section, grids, means=means)}
        for e in section.entries
    ]
    return {
        "rows": rows,
        "columns": columns,
        "chosen": None if chosen is None else rows.index(chosen),
        "metrics": [_metric(metric_named(name)) for name in section.metrics],
        "quantities": _quantities(section),
        "last": section.last,
        "thinned": grids.thinned,
        "grids": grids.lists,
        "runs": runs,
    }


def _metric(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "title": metric.title,
        "factor": metric.factor,
        "digits": metric.digits,
        "lower": metric.lower_is_better,
    }


def _quantities(section: Section) -> list[dict[str, Any]]:
    """What there are curves of: every metric of any record, the section's own first, then facts."""
    records = [e.record for e in section.entries if e.record is not None]
    metrics = dict.fromkeys([*section.metrics, *(name for record in records for name in record.metrics)])
    facts = {name for record in records for name in record.fact_names}
    known = [*(name for name in _FACTS if name in facts), *sorted(facts - set(_FACTS))]
    shown = [metric_named(name) for name in metrics]
    return [
        *({"name": m.name, "title": m.title, "factor": m.factor, "digits": m.digits} for m in shown),
        *({"name": f"fact:{name}", "title": _FACTS.get(name, name.replace("_", " ")), "factor": 1} for name in known),
    ]


def _run(entry: Entry, section: Section, grids: _Grids, *, means: bool) -> dict[str, Any]:
    """One run: where it stands, how it can be traced, and its curves, those of facts of all rounds or of means."""
    plain: dict[str, Any] = {
        "seed": entry.seed,
        "state": entry.state,
        "reason": entry.reason,
        "record": str(entry.path),
        "timing": entry.timing,
    }
    record = entry.record
    if record is None:
        return plain | {"header": {"config": entry.config}, "final": {}, "curves": {}, "highs": {}}
    answered = np.cumsum([number for line in record.lines for number in line["answered"]])
    rounds = record.evaluated if means else np.arange(1, len(answered) + 1)
    facts = record.fact_means if means else record.facts
    curves = {name: grids.curve(record.evaluated, record.metric(name)) for name in record.metrics}
    curves |= {f"fact:{name}": grids.curve(rounds, facts(name)) for name in record.fact_names}
    judged = [metric_named(name) for name in section.metrics if name in record.metrics]
    return plain | {
        "header": record.header,
        "rounds": len(answered),
        "final": {
            m.name: _number(record.final(m.name, last=section.last), digits=12) for m in judged if entry.state == DONE
        },
        "lost": len(record.lost),
        "left_out": len(record.left_out),
        "examples_per_client": _examples_per_client(entry, int(answered[-1]) if len(answered) else 0),
        "curves": curves,
        "highs": {m.name: _highs(record, m, answered) for m in judged},
    }


def _examples_per_client(entry: Entry, answered: int) -> float | None:
    """Examples that a client trains on in a round, on average: counted where time was kept, else expected."""
    if entry.record is None or not answered:
        return None
    if "examples" in entry.timing:
        return _number(entry.timing["examples"] / answered)
    data = entry.record.header.get("data", {})
    epochs = entry.config.get("local", {}).get("epochs", 1)
    return _number(epochs * data["num_examples"] / data["num_clients"]) if data.get("num_clients") else None


def _highs(record: Record, metric: Metric, answered: NDArray[np.int64]) -> list[list[float | None]]:
    """Rounds at which a metric was better than ever before, those values, and how many clients had answered by then.

    From these follows, for any value, the first evaluation that reached it; nothing is lost by thinning.
    """
    values = record.metric(metric.name)
    signed = np.where(np.isnan(values), -np.inf, -values if metric.lower_is_better else values)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(signed)[:-1]]) if len(signed) else signed
    better = np.flatnonzero(signed > before)
    rounds = record.evaluated[better]
    return [
        [int(round) for round in rounds],
        [_number(value, digits=8) for value in values[better]],
        [int(number) for number in answered[rounds - 1]] if len(rounds) else [],
    ]


class _Grids:
    """The rounds that curves run over, each list once, and the largest number of points that became one."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self.places: dict[tuple[int, ...], int] = {}
        self.thinned = 1

    def curve(self, rounds: NDArray[np.int64], values: NDArray[np.float64]) -> list[Any]:
        """A curve as the number of its grid and its values, null where there is none."""
        size = math.ceil(len(rounds) / POINTS) or 1
        self.thinned = max(self.thinned, size)
        grid = tuple(int(rounds[min(start + size, len(rounds)) - 1]) for start in range(0, len(rounds), size))
        if grid not in self.places:
            self.places[grid] = len(self.lists)
            self.lists.append(list(grid))
        return [self.places[grid], [_number(value) for value in _thinned(values, size).tolist()]]


def _thinned(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Means of every `size` neighbours, of the finite ones among them; NaN where there is none."""
    padded = np.pad(values, (0, -len(values) % size), constant_values=np.nan).reshape(-1, size)
    known = np.isfinite(padded)
    counts = known.sum(1)
    return np.where(counts > 0, np.where(known, padded, 0.0).sum(1) / np.maximum(counts, 1), np.nan)


def _number(value: float, *, digits: int = DIGITS) -> float | None:
    """A JSON number of so many significant digits, without a needless fraction."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
