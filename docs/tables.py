"""Writes tables of the pages from the records under results/ and what benchmarks left: `python docs/tables.py`.

Each stands between `<!-- NAME -->` and `<!-- end -->`, so that a page cannot say anything that the records do not.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedeve.experiments import paper_tables
from fedeve.report import results, tables
from fedeve.report.results import Section
from fedeve.report.tables import Table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / name for name in ("reproduction.md", "performance.md", "drift.md")]
PARTITIONS = ("natural", "Dirichlet 1", "Dirichlet 0.1", "Dirichlet 0.01")


@cache
def section(name: str) -> Section:
    """The sweep of a folder below results/."""
    return results.read([ROOT / "results" / name]).sections[0]


def ranking(column: str) -> str:
    """Table 2 in one of its columns: ours and printed side by side."""
    found = [t for t in tables.tables(section("table2")) if t.title in ("AUC", "HR@5", "HR@10", "NDCG@10")]
    number = next(n for n, heading in enumerate(found[0].headings) if heading.column == column)
    head = ["", *(word for table in found for word in (table.title, "printed"))]
    lines = []
    for row in found[0].rows:
        cells = [(table, table.cells[row, number]) for table in found]
        if cells[0][1].values:
            texts = [(_ours(table, row, number), _printed(table, row, number)) for table, _ in cells]
            lines.append([row, *(text for pair in texts for text in pair)])
    return f"{found[0].headings[number].title}\n\n{_markdown(head, lines)}"


def accuracies(name: str, *, prefix: str, printed: str = "") -> str:
    """A table of accuracies: the columns that begin with the prefix, without it.

    With `printed`, one of the paper's tables, its numbers stand in brackets, FEMNIST's beside a stand-in's.
    """
    (table,), theirs = tables.tables(section(name)), _all_printed(printed)
    numbers = [n for n, heading in enumerate(table.headings) if heading.column.startswith(prefix)]
    assert numbers, f"{name} has no column {prefix}"
    columns = {number: table.headings[number].column.removeprefix("glyphs in place of ") for number in numbers}
    head = ["", *(table.headings[number].title.removeprefix(prefix) for number in numbers)]
    lines = [
        [row, *(_beside(_ours(table, row, n), theirs[row].get(column)) for n, column in columns.items())]
        for row in table.rows
    ]
    return _markdown(head, lines)


def on_the_way(name: str, places: Sequence[tuple[str, int]]) -> str:
    """At how many of the evaluations that both have FedEve is ahead of each other row, by column and seed.

    And by how many points at rounds 300 and 750 and in the table.
    """
    curves, (table,) = _curves(name), tables.tables(section(name))
    lines, total = [], Counter[tuple[str, str]]()
    rivals = [row for row in section(name).rows if row != "FedEve"]
    for place in places:
        line, values, seed = [_words(place)], _values(table, place[0]), place[1]
        for rival in rivals:
            ours, theirs = curves["FedEve", *place], curves.get((rival, *place), {})
            common = [n for n in ours if n in theirs]
            won = sum(ours[n] > theirs[n] for n in common)
            total.update({(rival, "won"): won, (rival, "of"): len(common)})
            first, second = values["FedEve"], values[rival]
            leads = [ours[n] - theirs[n] for n in (300, 750) if n in common]
            if seed in first and seed in second:
                leads.append(first[seed] - second[seed])
            line.append(f"{won}/{len(common)}: {', '.join(f'{lead:+.1f}' for lead in leads)}" if common else "not run")
        lines.append(line)
    lines.append(["of all", *(f"{total[rival, 'won']}/{total[rival, 'of']}" for rival in rivals)])
    return _markdown(["FedEve ahead of", *rivals], lines)


def _curves(name: str) -> dict[tuple[str, str, int], dict[int, float]]:
    """Accuracies in percent by round, of every run of a sweep by row, column and seed."""
    entries = [entry for entry in section(name).entries if entry.record is not None]
    return {
        (e.row, e.column, e.seed): {n["round"]: 100 * n["accuracy"] for n in e.record.lines if "accuracy" in n}
        for e in entries
    }


def _values(table: Table, column: str) -> dict[str, dict[int, float]]:
    """What a table has of a column, by row and seed."""
    number = next(n for n, heading in enumerate(table.headings) if heading.column == column)
    return {row: table.cells[row, number].values for row in table.rows}


def _words(place: tuple[str, int]) -> str:
    column, seed = place
    return f"{column.partition(', ')[2]}, seed {seed}"


def at_a_glance() -> str:
    """Table 1 cell by cell, and in brackets what is printed."""
    printed = _all_printed("table1")
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
        ours = _ours(found[sweep], row, number).strip("*")
        return _beside(ours, printed[row].get(column))

    rows = found["table3-glyphs-full"].rows
    return _markdown(["", *head], [[row, *(cell(row, column) for column in head)] for row in rows])


PAIRS = [("FedEve", rival) for rival in ("FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "FedOpt (FedAdam)")]
PAIRS += [("FedEveAdam (ours)", "FedOpt (FedAdam)")]


EPOCHS = {", E = 1": [", E = 1"], ", E = 3 and 5": [", E = 3", ", E = 5"]}


def leads(name: str, standin: str) -> str:
    """Table 3 seed by seed: how far one method is before another, in points, and on how many of the seeds."""
    (table,), printed = tables.tables(section(name)), _all_printed("table3")
    lines, wins, seeds = [], Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for number, heading in enumerate(table.headings):
        title, column = (
            text.removeprefix(f"{standin} in place of FEMNIST, ") for text in (heading.title, heading.column)
        )
        line = [title]
        for pair in PAIRS:
            gaps = _gaps(table, number, pair)
            won = sum(gap > 0 for gap in gaps)
            wins[pair] += won
            seeds[pair] += len(gaps)
            line.append(f"{sum(gaps) / len(gaps):+.2f}, {won}/{len(gaps)}")
        first, second = (printed[row][f"FEMNIST, {column}"][0] for row in ("FedEve", "FedAvg"))
        line[1] += f" ({first - second:+.2f})"
        lines.append(line)
    lines.append(["of all", *(f"{wins[pair]}/{seeds[pair]}" for pair in PAIRS)])
    return _markdown(["", *_pair_titles()], lines)


def _gaps(table: Table, number: int, pair: tuple[str, str]) -> list[float]:
    """How far one row is before another, seed by seed."""
    ours, theirs = (table.cells[row, number].values if row in table.rows else {} for row in pair)
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def verdicts() -> str:
    """Where one method wins, ties and loses against another, over all pairs of runs with one setting and seed."""
    label = PARTITIONS[1:]
    places = [("glyphs", "table3-glyphs-full", "glyphs in place of FEMNIST", PARTITIONS)]
    places += [("MNIST", "table3-mnist", "mnist in place of FEMNIST", PARTITIONS)]
    places += [("CIFAR-100, N = 100", "table1-cifar100", "CIFAR-100", label)]
    places += [("CIFAR-100, N = 100, augmented", "table1-cifar100-augmented", "CIFAR-100", ("Dirichlet 0.1",))]
    places += [("CIFAR-100, N = 500", "table1-cifar100-500", "CIFAR-100 in 500 clients", label)]
    places += [("MovieLens-1M, HR@10", "table2", "MovieLens-1M", ("lr 0.01", "lr 0.001"))]
    lines = []
    for title, folder, prefix, settings in places:
        table = next(t for t in tables.tables(section(folder)) if folder != "table2" or t.title == "HR@10")
        scale = 100 if folder == "table2" else 1
        for setting in settings:
            numbers = {heading.column: n for n, heading in enumerate(table.headings)}
            ways = EPOCHS if folder.startswith("table3") else {"": [""]}
            for words, endings in ways.items():
                columns = [numbers[f"{prefix}, {setting}{ending}"] for ending in endings]
                found = [[scale * gap for n in columns for gap in _gaps(table, n, pair)] for pair in PAIRS]
                lines.append([f"{title}, {setting}{words}", *map(_verdict, found)])
    return _markdown(["", *_pair_titles()], lines)


def _verdict(gaps: Sequence[float]) -> str:
    """Of four pairs or more, nine tenths decide; the median, since a run that fails is far away from all others."""
    if not gaps:
        return "not run"
    middle, won = statistics.median(gaps), sum(gap > 0 for gap in gaps)
    if len(gaps) < 4:
        return f"{middle:+.1f}" + (f" ({won}/{len(gaps)})" if len(gaps) > 1 else "")
    word = "**wins**" if won >= 0.9 * len(gaps) else "loses" if won <= 0.1 * len(gaps) else "ties"
    return f"{word} {middle:+.2f} ({won}/{len(gaps)})"


def _pair_titles() -> list[str]:
    short = {"FedOpt (FedAdam)": "FedAdam", "FedEveAdam (ours)": "FedEveAdam"}
    return [f"{short.get(a, a)} - {short.get(b, b)}" for a, b in PAIRS]


def _all_printed(name: str) -> dict[str, dict[str, list[float]]]:
    """What the paper prints for the rows of a table, by our names; nothing for rows of ours, or without a table."""
    found = paper_tables.build(paper_tables.TABLES[name], seeds=1).printed["accuracy"] if name else {}
    return defaultdict(dict, {row: dict(cells) for row, cells in found.items()})


def _beside(ours: str, printed: Sequence[float] | None) -> str:
    return ours if printed is None else f"{ours} ({printed[0]:.2f} ± {printed[1]:.2f})"


def ranked(*columns: tuple[str, str, str]) -> str:
    """Sweeps side by side, each column a title, a folder and a metric; rows from the last one's best, then others."""
    found = [_one_column(folder, metric) for _, folder, metric in columns]
    order: list[str] = []
    for table, number in reversed(found):
        rows = [row for row in table.rows if row not in order and table.cells[row, number].values]
        worse = 1.0 if table.headings[number].metric.lower_is_better else -1.0
        means = {row: worse * table.cells[row, number].mean for row in rows}
        order += sorted(rows, key=means.__getitem__)
    lines = [[row, *(_ours(t, row, n) if row in t.rows else "not run" for t, n in found)] for row in order]
    return _markdown(["", *(title for title, _, _ in columns)], lines)


