"""Writes tables of the pages from the records under results/ and what benchmarks left: `python docs/tables.py`.

Each stands between `<!-- NAME -->` and `<!-- end -->`, so that a page cannot say anything that the records do not.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cells import (
    PARTITIONS,
    ROOT,
    beside,
    curves,
    markdown,
    ours,
    percents,
    printed_accuracies,
    printed_cell,
    section,
    values_of,
)
from leads import briefly, leads, on_the_way, verdicts
from tuning import one_column, paper_and_tuned

from fedeve.record import Record
from fedeve.report import tables

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RANKINGS = ("AUC", "HR@5", "HR@10", "NDCG@5", "NDCG@10")


def ranking(column: str) -> str:
    """Table 2 in one of its columns: ours, and in brackets what is printed."""
    found = [t for t in tables.tables(section("table2")) if t.title in RANKINGS]
    number = next(n for n, heading in enumerate(found[0].headings) if heading.column == column)
    lines = [
        [row, *(beside(ours(table, row, number), printed_cell(table, row, number)) for table in found)]
        for row in found[0].rows
        if found[0].cells[row, number].values
    ]
    return markdown(["", *(table.title for table in found)], lines)


def accuracies(name: str, *, prefix: str, printed: str = "") -> str:
    """A table of accuracies: the columns that begin with the prefix, without it.

    With `printed`, one of the paper's tables, its numbers stand in brackets, FEMNIST's beside a stand-in's.
    """
    (table,), theirs = tables.tables(section(name)), printed_accuracies(printed)
    numbers = [n for n, heading in enumerate(table.headings) if heading.column.startswith(prefix)]
    assert numbers, f"{name} has no column {prefix}"
    columns = {number: table.headings[number].column.removeprefix("glyphs in place of ") for number in numbers}
    head = ["", *(table.headings[number].title.removeprefix(prefix) for number in numbers)]
    lines = [
        [row, *(beside(ours(table, row, n), percents(theirs[row].get(column))) for n, column in columns.items())]
        for row in table.rows
    ]
    return markdown(head, lines)


def at_a_glance() -> str:
    """Table 1 cell by cell, and in brackets what is printed."""
    printed = printed_accuracies("table1")
    found = {name: tables.tables(section(name))[0] for name in ("table1-cifar100", "table3-glyphs-full")}
    head = [f"FEMNIST, {partition}" for partition in PARTITIONS]
    head += [f"CIFAR-100, {partition}" for partition in PARTITIONS[1:]]

    def cell(row: str, column: str) -> str:
        names = (column, f"glyphs in place of {column}, E = 1")
        sweep, number = next(
            (name, number)
            for name, table in found.items()
            for number, heading in enumerate(table.headings)
            if heading.column in names and row in table.rows and table.cells[row, number].values
        )
        return beside(ours(found[sweep], row, number).strip("*"), percents(printed[row].get(column)))

    rows = found["table3-glyphs-full"].rows
    return markdown(["", *head], [[row, *(cell(row, column) for column in head)] for row in rows])


def levels() -> str:
    """CIFAR-100 at Dirichlet 0.1, one seed, one setting changed at a time: midway, and over the last 100 rounds."""
    column, seed = "CIFAR-100, Dirichlet 0.1", 192
    changed = {
        "as in the table": "table1-cifar100",
        "local rate 0.03": "table1-cifar100-lr0.03",
        "ImageNet's stem": "table1-cifar100-imagenet-stem",
        "32 groups": "table1-cifar100-groups32",
        "augmented images": "table1-cifar100-augmented",
    }
    lines = []
    for title, name in changed.items():
        (table,), line = tables.tables(section(name)), [title]
        for row in ("FedAvg", "FedEve"):
            curve, values = curves(name)[row, column, seed], values_of(table, column)[row]
            end = f"{values[seed]:.2f}" if max(curve) == 1500 else f"ended at {max(curve)}"
            line += [f"{statistics.mean([curve[600], curve[650]]):.2f}", end]
        lines.append(line)
    printed = printed_accuracies("table1")
    ends = [percents(printed[row][column]) for row in ("FedAvg", "FedEve")]
    head = [f"{row}{words}" for row in ("FedAvg", "FedEve") for words in (", rounds 600 and 650", "")]
    return markdown(["", *head], [*lines, ["printed", "", ends[0], "", ends[1]]])


def ranked(*columns: tuple[str, str, str]) -> str:
    """Sweeps side by side, each column a title, a folder and a metric; rows from the last one's best, then others."""
    found = [one_column(folder, metric) for _, folder, metric in columns]
    order: list[str] = []
    for table, number in reversed(found):
        rows = [row for row in table.rows if row not in order and table.cells[row, number].values]
        worse = 1.0 if table.headings[number].metric.lower_is_better else -1.0
        means = {row: worse * table.cells[row, number].mean for row in rows}
        order += sorted(rows, key=means.__getitem__)
    lines = [[row, *(ours(t, row, n) if row in t.rows else "not run" for t, n in found)] for row in order]
    return markdown(["", *(title for title, _, _ in columns)], lines)


