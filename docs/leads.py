"""Who is before whom: leads of one method over another, run by run with the same setting and seed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from cells import PARTITIONS, curves, markdown, printed_accuracies, section, values_of

from fedeve.report import tables
from fedeve.report.tables import Table


def on_the_way(name: str, places: Sequence[tuple[str, int]]) -> str:
    """At how many of the evaluations that both have FedEve is ahead of each other row, by column and seed.

    And by how many points at rounds 300 and 750 and in the table.
    """
    found, (table,) = curves(name), tables.tables(section(name))
    lines, total = [], Counter[tuple[str, str]]()
    rivals = [row for row in section(name).rows if row != "FedEve"]
    for place in places:
        line, values, seed = [_words(place)], values_of(table, place[0]), place[1]
        for rival in rivals:
            ours, theirs = found["FedEve", *place], found.get((rival, *place), {})
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
    return markdown(["FedEve ahead of", *rivals], lines)


def _words(place: tuple[str, int]) -> str:
    column, seed = place
    return f"{column.partition(', ')[2]}, seed {seed}"


PAIRS = [("FedEve", rival) for rival in ("FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "FedOpt (FedAdam)")]
PAIRS += [("FedEveAdam (ours)", "FedOpt (FedAdam)")]


EPOCHS = {", E = 1": [", E = 1"], ", E = 3 and 5": [", E = 3", ", E = 5"]}


def leads(name: str, standin: str) -> str:
    """Table 3 seed by seed: how far one method is before another, in points, and on how many of the seeds."""
    (table,), printed = tables.tables(section(name)), printed_accuracies("table3")
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
    return markdown(["", *_pair_titles()], lines)


def _gaps(table: Table, number: int, pair: tuple[str, str]) -> list[float]:
    """How far one row is before another, seed by seed."""
    ours, theirs = (table.cells[row, number].values if row in table.rows else {} for row in pair)
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


_PLACES = (
    ("glyphs", "table3-glyphs-full", "glyphs in place of FEMNIST", PARTITIONS),
    ("MNIST", "table3-mnist", "mnist in place of FEMNIST", PARTITIONS),
    ("CIFAR-100, N = 100", "table1-cifar100", "CIFAR-100", PARTITIONS[1:]),
    ("CIFAR-100, N = 100, augmented", "table1-cifar100-augmented", "CIFAR-100", ("Dirichlet 0.1",)),
    ("CIFAR-100, N = 500", "table1-cifar100-500", "CIFAR-100 in 500 clients", PARTITIONS[1:]),
    ("MovieLens-1M, HR@10", "table2", "MovieLens-1M", ("lr 0.01", "lr 0.001")),
)


def _by_setting() -> Iterator[tuple[str, str, list[list[float]]]]:
    """A data set and a setting in words, and for each of the pairs the leads of all their runs."""
    for title, folder, prefix, settings in _PLACES:
        table = next(t for t in tables.tables(section(folder)) if folder != "table2" or t.title == "HR@10")
        scale = 100 if folder == "table2" else 1
        numbers = {heading.column: n for n, heading in enumerate(table.headings)}
        for setting in settings:
            for words, endings in (EPOCHS if folder.startswith("table3") else {"": [""]}).items():
                columns = [numbers[f"{prefix}, {setting}{ending}"] for ending in endings]
                found = [[scale * gap for n in columns for gap in _gaps(table, n, pair)] for pair in PAIRS]
                yield title, f"{setting}{words}", found


def verdicts() -> str:
    """Where one method wins, ties and loses against another, over all pairs of runs with one setting and seed."""
    lines = [[f"{title}, {setting}", *map(_verdict, found)] for title, setting, found in _by_setting()]
    return markdown(["", *_pair_titles()], lines)


_BRIEFLY = {
    "glyphs": "handwriting: by writer, alpha 1, 0.1, 0.01",
    "MNIST": "MNIST: by writer, alpha 1, 0.1, 0.01",
    "CIFAR-100, N = 100": "CIFAR-100 in 100 clients: alpha 1, 0.1, 0.01",
    "CIFAR-100, N = 500": "CIFAR-100 in 500 clients: alpha 1, 0.1, 0.01",
    "MovieLens-1M, HR@10": "MovieLens-1M: rate 0.01, 0.001",
}


def briefly() -> str:
    """FedEve's leads with one local epoch, a line a data set; wins are bold, and losses italic."""
    cells: dict[str, list[list[str]]] = {words: [[] for _ in PAIRS] for words in _BRIEFLY.values()}
    for title, setting, found in _by_setting():
        if title in _BRIEFLY and "E = 3" not in setting:
            for cell, gaps in zip(cells[_BRIEFLY[title]], found, strict=True):
                cell.append(_mark(gaps))
    lines = [
        [words, *(", ".join(filter(None, cell)) or "not run" for cell in row[:-1])] for words, row in cells.items()
    ]
    return markdown(["", *(title.removeprefix("FedEve - ") for title in _pair_titles()[:-1])], lines)


def _mark(gaps: Sequence[float]) -> str:
    """The median of the leads; bold or italic where four pairs or more decide, nine tenths of them."""
    if not gaps:
        return ""
    text, won = f"{statistics.median(gaps):+.1f}", sum(gap > 0 for gap in gaps)
    if len(gaps) < 4:
        return text
    return f"**{text}**" if won >= 0.9 * len(gaps) else f"*{text}*" if won <= 0.1 * len(gaps) else text


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