def _one_column(name: str, metric: str) -> tuple[Table, int]:
    """The table and the number of the column that shows a metric, in a sweep of one setting."""
    found = next(t for t in tables.tables(section(name)) if metric in (t.title, *(h.title for h in t.headings)))
    return found, next((n for n, heading in enumerate(found.headings) if heading.title == metric), 0)


def noise() -> str:
    """What `benchmarks/noise.py` found, by partition."""
    found = benchmark("noise")
    head = {"I / R": "I / R, the paper's", "I / J": "I / J, the jackknife's", "I / B": "I / B, from successive rounds"}
    head |= {"clients that count": "clients that count", "gain": "median gain"}
    lines = [
        [partition, *(f"{found[partition.lower().replace('et 1', 'et 1.0')][name]:.2f}" for name in head)]
        for partition in PARTITIONS
    ]
    return _markdown(["", *head.values()], lines)


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
    }
    lines = [
        [words, step["precision"], _lanes(step), f"{step['ms']:.2f} ms", f"{step['lane_steps_per_second']:,}"]
        for name, words in kinds.items()
        for step in benchmark(f"steps-{name}")["steps"]
    ]
    return _markdown(["a step", "precision", "lanes", "time", "lane-steps/s"], lines)


def widths() -> str:
    """What `benchmarks/widths.py` counted, by partition."""
    found = benchmark("widths")
    ways = ("a lane for every client", "as many as are of use")
    lines = []
    for partition in (*PARTITIONS, "all of them"):
        counted = found[partition.lower().replace("et 1", "et 1.0")]
        texts = [f"{c['width']}, {c['steps']:,}, {100 * c['occupancy']:.0f} %" for c in map(counted.get, ways)]
        lines.append([partition, *texts])
    return _markdown(["partition", *(f"{way}: lanes, steps, full" for way in ways)], lines)


