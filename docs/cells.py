"""What the pages' tables are made of: the records under results/, and cells and tables in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from fedeve.experiments import paper_tables
from fedeve.report import results
from fedeve.report.results import Section
from fedeve.report.tables import Table

ROOT = Path(__file__).parent.parent
PARTITIONS = ("natural", "Dirichlet 1", "Dirichlet 0.1", "Dirichlet 0.01")


@cache
def section(name: str) -> Section:
    """The sweep of a folder below results/."""
    return results.read([ROOT / "results" / name]).sections[0]


def curves(name: str) -> dict[tuple[str, str, int], dict[int, float]]:
    """Accuracies in percent by round, of every run of a sweep by row, column and seed."""
    entries = [entry for entry in section(name).entries if entry.record is not None]
    return {
        (e.row, e.column, e.seed): {n["round"]: 100 * n["accuracy"] for n in e.record.lines if "accuracy" in n}
        for e in entries
    }


def values_of(table: Table, column: str) -> dict[str, dict[int, float]]:
    """What a table has of a column, by row and seed."""
    number = next(n for n, heading in enumerate(table.headings) if heading.column == column)
    return {row: table.cells[row, number].values for row in table.rows}


def printed_accuracies(name: str) -> dict[str, dict[str, list[float]]]:
    """What the paper prints for the rows of a table, by our names; nothing for rows of ours, or without a table."""
    found = paper_tables.build(paper_tables.TABLES[name], seeds=1).printed["accuracy"] if name else {}
    return defaultdict(dict, {row: dict(cells) for row, cells in found.items()})


def beside(ours: str, printed: str) -> str:
    """A cell of ours with what is printed in brackets, if anything is."""
    return f"{ours} ({printed})" if printed else ours


def percents(printed: Sequence[float] | None) -> str:
    """A printed accuracy: mean and deviation, or nothing."""
    return f"{printed[0]:.2f} ± {printed[1]:.2f}" if printed else ""


def ours(table: Table, row: str, number: int) -> str:
    """What we measured: mean and deviation over seeds, bold where it is the best of its column; else why not."""
    cell, metric = table.cells[row, number], table.headings[number].metric
    if not cell.values:
        return cell.state
    spread = "" if cell.deviation != cell.deviation else f" ± {metric.show(cell.deviation)}"
    text = metric.show(cell.mean) + spread
    return f"**{text}**" if cell.best else text


def printed_cell(table: Table, row: str, number: int) -> str:
    """What the paper prints there, or nothing."""
    cell, metric = table.cells[row, number], table.headings[number].metric
    return " ± ".join(map(metric.show, cell.printed)) if cell.printed else ""


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with its numbers to the right."""
    rows = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*rows, *(f"| {' | '.join(line)} |" for line in lines)])
