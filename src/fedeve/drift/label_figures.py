"""Figures that need no training: the cohorts' labels over rounds, the laws of sampling, and the convergence bound."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from . import bound, labels
from .cohorts import Floats, cohort_distance, factor
from .lab import Clock, Lab
from .measures import gradients
from .objectives import ModelObjective
from .style import COLOURS, DASHES, MARKERS, Drawing
from .traces import some_clients

_ROUNDS, _CLASSES = 20, 10


def fig2a(lab: Lab) -> Drawing:
    """The label mix of the sampled clients over 20 rounds, a dot per class and client."""
    rows: list[list[Any]] = []
    distances: dict[str, float] = {}
    for title, options in lab.partitions().items():
        data = lab.data(**options)
        run = lab.run(data, "fedavg")
        population = np.bincount(data.y[data.order], minlength=data.num_classes) / len(data.order)
        seen = []
        for round in range(_ROUNDS):
            clients = run.cohort_of(round)
            found = labels.counts(data, clients)
            for client, mine in zip(clients.tolist(), found, strict=True):
                rows += [[title, round + 1, client, label, int(n)] for label, n in enumerate(mine[:_CLASSES]) if n]
            if found.sum():
                seen.append(float(np.square(found.sum(0) / found.sum() - population).mean()))
        distances[title] = float(np.sqrt(np.mean(seen)))
    first, last = next(iter(distances)), list(distances)[-1]
    return Drawing(
        name="fig2a",
        title="The classes that cohorts bring, round by round",
        caption=f"{_name(lab)}: the {lab.size.cohort} clients of each of 20 rounds. One dot per client and class, its "
        "area proportional to the number of examples; clients stand side by side within a round"
        + (", and the first ten classes are shown." if data.num_classes > _CLASSES else "."),
        reading=f"A column is a round: where its dots are few and large, the round trains on a few classes only, and "
        f"the next round on others. A cohort's share of a class was typically off by "
        f"{100 * distances[first]:.1f} points ({first}) up to {100 * distances[last]:.1f} points ({last}).",
        width=8.5,
        height=1.7 * len(distances) + 0.4,
        draw=lambda figure: _draw_labels(figure, rows, list(distances), lab.size.cohort),
        columns=["partition", "round", "client", "class", "examples"],
        rows=rows,
    )


def _draw_labels(figure: Figure, rows: list[list[Any]], titles: list[str], cohort: int) -> None:
    panels = figure.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0]
    largest = max(row[4] for row in rows)
    for axes, title in zip(panels, titles, strict=True):
        mine = [row for row in rows if row[0] == title]
        places: dict[tuple[int, int], int] = {}
        for row in mine:
            places.setdefault((row[1], row[2]), sum(key[0] == row[1] for key in places))
        x = [row[1] + 0.8 * (places[row[1], row[2]] / cohort - 0.5) for row in mine]
        area = [160 * row[4] / largest + 0.5 for row in mine]
        colours = [f"C{row[3]}" for row in mine]
        axes.scatter(x, [row[3] for row in mine], s=area, c=colours, alpha=0.75, linewidths=0)
        axes.set(title=title, ylabel="class", xlim=(0.4, _ROUNDS + 0.6), ylim=(-0.8, _CLASSES - 0.2))
        axes.set_xticks(range(1, _ROUNDS + 1))
        axes.set_yticks(range(0, _CLASSES, 3))
    panels[-1].set_xlabel("round")
    for size in (largest, max(largest // 10, 1)):
        panels[0].scatter([], [], s=160 * size / largest + 0.5, c="#555555", alpha=0.75, label=f"{size} examples")
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)


def law(lab: Lab) -> Drawing:
    """Both laws of sampling, in closed form and measured: for label mixes and for gradients."""
    rows: list[list[Any]] = []
    heterogeneity = {}
    clock = Clock("law", len(lab.partitions()), lab.tell)
    for title, options in lab.partitions().items():
        data = lab.data(**options)
        mix = labels.shares(data)
        heterogeneity[title] = labels.heterogeneity(mix)
        rows += _measured(lab, "labels", title, mix / np.sqrt(mix.shape[1]))
        few = some_clients(data, lab.size.trace_clients, examples=lab.size.trace_examples, seed=lab.size.seeds[0])
        objective = ModelObjective(few, lab.size.model, seed=lab.size.seeds[0], dtype="float32", device=lab.device)
        rows += _measured(lab, "gradients", title, gradients(objective, objective.start))
        clock()
    inside = np.mean([abs(row[5] - row[4]) <= 2 * row[6] for row in rows if row[4] > 1e-15])
    least, most = min(heterogeneity, key=heterogeneity.__getitem__), max(heterogeneity, key=heterogeneity.__getitem__)
    return Drawing(
        name="law",
        title="How far a cohort is from the population: the laws and the measurement",
        caption=f"{_name(lab)}. Left: E[D_S] = (H/S)(N-S)/(N-1) of label mixes; right: (σ²/S)(1-S/N) N/(N-1) of "
        f"gradients of an untrained {lab.size.model} in a federation of up to {lab.size.trace_clients} of the clients. "
        f"Lines are the closed forms, points the means over {lab.size.num_cohorts} cohorts drawn, bars two standard "
        "errors.",
        reading=f"Points on their lines mean that the law holds; a line that lies higher is a more heterogeneous "
        f"federation, and only a larger cohort goes down along it. {100 * inside:.0f} % of the points lie within two "
        f"standard errors, and H goes from {heterogeneity[least]:.2g} ({least}) to {heterogeneity[most]:.2g} ({most}).",
        width=8.5,
        height=3.6,
        draw=lambda figure: _draw_law(figure, rows, list(heterogeneity)),
        columns=["of", "partition", "clients", "cohort", "closed_form", "measured", "standard_error"],
        rows=rows,
    )


def _measured(lab: Lab, kind: str, title: str, vectors: Floats) -> list[list[Any]]:
    count = len(vectors)
    variance = float(np.square(vectors - vectors.mean(0)).sum(1).mean())
    rows: list[list[Any]] = []
    for size in sorted({min(size, count) for size in (1, 3, 10, 30, 100, 300)}):
        found = cohort_distance(vectors, size=size, how="sampled", num_cohorts=lab.size.num_cohorts)
        rows.append([kind, title, count, size, variance * factor(count, size), found.value, found.error])
    return rows


def _draw_law(figure: Figure, rows: list[list[Any]], titles: list[str]) -> None:
    for axes, kind, words in zip(
        figure.subplots(1, 2),
        ("labels", "gradients"),
        ("E[D_S], label mixes", "E|cohort's gradient - mean gradient|²"),
        strict=True,
    ):
        for number, title in enumerate(titles):
            mine = np.array([row[2:] for row in rows if row[0] == kind and row[1] == title and row[4] > 1e-15])
            if not len(mine):
                continue
            colour = COLOURS[number % len(COLOURS)]
            # A full line between the measured sizes: the law is smooth but for the drop to zero at N.
            sizes = np.unique(np.geomspace(1, mine[-1, 1], 60).round()).astype(int)
            whole = mine[0, 2] * np.array([factor(int(mine[0, 0]), int(size)) for size in sizes])
            keep = whole > 1e-15
            axes.plot(sizes[keep], whole[keep], DASHES[number % 4], color=colour, label=title)
            axes.errorbar(
                mine[:, 1], mine[:, 3], yerr=2 * mine[:, 4], fmt=MARKERS[number % 6], color=colour, markersize=4
            )
        axes.set(xscale="log", yscale="log", xlabel="cohort size S", ylabel=words)
        axes.legend()


def bound_figure(lab: Lab) -> Drawing:
    """The convergence bound's error term on a quadratic, beside what really stays."""
    bowl, size = bound.Bowl.random(), 10
    rounds = 4000 if lab.size.num_cohorts >= 1000 else 400
    rows: list[list[Any]] = []
    gains = np.geomspace(0.05, 1.0, 13)
    for gain in gains.tolist():
        exact = bound.exact_error(bowl, gain=gain, size=size)
        promised = bound.bound_error(bowl, gain=gain, size=size)
        mean, error = bound.simulated_error(bowl, gain=gain, size=size, rounds=rounds)
        rows.append(["gain", gain, size, promised, exact, mean, error])
    for cohort in (1, 2, 5, 10, 20, 50, 90):
        for gain in (1.0, 0.3):
            exact = bound.exact_error(bowl, gain=gain, size=cohort)
            promised = bound.bound_error(bowl, gain=gain, size=cohort)
            mean, error = bound.simulated_error(bowl, gain=gain, size=cohort, rounds=rounds)
            rows.append(["cohort", gain, cohort, promised, exact, mean, error])
    own, floor, error = bound.fedeve_error(bowl, size=size, rounds=rounds)
    rows.append(["fedeve at rate 1/(4L)", own, size, None, None, floor, error])
    broken = [row[1] for row in rows if row[0] == "gain" and row[4] > row[3]]
    words = f"It is broken below a gain of about {max(broken):.2f}" if broken else "It holds at every gain shown"
    return Drawing(
        name="bound",
        title="The convergence bound's error term on a quadratic",
        caption="100 clients, F_k = (w - a_k)'A(w - a_k)/2 in 8 dimensions, curvatures 1 to 10, step 1/L. The term of "
        "the paper's theorem, G²(σ²/S)(1 - S/N), beside the exact limit of E|∇f|² of the recursion that it is about, "
        f"and the mean over {rounds // 2} rounds with real cohorts (bars: two standard errors).",
        reading=f"Where the exact line lies below the dashed one, the bound holds. {words}, since its proof takes the "
        "momentum's variance for G² times one cohort's and forgets what earlier rounds left in it.",
        width=8.5,
        height=3.6,
        draw=lambda figure: _draw_bound(figure, rows),
        columns=["over", "gain", "cohort", "bound", "exact", "simulated", "standard_error"],
        rows=rows,
    )


