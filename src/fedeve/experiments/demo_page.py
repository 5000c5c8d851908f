"""The demo's page: one static file with a table, accuracy curves, the Kalman gain and both drifts.

Everything on it is computed from records. The figures are inline SVG whose ink is the page's text colour, so that the
page reads in light, in dark and in print; nothing is fetched.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import Record, write_atomically

Groups = Mapping[str, Sequence[Record]]
"""Records by the name under which they are shown, one per seed."""

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe & Ito: told apart by everybody
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
_INK = "#010203"  # replaced by currentColor


@dataclass(frozen=True)
class Row:
    """One method's line in the table; accuracies in percent, over seeds."""

    label: str
    final: float
    deviation: float
    best: float
    reached: str


def rows(groups: Groups, *, last: int) -> list[Row]:
    """The table: mean accuracy over the last rounds, the best, and when the goal was first met.

    The goal is the final accuracy of the first group: how many rounds do the others need to get as far?
    """
    finals = {
        label: [100 * record.final("accuracy", last=last) for record in records] for label, records in groups.items()
    }
    goal = float(np.mean(next(iter(finals.values())))) / 100
    table = []
    for label, records in groups.items():
        best = float(np.mean([100 * record.metric("accuracy").max() for record in records]))
        deviation = float(np.std(finals[label], ddof=1)) if len(records) > 1 else float("nan")
        table.append(Row(label, float(np.mean(finals[label])), deviation, best, _rounds_to(goal, records)))
    return table


def _rounds_to(goal: float, records: Sequence[Record]) -> str:
    reached = [record.evaluated[record.metric("accuracy") >= goal] for record in records]
    if all(len(rounds) for rounds in reached):
        return f"{np.mean([rounds[0] for rounds in reached]):.0f}"
    return f"not in {records[0].evaluated[-1]}"


def sentences(groups: Groups, *, last: int) -> list[str]:
    """What it means, in three sentences made from the numbers, whatever they are."""
    table = sorted(rows(groups, last=last), key=lambda row: -row.final)
    seeds = sorted({record.header["seed"] for records in groups.values() for record in records})
    ranking = ", ".join(f"{row.label} {row.final:.1f} %" for row in table)
    caution = " (one seed: a difference of a few points may be luck)" if len(seeds) == 1 else ""
    said = [f"Accuracy over the last {last} rounds, {_count(len(seeds), 'seed')}: {ranking}{caution}."]
    eve = next((records for _, (_, records) in _with_gain(groups)), None)
    if eve is None:
        return said
    gain, period, client = (_median(eve, name) for name in ("gain", "period_drift", "client_drift"))
    said.append(
        f"FedEve's gain had a median of {gain:.2f}: of every step, {100 * gain:.0f} % came from what the round's "
        f"clients observed and {100 - 100 * gain:.0f} % from what the rounds before predicted."
    )
    ratio = period / client
    compared = f"{ratio:.1f} times as large as" if ratio >= 1 else f"{1 / ratio:.1f} times smaller than"
    said.append(
        f"That is because the period drift it measured was {compared} the client drift (medians over rounds), and it "
        f"found this out by itself: there was nothing to tune, and nothing was sent that FedAvg does not send."
    )
    return said


def write_report(path: Path, groups: Groups, *, title: str, setting: str, last: int, footer: str = "") -> None:
    """Write the page."""
    table = rows(groups, last=last)
    page = Template(resources.files(__package__).joinpath("demo_page.html").read_text(encoding="utf-8"))
    first, one_seed = table[0].label, max(map(len, groups.values())) == 1
    content = page.substitute(
        title=html.escape(title),
        setting=html.escape(setting),
        sentences="\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences(groups, last=last)),
        table=_html_table(table, first),
        table_note=f"Mean of the evaluations in the last {last} rounds"
        + ("." if one_seed else "; ± is the standard deviation over seeds."),
        accuracy=_svg(draw_accuracy, groups, size=(9.0, 3.9)),
        accuracy_note="" if one_seed else "Lines are means over seeds, bands reach from the worst to the best seed.",
        insight=_insight(groups),
        details=_details(groups),
        footer=html.escape(footer),
    )
    write_atomically(path, content.encode())


def _insight(groups: Groups) -> str:
    """The gain and the drifts side by side, where a method computes them."""
    if not _with_gain(groups):
        return ""
    captions = {
        _draw_gain: "Kalman gain, round by round (dots) and its running median over 15 rounds (line). 1 trusts the "
        "clients alone, as FedAvg does; 0 trusts the prediction alone.",
        _draw_drifts: "The two drifts the gain is computed from, per parameter, on a logarithmic axis: how far the "
        "cohort's update is from the predicted one (period drift Q), and how far the clients are from each other "
        "(client drift R).",
    }
    figures = (
        f"<figure>{_svg(draw, groups, size=(5.2, 3.2))}<figcaption>{caption}</figcaption></figure>"
        for draw, caption in captions.items()
    )
    return f'<h2>What FedEve sees</h2>\n<div class="pair">{"".join(figures)}</div>'