def noise() -> str:
    """What `benchmarks/noise.py` found, by partition."""
    found = benchmark("noise")
    head = {"I / R": "I / R, the paper's", "I / J": "I / J, the jackknife's", "I / B": "I / B, from successive rounds"}
    head |= {"clients that count": "clients that count", "gain": "median gain"}
    lines = [
        [partition, *(f"{found[partition.lower().replace('et 1', 'et 1.0')][name]:.2f}" for name in head)]
        for partition in PARTITIONS
    ]
    return markdown(["", *head.values()], lines)


def benchmark(name: str) -> dict[str, Any]:
    """What a benchmark left."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _lanes(step: dict[str, Any]) -> str:
    """How many lanes a step has, and how many of them are at work where it is not all."""
    busy = step.get("busy", step["width"])
    return str(step["width"]) if busy == step["width"] else f"{step['width']}, {busy} of them at work"


def steps() -> str:
    """What `benchmarks/steps.py` found: one step of a pool, by width."""
    kinds = {
        "lenet5": "LeNet-5, batch 20",
        "din": "DIN, batch 100, history 50, Adam",
        "resnet18": "ResNet-18, batch 20",
        "resnet18_tf32": "ResNet-18, batch 20",
    }
    lines = [
        [words, step["precision"], _lanes(step), f"{step['ms']:.2f} ms", f"{step['lane_steps_per_second']:,}"]
        for name, words in kinds.items()
        for step in benchmark(f"steps-{name}")["steps"]
    ]
    return markdown(["a step", "precision", "lanes", "time", "lane-steps/s"], lines)


def widths() -> str:
    """What `benchmarks/widths.py` counted, by partition."""
    found = benchmark("widths")
    ways = ("a lane for every client", "as many as are of use")
    lines = []
    for partition in (*PARTITIONS, "all of them"):
        counted = found[partition.lower().replace("et 1", "et 1.0")]
        texts = [f"{c['width']}, {c['steps']:,}, {100 * c['occupancy']:.0f} %" for c in map(counted.get, ways)]
        lines.append([partition, *texts])
    return markdown(["partition", *(f"{way}: lanes, steps, full" for way in ways)], lines)


def conditions() -> str:
    """FedAvg under the four conditions over the paper's rounds, in percent of accuracy, means over seeds."""
    found: dict[tuple[str, str], list[dict[int, float]]] = defaultdict(list)
    for (row, column, _), curve in curves("fig2b").items():
        found[row, column].append(curve)
    lines, columns = [], section("fig2b").columns
    for row in sorted(section("fig2b").rows, key=lambda row: -float(row.partition("alpha ")[2] or "inf")):
        cells = [row]
        for column in columns:
            seeds = found[row, column]
            last = [[value for n, value in curve.items() if n > 1400] for curve in seeds]
            ends = list(map(statistics.mean, last))
            spread = f" ± {statistics.stdev(ends):.1f}" if len(ends) > 1 else ""
            reached = statistics.mean(min(n for n, value in curve.items() if value >= 95) for curve in seeds)
            cells += [f"{reached:.0f}", f"{statistics.mean(ends):.1f}{spread}, {min(map(min, last)):.1f}"]
        lines.append(cells)
    head = [f"{column}: {words}" for column in columns for words in ("first at 95 %", "last 100 rounds, lowest")]
    return markdown(["", *head], lines)


def together() -> str:
    """How FedEve's estimates of both drifts move while a model learns: medians over seeds, one local epoch."""
    places = [
        *(("glyphs", "table3-glyphs-full", f"glyphs in place of FEMNIST, {p}, E = 1", p) for p in PARTITIONS),
        *(("MNIST", "table3-mnist", f"mnist in place of FEMNIST, {p}, E = 1", p) for p in PARTITIONS),
        *(("CIFAR-100, N = 100", "table1-cifar100", f"CIFAR-100, {p}", p) for p in PARTITIONS[1:]),
    ]
    lines = []
    for title, folder, column, partition in places:
        entries = [e for e in section(folder).entries if (e.row, e.column) == ("FedEve", column) and e.record]
        seeds = np.array([_falls_and_correlation(entry.record) for entry in entries])
        period, client, correlation = np.median(seeds, axis=0)
        lines.append([f"{title}, {partition}", f"{period:.1f}", f"{client:.1f}", f"{correlation:.2f}"])
    head = ["", "Q falls by a factor of", "R falls by", "correlation of their changes"]
    return markdown(head, lines)


