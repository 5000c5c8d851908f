"""Figures from runs: the four conditions, and the Kalman gain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..record import Record
from .conditions import CONDITIONS
from .grids import Cell, conditions, gains, played
from .lab import Lab, Size
from .style import COLOURS, DASHES, Drawing


def fig2b(lab: Lab) -> Drawing:
    """FedAvg under the four conditions, over alpha and epochs."""
    size, found = lab.size, list(played(lab, conditions(lab)))
    finals: dict[tuple[str, float | None, int], list[float]] = {}
    for cell, record in found:
        key = (cell.keys["condition"], cell.keys["alpha"], cell.keys["epochs"])
        finals.setdefault(key, []).append(100 * record.final("accuracy", last=size.last))
    rows = condition_rows(found)
    alpha, epochs = min(size.alphas), size.epochs[0]
    lost = {
        name: np.mean(finals["iid", None, epochs]) - np.mean(finals[name, alpha, epochs])
        for name in ("period", "client", "both")
    }
    return Drawing(
        name="fig2b",
        title="What each drift costs: FedAvg under four conditions",
        caption=f"{size.data}, {size.num_clients} clients, {size.cohort} a round, {size.model}, SGD at {size.lr:g}, "
        f"{size.rounds} rounds, {_seeds(size)}. Only period drift: each round's rows are pooled and dealt evenly; "
        "only client drift: the partition is iid and each round's rows are pooled and dealt again by Dirichlet.",
        reading=f"Each panel is one alpha and one number of local epochs E; the further a line lies below iid, the "
        f"more its drift costs. At alpha {alpha:g} and E {epochs}, over the last {size.last} rounds, period drift "
        f"alone cost {lost['period']:.1f} points of accuracy, client drift alone {lost['client']:.1f}, both together "
        f"{lost['both']:.1f}.",
        width=8.5,
        height=2.3 * len(size.alphas) + 0.3,
        draw=lambda figure: draw_conditions(figure, rows, size),
        columns=["condition", "alpha", "epochs", "seed", "round", "accuracy"],
        rows=rows,
    )


def condition_rows(found: Iterable[tuple[Cell, Record]]) -> list[list[Any]]:
    """Condition, alpha, epochs, seed, round and accuracy of every evaluation."""
    return [
        [*_key(cell), int(round), float(accuracy)]
        for cell, record in found
        for round, accuracy in zip(record.evaluated, record.metric("accuracy"), strict=True)
    ]


def _key(cell: Cell) -> list[Any]:
    return list(cell.keys.values())


def _seeds(size: Size) -> str:
    return f"seed {size.seeds[0]}" if len(size.seeds) == 1 else f"mean of {len(size.seeds)} seeds"


def draw_conditions(figure: Figure, rows: list[list[Any]], size: Size) -> None:
    panels = figure.subplots(len(size.alphas), len(size.epochs), sharex=True, sharey=True, squeeze=False)
    for line, alpha in enumerate(size.alphas):
        for column, epochs in enumerate(size.epochs):
            axes = panels[line, column]
            for number, (name, condition) in enumerate(CONDITIONS.items()):
                mine = [row for row in rows if row[0] == name and row[1] in (alpha, None) and row[2] == epochs]
                rounds = sorted({row[4] for row in mine})
                curves = np.array([[row[5] for row in mine if row[4] == round] for round in rounds])
                colour = COLOURS[number]
                axes.plot(rounds, 100 * curves.mean(1), color=colour, linestyle=DASHES[number], label=condition.title)
                if curves.shape[1] > 1:
                    axes.fill_between(
                        rounds, 100 * curves.min(1), 100 * curves.max(1), color=colour, alpha=0.15, linewidth=0
                    )
            axes.set(title=f"alpha {alpha:g}, E {epochs}", ylim=(0, 100), xlim=(0, size.rounds))
        panels[line, 0].set_ylabel("accuracy, %")
    for axes in panels[-1]:
        axes.set_xlabel("round")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4)


def gain(lab: Lab) -> Drawing:
    """Boxes of FedEve's gain over rounds, by partition and epochs."""
    size, rows = lab.size, []
    for cell, record in played(lab, gains(lab)):
        found = record.facts("gain")
        rounds = record.evaluated if record.is_packed else range(1, len(found) + 1)
        rows += [[*_key(cell), int(n), float(g)] for n, g in zip(rounds, found, strict=True) if np.isfinite(g)]
    medians = {
        (title, epochs): float(np.median([row[4] for row in rows if row[0] == title and row[1] == epochs]))
        for title in lab.partitions()
        for epochs in size.epochs
    }
    first = size.epochs[0]
    by_alpha = ", ".join(f"{medians[title, first]:.2f} ({title})" for title in lab.partitions())
    moves = max(
        max(medians[title, e] for e in size.epochs) - min(medians[title, e] for e in size.epochs)
        for title in lab.partitions()
    )
    return Drawing(
        name="gain",
        title="FedEve's Kalman gain by heterogeneity and local epochs",
        caption=f"{size.data}, FedEve, {size.model}, {size.cohort} clients a round, {size.rounds} rounds, "
        f"{_seeds(size)}. Boxes reach from the lower to the upper quartile over rounds, whiskers to the last value "
        "within 1.5 times their height, dots are beyond.",
        reading=f"A gain of 1 trusts the round's clients alone, a gain of 0 the prediction alone. Its median at E "
        f"{first} is {by_alpha}; over E in {', '.join(map(str, size.epochs))} a partition's median moves by at most "
        f"{moves:.2f}.",
        width=8.5,
        height=3.4,
        draw=lambda figure: _draw_gain(figure, rows, list(lab.partitions()), size),
        columns=["partition", "epochs", "seed", "round", "gain"],
        rows=rows,
    )


def _draw_gain(figure: Figure, rows: list[list[Any]], titles: list[str], size: Size) -> None:
    axes = figure.subplots()
    width = 0.8 / len(size.epochs)
    for number, epochs in enumerate(size.epochs):
        boxes = [[row[4] for row in rows if row[0] == title and row[1] == epochs] for title in titles]
        places = [place + (number - (len(size.epochs) - 1) / 2) * width for place in range(len(titles))]
        drawn = axes.boxplot(
            boxes, positions=places, widths=0.85 * width, patch_artist=True, manage_ticks=False,
            medianprops={"color": "black"}, flierprops={"markersize": 2, "alpha": 0.5},
        )  # fmt: skip
        for box in drawn["boxes"]:
            box.set(facecolor=COLOURS[number], alpha=0.6)
        drawn["boxes"][0].set_label(f"E {epochs}")
    axes.set(xticks=range(len(titles)), xticklabels=titles, ylabel="Kalman gain", ylim=(0, 1.02))
    axes.legend(loc="lower right")