def _draw_bound(figure: Figure, rows: list[list[Any]]) -> None:
    left, right = figure.subplots(1, 2)
    table = np.array([row[1:] for row in rows if row[0] == "gain"], dtype=float)
    left.plot(table[:, 0], table[:, 2], "--", color=COLOURS[6], label="the bound's term")
    left.plot(table[:, 0], table[:, 3], color=COLOURS[0], label="exact")
    left.errorbar(
        table[:, 0], table[:, 4], yerr=2 * table[:, 5], fmt="o", color=COLOURS[0], markersize=4, label="played"
    )
    own = rows[-1]
    left.errorbar(
        [own[1]], [own[5]], yerr=[2 * own[6]], fmt="*", color=COLOURS[1], markersize=9, label=f"FedEve, {own[0][7:]}"
    )
    left.set(
        xscale="log", yscale="log", xlabel="gain G", ylabel="what stays of E|∇f|²", title="cohorts of 10 out of 100"
    )
    left.legend()
    for number, gain in enumerate((1.0, 0.3)):
        mine = np.array([row[1:] for row in rows if row[0] == "cohort" and row[1] == gain], dtype=float)
        colour = COLOURS[number]
        right.plot(mine[:, 1], mine[:, 2], "--", color=colour, label=f"bound, G {gain:g}")
        right.plot(mine[:, 1], mine[:, 3], color=colour, label=f"exact, G {gain:g}")
        right.errorbar(mine[:, 1], mine[:, 4], yerr=2 * mine[:, 5], fmt=MARKERS[number], color=colour, markersize=4)
    right.set(xscale="log", yscale="log", xlabel="cohort size S", title="out of 100 clients")
    right.legend()


def _name(lab: Lab) -> str:
    return lab.size.data