def _falls_and_correlation(record: Record) -> tuple[float, float, float]:
    """First tenth of a run's lines over its last, for either drift; and how log Q and log R change from line to line.

    The very first line is left out, since M starts at zero.
    """
    q, r = (np.array(record.fact_means(name))[1:] for name in ("period_drift", "client_drift"))
    tenth = len(q) // 10
    falls = [float(np.median(drift[:tenth]) / np.median(drift[-tenth:])) for drift in (q, r)]
    return falls[0], falls[1], float(np.corrcoef(np.diff(np.log(q)), np.diff(np.log(r)))[0, 1])


PERCENT = "accuracy, %"
CIFAR_PLACES = [(f"CIFAR-100, Dirichlet {alpha}", seed) for alpha in ("1", "0.1", "0.01") for seed in (192, 225, 226)]


BLOCKS: dict[str, Callable[[], str]] = {
    "table2 lr 0.01": lambda: ranking("MovieLens-1M, lr 0.01"),
    "table2 lr 0.001": lambda: ranking("MovieLens-1M, lr 0.001"),
    "briefly": briefly,
    "verdicts": verdicts,
    "table1": at_a_glance,
    "table1 cifar100": lambda: accuracies("table1-cifar100", prefix="CIFAR-100, ", printed="table1"),
    "table1 cifar100 on the way": lambda: on_the_way("table1-cifar100", CIFAR_PLACES),
    "table1 cifar100 augmented": lambda: accuracies(
        "table1-cifar100-augmented", prefix="CIFAR-100, ", printed="table1"
    ),
    "table1 cifar100 levels": levels,
    "table1 cifar100 in 500": lambda: accuracies("table1-cifar100-500", prefix="CIFAR-100 in 500 clients, "),
    "table1 cifar100 lenet5": lambda: accuracies("table1-cifar100-lenet5", prefix="CIFAR-100, "),
    "table1 cifar100 rates": lambda: ranked(
        *((f"local rate {rate}", f"table1-cifar100-500-lenet5-lr{rate}", PERCENT) for rate in ("0.01", "0.1", "0.03"))
    ),
    "table1 cifar100 rates resnet18": lambda: ranked(
        ("local rate 0.01", "table1-cifar100-500", "CIFAR-100 in 500 clients, Dirichlet 0.1"),
        ("local rate 0.03", "table1-cifar100-500-lr0.03", PERCENT),
    ),
    "table1 glyphs": lambda: accuracies("table1-glyphs", prefix="glyphs in place of FEMNIST, "),
    **{
        f"table3 {partition}": partial(
            accuracies, "table3-glyphs-full", prefix=f"glyphs in place of FEMNIST, {partition}, ", printed="table3"
        )
        for partition in PARTITIONS
    },
    "table3 leads": lambda: leads("table3-glyphs-full", "glyphs"),
    "table1 mnist": lambda: accuracies("table1-mnist", prefix="mnist in place of FEMNIST, "),
    **{
        f"table3 mnist {partition}": partial(
            accuracies, "table3-mnist", prefix=f"mnist in place of FEMNIST, {partition}, "
        )
        for partition in PARTITIONS
    },
    "table3 mnist leads": lambda: leads("table3-mnist", "mnist"),
    "ablation": lambda: ranked(
        ("after 150 rounds", "taken-apart-mnist", PERCENT), ("after 1,500 rounds", "taken-apart-mnist-1500", PERCENT)
    ),
    "ablation glyphs": lambda: ranked(
        ("after 600 rounds", "taken-apart-glyphs", PERCENT), ("after 1,500 rounds", "taken-apart-glyphs-1500", PERCENT)
    ),
    "ablation cifar100": lambda: ranked((PERCENT, "taken-apart-cifar100-500-lenet5", PERCENT)),
    "noise": noise,
    "tuned": paper_and_tuned,
    "tuned mnist": lambda: ranked(
        ("after 150 rounds", "tuned-mnist", PERCENT), ("after 1,500 rounds", "tuned-mnist-1500", PERCENT)
    ),
    "tuned cifar100": lambda: ranked((PERCENT, "tuned-cifar100-500", PERCENT)),
    "tuned glyphs": lambda: ranked((PERCENT, "tuned-glyphs", PERCENT)),
    "tuned movielens": lambda: ranked(
        ("AUC after 60 rounds", "tuned-movielens", "AUC"),
        ("HR@10 after 1,000", "tuned-movielens-1000", "HR@10"),
        ("AUC after 1,000", "tuned-movielens-1000", "AUC"),
    ),
    "steps": steps,
    "widths": widths,
    "conditions": conditions,
    "together": together,
}


def refreshed(text: str) -> str:
    """A page's text with every table made anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- ([^>]+?) -->\n.*?<!-- end -->", block, text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
