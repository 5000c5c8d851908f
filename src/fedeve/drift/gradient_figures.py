"""Figures from traced gradients: whether drifts are normal, and how period drift differs from SGD's noise.

Both need the same traces, which are made once per partition and kept in the folder as small arrays.
"""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from ..record import write_atomically
from ..run import Run
from .directions import directions
from .gaussianity import Normality, normality, quantiles
from .lab import Clock, Lab, Size
from .objectives import ModelObjective
from .style import COLOURS, DASHES, MARKERS, Drawing
from .traces import Trace, some_clients, trace_standing, trace_training

Arrays = dict[str, NDArray[Any]]
DRIFTS = ("period", "client")
MODES = ("training", "standing")


def traced(lab: Lab, title: str, options: dict[str, Any]) -> Arrays:
    """What both figures need of a partition's traces, from the folder if it is there."""
    path = lab.out / "traces" / f"{title.replace(' ', '-')}.npz"
    size, data = lab.size, lab.data(**options)
    few = some_clients(data, size.trace_clients, examples=size.trace_examples, seed=size.seeds[0])
    cohort = min(size.cohort, len(few.with_data))
    run = lab.run(few, "fedavg", rounds=size.trace_rounds, cohort=cohort, empty="skip")
    key = f"{run.identity()} {size.trace_params}"
    if path.exists():
        with np.load(path, allow_pickle=False) as stored:
            found = dict(stored)
        if str(found.get("key")) == key:
            return found
    arrays = _make(lab, title, run) | {"key": np.array(key)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    Path(path.parent).mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
    return arrays


def _make(lab: Lab, title: str, run: Run) -> Arrays:
    clock = Clock(f"gradients, {title}", run.rounds, lab.tell)
    out = _stored("training", trace_training(run, device=lab.device, tell=clock), lab.size.trace_params)
    clock = Clock(f"gradients at one point, {title}", run.rounds, lab.tell)
    objective = ModelObjective(run.data, run.model, seed=run.seed, dtype="float32", device=lab.device)
    standing = trace_standing(objective, rounds=run.rounds, cohort=run.cohort, seed=run.seed, tell=clock)
    return out | _stored("standing", standing, lab.size.trace_params)


def _stored(mode: str, trace: Trace, number: int) -> Arrays:
    picked = trace.pick(number)
    out: Arrays = {f"{mode}/picked": picked}
    out |= {f"{mode}/{drift}": getattr(trace, drift)[:, picked].astype(np.float64) for drift in DRIFTS}
    for kind, vectors in {
        "period": trace.period,
        "batch": trace.batch,
        "cohort update": trace.full + trace.period,
        "batch update": trace.full + trace.batch,
    }.items():
        out |= {f"{mode}/{kind}/{name}": np.asarray(value) for name, value in asdict(directions(vectors)).items()}
    return out


def gaussian(lab: Lab) -> Drawing:
    """Histograms, Q-Q plots and p-values of both drifts of parameters over rounds."""
    found = {title: traced(lab, title, options) for title, options in lab.partitions().items()}
    tests = {
        (title, mode, drift): normality(arrays[f"{mode}/{drift}"])
        for title, arrays in found.items()
        for mode in MODES
        for drift in DRIFTS
    }
    rows: list[list[Any]] = []
    for (title, mode, drift), test in tests.items():
        picked = found[title][f"{mode}/picked"].tolist()
        rows += [[title, mode, drift, "p-value", n, float(p)] for n, p in zip(picked, test.p_values, strict=True)]
        shown = found[title][f"{mode}/{drift}"][:, 0]
        rows += [[title, mode, drift, f"value of parameter {picked[0]}", t + 1, float(v)] for t, v in enumerate(shown)]
    shares = {
        drift: [
            100 * tests[title, "training", drift].rejected / max(tests[title, "training", drift].num_tested, 1)
            for title in found
        ]
        for drift in DRIFTS
    }
    size = lab.size
    return Drawing(
        name="gaussian",
        title="Are the drifts of parameters normal?",
        caption=f"{size.data}, FedAvg, {size.model}, {size.trace_rounds} rounds in {_federation(size)}, "
        f"{size.cohort} a round. Per partition: one parameter's drifts with the normal "
        "of their mean and deviation, their quantiles beside the normal's, and D'Agostino-Pearson p-values of "
        f"{size.trace_params} parameters while training (line) and at the untrained model (dashed).",
        reading="If drifts were normal, histograms would follow their curves, quantiles the diagonal, and only 5 % of "
        "the p-values would lie left of the dotted line. While training, the test rejects "
        f"{_span(shares['period'])} of the parameters' period drifts and {_span(shares['client'])} of their client "
        "drifts, by partition.",
        width=8.5,
        height=2.0 * len(found) + 0.4,
        draw=lambda figure: _draw_gaussian(figure, found, tests),
        columns=["partition", "mode", "drift", "quantity", "index", "value"],
        rows=rows,
    )


def _federation(size: Size) -> str:
    most = f" with up to {size.trace_examples} examples each" if size.trace_examples else ""
    return f"a federation of up to {size.trace_clients} clients{most}"


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"


def _draw_gaussian(figure: Figure, found: dict[str, Arrays], tests: dict[tuple[str, str, str], Normality]) -> None:
    panels = figure.subplots(len(found), 4, squeeze=False)
    for line, (title, arrays) in enumerate(found.items()):
        for column, drift in enumerate(DRIFTS):
            axes, values = panels[line, column], arrays[f"training/{drift}"][:, 0]
            axes.hist(values, bins=30, density=True, color=COLOURS[column], alpha=0.5)
            spread = values.std() or 1.0
            grid = np.linspace(values.min(), values.max(), 200)
            axes.plot(grid, stats.norm(values.mean(), spread).pdf(grid), color="black", linewidth=1)
            p_value = tests[title, "training", drift].p_values[0]
            axes.set_title(f"{title}\n{drift} drift, p = {p_value:.2g}")
            axes.set_yticks([])
            axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
            theory, sample = quantiles(values)
            panels[line, 2].plot(theory, sample, ".", color=COLOURS[column], markersize=3, label=drift)
            for mode, dash in zip(MODES, DASHES, strict=False):
                test = tests[title, mode, drift]
                ranked = np.sort(test.p_values[np.isfinite(test.p_values)]).clip(1e-12)
                if len(ranked):
                    share = np.arange(1, len(ranked) + 1) / len(ranked)
                    panels[line, 3].step(ranked, share, dash, where="post", color=COLOURS[column], linewidth=1.3)
        ends = panels[line, 2].get_xlim()
        panels[line, 2].plot(ends, ends, color="black", linewidth=0.8)
        panels[line, 2].set(title="Q-Q", xlim=ends)
        panels[line, 3].axvline(0.05, color="black", linestyle=":", linewidth=1)
        panels[line, 3].set(xscale="log", xlim=(1e-12, 1), ylim=(0, 1), title="share with p below")
    panels[0, 2].legend(loc="upper left", markerscale=2)
    panels[-1, 2].set_xlabel("normal's quantiles")
    panels[-1, 3].set_xlabel("p")


def noise(lab: Lab) -> Drawing:
    """Period drift beside the noise of iid batches of as many examples."""
    found = {title: traced(lab, title, options) for title, options in lab.partitions().items()}
    rows: list[list[Any]] = []
    for title, arrays in found.items():
        for kind in ("period", "batch", "cohort update", "batch update"):
            for name in ("square", "cosine", "cosine_error", "effective_rank", "top_share"):
                rows.append([title, kind, name, 0, float(arrays[f"training/{kind}/{name}"])])
            falling = arrays[f"training/{kind}/autocorrelation"].tolist()
            rows += [[title, kind, "autocorrelation", lag, value] for lag, value in enumerate(falling, start=1)]
    worst = list(found)[-1]
    value = {(kind, name): float(found[worst][f"training/{kind}/{name}"]) for kind in ("period", "batch") for name in
             ("square", "effective_rank", "cosine")}  # fmt: skip
    return Drawing(
        name="noise",
        title="Period drift is not the noise of SGD",
        caption=f"{lab.size.data}, FedAvg, {lab.size.model}, {lab.size.trace_rounds} rounds in "
        f"{_federation(lab.size)}: gradients of each round's cohort, and of iid batches of "
        "as many examples, minus the full gradient. Effective rank: in about how many directions the noise of all "
        "rounds points; autocorrelation: how much of it comes back some rounds later (bars: two standard errors).",
        reading="The same number of examples in both: what differs is that a cohort's come from few clients. On the "
        f"last partition ({worst}) period drift is {value['period', 'square'] / value['batch', 'square']:.0f} times as "
        f"large as the batches' noise and points in about {value['period', 'effective_rank']:.0f} directions instead "
        f"of {value['batch', 'effective_rank']:.0f}, while from round to round its mean cosine is "
        f"{value['period', 'cosine']:+.3f} (batches: {value['batch', 'cosine']:+.3f}).",
        width=8.5,
        height=5.2,
        draw=lambda figure: _draw_noise(figure, found),
        columns=["partition", "of", "statistic", "lag", "value"],
        rows=rows,
    )


def _draw_noise(figure: Figure, found: dict[str, Arrays]) -> None:
    panels = figure.subplots(2, 2)
    places, titles = np.arange(len(found)), list(found)
    pairs = {"period": "cohorts (period drift)", "batch": "iid batches (SGD's noise)"}
    for number, (kind, label) in enumerate(pairs.items()):
        at, look = places + 0.16 * (number - 0.5), {"color": COLOURS[number], "label": label}
        values = {name: [float(a[f"training/{kind}/{name}"]) for a in found.values()] for name in
                  ("square", "effective_rank")}  # fmt: skip
        panels[0, 0].plot(at, values["square"], MARKERS[number], **look)
        panels[0, 1].plot(at, values["effective_rank"], MARKERS[number], **look)
        update = f"training/{'cohort' if kind == 'period' else 'batch'} update"
        cosines = [float(a[f"{update}/cosine"]) for a in found.values()]
        errors = [2 * float(a[f"{update}/cosine_error"]) for a in found.values()]
        panels[1, 0].errorbar(at, cosines, yerr=errors, fmt=MARKERS[number], **look)
        falling = found[titles[-1]][f"training/{kind}/autocorrelation"]
        panels[1, 1].plot(np.arange(1, len(falling) + 1), falling, MARKERS[number], markersize=4, **look)
    for axes in panels.flat[:3]:
        axes.set_xticks(places, titles)
        axes.set_xlim(-0.5, len(found) - 0.5)
    panels[0, 0].set(yscale="log", title="mean squared length")
    panels[0, 0].legend()
    panels[0, 1].set(title="effective rank", ylim=(0, 1.1 * panels[0, 1].get_ylim()[1]))
    panels[1, 0].axhline(0, color="black", linewidth=0.8)
    panels[1, 0].set(title="cosine between successive gradients", ylim=(None, 1))
    panels[1, 1].axhline(0, color="black", linewidth=0.8)
    panels[1, 1].set(title=f"autocorrelation of the noise, {titles[-1]}", xlabel="lag, rounds", ylim=(-0.5, 1))