def _html_table(table: Sequence[Row], first: str) -> str:
    best = max(row.final for row in table)
    head = f"<tr><th>method</th><th>accuracy</th><th>best</th><th>rounds to {html.escape(first)}'s accuracy</th></tr>"
    body = [
        f"<tr{' class=best' if row.final == best else ''}><td>{html.escape(row.label)}</td>"
        f"<td>{accuracy_words(row)}</td><td>{row.best:.1f} %</td><td>{row.reached}</td></tr>"
        for row in table
    ]
    return "<table>" + head + "".join(body) + "</table>"


def accuracy_words(row: Row) -> str:
    """`61.2 ± 0.4 %`, or without deviation where there is one seed."""
    return f"{row.final:.1f} %" if np.isnan(row.deviation) else f"{row.final:.1f} ± {row.deviation:.1f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _median(records: Sequence[Record], name: str) -> float:
    return float(np.nanmedian(np.concatenate([record.facts(name) for record in records])))


def _details(groups: Groups) -> str:
    parts = []
    for label, records in groups.items():
        for record in records:
            name = html.escape(f"{label}, seed {record.header['seed']}")
            shown = html.escape(json.dumps(record.header, indent=1))
            parts.append(f"<details><summary>{name}</summary><pre>{shown}</pre></details>")
    return "\n".join(parts)


def _svg(draw: Any, groups: Groups, *, size: tuple[float, float]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": draw.__name__, "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _INK, "axes.labelcolor": _INK,
        "xtick.color": _INK, "ytick.color": _INK, "text.color": _INK, "legend.frameon": False, "lines.linewidth": 1.8,
        "axes.grid": True, "grid.color": "#8a93a3", "grid.alpha": 0.25, "grid.linewidth": 0.7,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), groups)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def draw_accuracy(axes: Any, groups: Groups) -> None:
    """Accuracy over rounds, a line a method, with a band over seeds."""
    for number, (label, records) in enumerate(groups.items()):
        curves = 100 * np.stack([record.metric("accuracy") for record in records])
        colour, rounds = _COLOURS[number % len(_COLOURS)], records[0].evaluated
        axes.plot(rounds, curves.mean(0), color=colour, linestyle=_DASHES[number % len(_DASHES)], label=label)
        if len(records) > 1:
            axes.fill_between(rounds, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy, %", ylim=(0, None), xlim=(0, None))
    axes.legend(loc="lower right")


def _draw_gain(axes: Any, groups: Groups) -> None:
    for number, (label, records) in _with_gain(groups):
        colour = _COLOURS[number % len(_COLOURS)]
        for record in records:
            axes.plot(_rounds(record), record.facts("gain"), ".", color=colour, markersize=3, alpha=0.35)
        middle = np.nanmedian(np.stack([record.facts("gain") for record in records]), axis=0)
        axes.plot(_rounds(records[0]), _running_median(middle), color=colour, label=f"gain of {label}")
    axes.set(xlabel="round", ylabel="Kalman gain", ylim=(0, 1.02), xlim=(0, None))
    axes.legend(loc="lower right")


def _draw_drifts(axes: Any, groups: Groups) -> None:
    for _, (_, records) in _with_gain(groups):
        for name, colour, dash in (("period_drift", _COLOURS[5], "-"), ("client_drift", _COLOURS[0], "--")):
            middle = np.nanmedian(np.stack([record.facts(name) for record in records]), axis=0)
            axes.plot(_rounds(records[0]), middle, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(_rounds(records[0]), _running_median(middle), dash, color=colour, label=name.replace("_", " "))
    axes.set(xlabel="round", ylabel="drift per parameter", yscale="log", xlim=(0, None))
    axes.legend(loc="lower right")


def _with_gain(groups: Groups) -> list[tuple[int, tuple[str, Sequence[Record]]]]:
    return [(n, item) for n, item in enumerate(groups.items()) if _uses_gain(item[1][0])]


def _uses_gain(record: Record) -> bool:
    # Every method's facts tell the gain that FedEve would use; only FedEve's own is one that was used.
    method = record.header.get("config", {}).get("method", {}).get("name", "fedeve")
    return method == "fedeve" and "gain" in record.lines[0]["facts"]


def _rounds(record: Record) -> NDArray[np.int64]:
    return np.arange(1, record.evaluated[-1] + 1)


def _running_median(values: NDArray[np.float64], width: int = 15) -> NDArray[np.float64]:
    padded = np.pad(values, width // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    return np.asarray(np.nanmedian(windows, axis=1))
