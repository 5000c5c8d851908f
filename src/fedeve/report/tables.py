"""Tables: a section's numbers with their statistics. Means and deviations over seeds, printed values beside them,
ranks, and paired tests of FedEve against each other row. Pure: entries in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .results import DAMAGED, DONE, FAILED_RUN, NOT_RUN, REPEAT, UNFINISHED, Entry, Section
from .standing import standing

_TITLES = {"auc": "AUC"}


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its title, the factor from the record to the table, decimals, which end is good."""

    name: str
    title: str
    factor: float = 1.0
    digits: int = 4
    lower_is_better: bool = False

    def show(self, value: float) -> str:
        """A value in the table's units."""
        return f"{value:.{self.digits}f}" if math.isfinite(value) else "not finite"

    def show_difference(self, value: float) -> str:
        """A difference with its sign, in typographic minus."""
        return f"{value:+.{self.digits}f}".replace("-", "−")

    def better(self, one: float, other: float) -> bool:
        """Whether `one` is better than `other`."""
        return one < other if self.lower_is_better else one > other


def metric_named(name: str) -> Metric:
    """How to show a metric of a record: accuracies in percent as the paper prints them, the rest as they are."""
    if "accuracy" in name:
        return Metric(name, f"{name.replace('_', ' ')}, %", factor=100.0, digits=2)
    title = name.upper() if "@" in name else _TITLES.get(name, name.replace("_", " "))
    return Metric(name, title, lower_is_better="loss" in name)


@dataclass(frozen=True)
class Comparison:
    """A paired t test of the chosen row against another over the seeds they share."""

    num_seeds: int
    difference: float
    """Mean of chosen minus other, in the table's units."""
    wins: int
    """Seeds on which the chosen row is better."""
    p: float = math.nan
    """Two-sided; NaN where there are fewer than two seeds or the differences are all the same."""
    holm: float = math.nan
    """Corrected for the tests in the same column."""


@dataclass(frozen=True)
class Cell:
    """One row in one column: its runs, their values by seed, and what follows from them."""

    entries: tuple[Entry, ...] = ()
    values: Mapping[int, float] = field(default_factory=dict)
    mean: float = math.nan
    deviation: float = math.nan
    """The sample standard deviation over seeds; NaN for one seed."""
    rank: int | None = None
    best: bool = False
    """First of its column, and not because all are equal."""
    printed: tuple[float, float] | None = None
    difference: float | None = None
    """Ours minus printed."""
    noise: float | None = None
    """Twice the standard error of that difference; None where a deviation is unknown."""
    test: Comparison | None = None

    @property
    def within_noise(self) -> bool | None:
        if self.difference is None or self.noise is None:
            return None
        return abs(self.difference) <= self.noise

    @property
    def state(self) -> str:
        """`done` where there is a value; else why not: the gravest state of its runs."""
        if self.values:
            return DONE
        states = [entry.state for entry in self.entries]
        if DONE in states:
            return "not recorded"
        return next((state for state in (DAMAGED, FAILED_RUN, UNFINISHED) if state in states), NOT_RUN)

    @property
    def missing(self) -> list[Entry]:
        """Runs that should count and do not."""
        return [e for e in self.entries if e.state not in (DONE, REPEAT)]


@dataclass(frozen=True)
class Heading:
    """A column of a table: a metric in one of the section's columns."""

    title: str
    column: str
    metric: Metric


@dataclass(frozen=True)
class Table:
    """Rows by headings; `chosen` is the row that the others are tested against, where there is one."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[str, ...]
    cells: Mapping[tuple[str, int], Cell]
    chosen: str | None

    def mean_rank(self, row: str) -> float:
        """The mean of a row's ranks over the columns in which it has one."""
        ranks = [rank for n in range(len(self.headings)) if (rank := self.cells[row, n].rank) is not None]
        return float(np.mean(ranks)) if ranks else math.nan


def tables(section: Section) -> list[Table]:
    """A section's tables: one a metric; of a single column, one with the metrics side by side, as papers print it."""
    metrics = [metric_named(name) for name in section.metrics]
    section, notes = standing(section)
    columns = {column: column + notes.get(column, "") for column in section.columns}
    if not metrics or not columns:
        return []
    if len(columns) == 1:
        ((column, title),) = columns.items()
        recorded = [m for m in metrics if not _lacks(section, column, m)]
        return [_table(section, title, [Heading(m.title, column, m) for m in recorded or metrics])]
    kept = {
        m: [Heading(title, column, m) for column, title in columns.items() if not _lacks(section, column, m)]
        for m in metrics
    }
    return [_table(section, m.title, headings) for m, headings in kept.items() if headings]