def conditions() -> str:
    """FedAvg under the four conditions over the paper's rounds, in percent of accuracy, means over seeds."""
    found: dict[tuple[str, str], list[dict[int, float]]] = defaultdict(list)
    for (row, column, _), curve in _curves("fig2b").items():
        found[row, column].append(curve)
    lines, columns = [], section("fig2b").columns
    for row in sorted(section("fig2b").rows, key=lambda row: -float(row.partition("alpha ")[2] or "inf")):
        cells = [row]
        for column in columns:
            curves = found[row, column]
            last = [[value for n, value in curve.items() if n > 1400] for curve in curves]
            ends = list(map(statistics.mean, last))
            spread = f" ± {statistics.stdev(ends):.1f}" if len(ends) > 1 else ""
            reached = statistics.mean(min(n for n, value in curve.items() if value >= 95) for curve in curves)
            cells += [f"{reached:.0f}", f"{statistics.mean(ends):.1f}{spread}, {min(map(min, last)):.1f}"]
        lines.append(cells)
    head = [f"{column}: {words}" for column in columns for words in ("first at 95 %", "last 100 rounds, lowest")]
    return _markdown(["", *head], lines)


def _ours(table: Table, row: str, number: int) -> str:
    cell, metric = table.cells[row, number], table.headings[number].metric
    if not cell.values:
        return cell.state
    spread = "" if cell.deviation != cell.deviation else f" ± {metric.show(cell.deviation)}"
    text = metric.show(cell.mean) + spread
    return f"**{text}**" if cell.best else text


