"""Every method as in the paper and at its best, grid by grid."""

from __future__ import annotations

from collections import defaultdict

from cells import markdown, section

from fedeve.report import tables
from fedeve.report.tables import Table

GRIDS = (
    ("MNIST, Dirichlet 0.01", "tuned-mnist-1500", "accuracy, %", "FedProx, mu 1"),
    ("CIFAR-100, N = 500, Dirichlet 0.1", "tuned-cifar100-500", "accuracy, %", "FedProx, mu 1"),
    ("MovieLens-1M, lr 0.01, AUC", "tuned-movielens-1000", "AUC", "FedProx, mu 0.01"),
)
"""A title, a folder of results/, a metric, and FedProx's row of the paper, which depends on the data."""
PAPER = {
    "FedAvg, server_lr 1",
    "FedAvgM, server_lr 1, beta 0.9",
    "FedAdam, server_lr 0.001",
    "FedEve, server_lr 1",
    "FedEveAdam, server_lr 0.001",
}


def paper_and_tuned() -> str:
    """What a method reaches with the paper's values and with the best of its grid, and which those are."""
    cells: dict[str, list[str]] = defaultdict(list)
    for _, folder, metric, prox in GRIDS:
        table, number = one_column(folder, metric)
        means = {row: table.cells[row, number].mean for row in table.rows if table.cells[row, number].values}
        rows: dict[str, list[str]] = defaultdict(list)
        for row in means:
            rows[row.partition(", ")[0]].append(row)
        for method, its in rows.items():
            (untuned,), best = {*PAPER, prox} & set(its), max(its, key=means.__getitem__)
            before, after = map(table.headings[number].metric.show, (means[untuned], means[best]))
            after = f"**{after}**" if means[best] == max(means.values()) else after
            cells[method].append(f"{before}, {after} ({best.partition(', ')[2]})")
    return markdown(["", *(title for title, *_ in GRIDS)], [[method, *texts] for method, texts in cells.items()])


def one_column(name: str, metric: str) -> tuple[Table, int]:
    """The table and the number of the column that shows a metric, in a sweep of one setting."""
    found = next(t for t in tables.tables(section(name)) if metric in (t.title, *(h.title for h in t.headings)))
    return found, next((n for n, heading in enumerate(found.headings) if heading.title == metric), 0)