def _lacks(section: Section, column: str, metric: Metric) -> bool:
    """Whether runs of a column are done and none of them recorded this metric: it is of another kind of data."""
    done = [e for e in section.entries if e.column == column and e.state == DONE and e.record is not None]
    return bool(done) and not any(e.record and metric.name in e.record.metrics for e in done)


def _table(section: Section, title: str, headings: Sequence[Heading]) -> Table:
    rows, chosen = section.rows, chosen_row(section)
    cells: dict[tuple[str, int], Cell] = {}
    for number, heading in enumerate(headings):
        column = {row: _cell(section, row, heading) for row in rows}
        column = _ranked(column, heading.metric)
        if chosen is not None:
            column = _tested(column, chosen, heading.metric)
        cells |= {(row, number): cell for row, cell in column.items()}
    return Table(title, tuple(headings), tuple(rows), cells, chosen)


def chosen_row(section: Section) -> str | None:
    """FedEve's row: the one called so, else the first whose method it is, as the paper has it before as released."""
    if "FedEve" in section.rows:
        return "FedEve"
    found = {e.row: e.config.get("method") for e in reversed(section.entries)}
    tables = {row: {"name": m} if isinstance(m, str) else m or {} for row, m in found.items()}
    eves = [row for row in section.rows if tables.get(row, {}).get("name") == "fedeve"]
    paper = [row for row in eves if tables[row].get("drift", "paper") == "paper"]
    return next(iter([*paper, *eves]), None)


def _cell(section: Section, row: str, heading: Heading) -> Cell:
    metric = heading.metric
    entries = tuple(e for e in section.entries if (e.row, e.column) == (row, heading.column))
    values = {
        e.seed: metric.factor * e.record.final(metric.name, last=section.last)
        for e in entries
        if e.state == DONE and e.record is not None and metric.name in e.record.metrics
    }
    cell = Cell(entries, values, printed=section.printed.get(metric.name, {}).get(row, {}).get(heading.column))
    if not values:
        return cell
    mean, deviation = mean_and_deviation(list(values.values()))
    cell = replace(cell, mean=mean, deviation=deviation)
    if cell.printed is None:
        return cell
    spread = deviation**2 / len(values) + cell.printed[1] ** 2 / section.printed_seeds
    noise = 2 * math.sqrt(spread) if math.isfinite(spread) else None
    return replace(cell, difference=mean - cell.printed[0], noise=noise)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is NaN for fewer than two values."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _ranked(cells: Mapping[str, Cell], metric: Metric) -> dict[str, Cell]:
    """Ranks among the rows that have a finite mean; equal means share the better rank."""
    means = [cell.mean for cell in cells.values() if math.isfinite(cell.mean)]

    def rank(cell: Cell) -> int | None:
        if not math.isfinite(cell.mean):
            return None
        return 1 + sum(metric.better(mean, cell.mean) for mean in means)

    ranks = {row: rank(cell) for row, cell in cells.items()}
    worse = any(place != 1 for place in ranks.values() if place is not None)
    return {row: replace(cell, rank=ranks[row], best=worse and ranks[row] == 1) for row, cell in cells.items()}


def _tested(cells: Mapping[str, Cell], chosen: str, metric: Metric) -> dict[str, Cell]:
    """Every other row with its test against the chosen one, corrected within this column."""
    tests = {row: paired(cells[chosen].values, cell.values, metric) for row, cell in cells.items() if row != chosen}
    found = {row: test for row, test in tests.items() if test is not None}
    corrected = dict(zip(found, holm([test.p for test in found.values()]), strict=True))
    return {
        row: replace(cell, test=replace(found[row], holm=corrected[row])) if row in found else cell
        for row, cell in cells.items()
    }


def paired(chosen: Mapping[int, float], other: Mapping[int, float], metric: Metric) -> Comparison | None:
    """The two-sided paired t test over the seeds that both have; None where they share none."""
    from scipy.special import stdtr

    seeds = [seed for seed in chosen if seed in other]
    if not seeds:
        return None
    differences = np.array([chosen[seed] - other[seed] for seed in seeds])
    wins = sum(metric.better(chosen[seed], other[seed]) for seed in seeds)
    test = Comparison(len(seeds), float(differences.mean()), wins)
    error = differences.std(ddof=1) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
    # Differences that are equal but for rounding say nothing of their spread.
    if not math.isfinite(error) or error <= 1e-12 * abs(test.difference):
        return test
    return replace(test, p=float(2 * stdtr(len(seeds) - 1, -abs(test.difference) / error)))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction of p values; NaNs stay and do not count.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted((n for n, p in enumerate(values) if not math.isnan(p)), key=lambda n: values[n])
    corrected, highest = list(values), 0.0
    for place, number in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * values[number]))
        corrected[number] = highest
    return corrected