def _printed(table: Table, row: str, number: int) -> str:
    cell, metric = table.cells[row, number], table.headings[number].metric
    return " ± ".join(map(metric.show, cell.printed)) if cell.printed else ""


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*rows, *(f"| {' | '.join(line)} |" for line in lines)])


PERCENT = "accuracy, %"
CIFAR_PLACES = [(f"CIFAR-100, Dirichlet {alpha}", seed) for alpha in ("1", "0.1", "0.01") for seed in (192, 225, 226)]


BLOCKS: dict[str, Callable[[], str]] = {
    "table2 lr 0.01": lambda: ranking("MovieLens-1M, lr 0.01"),
    "table2 lr 0.001": lambda: ranking("MovieLens-1M, lr 0.001"),
    "verdicts": verdicts,
    "table1": at_a_glance,
    "table1 cifar100": lambda: accuracies("table1-cifar100", prefix="CIFAR-100, ", printed="table1"),
    "table1 cifar100 on the way": lambda: on_the_way("table1-cifar100", CIFAR_PLACES),
    "table1 cifar100 augmented": lambda: accuracies(
        "table1-cifar100-augmented", prefix="CIFAR-100, ", printed="table1"
    ),
    "table1 cifar100 in 500": lambda: accuracies("table1-cifar100-500", prefix="CIFAR-100 in 500 clients, "),
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
    "noise": noise,
    "tuned mnist": lambda: ranked(
        ("after 150 rounds", "tuned-mnist", PERCENT), ("after 1,500 rounds", "tuned-mnist-1500", PERCENT)
    ),
    "tuned glyphs": lambda: ranked((PERCENT, "tuned-glyphs", PERCENT)),
    "tuned movielens": lambda: ranked(
        ("AUC after 60 rounds", "tuned-movielens", "AUC"),
        ("HR@10 after 1,000", "tuned-movielens-1000", "HR@10"),
        ("AUC after 1,000", "tuned-movielens-1000", "AUC"),
    ),
    "steps": steps,
    "widths": widths,
    "conditions": conditions,
}


def refreshed(text: str) -> str:
    """A page's text with every table made anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- ([^>]+?) -->\n.*?<!-- end -->", block, text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
