"""Draws the pictures of the documentation into docs/img: `python docs/figures.py [NAME ...]`."""

from __future__ import annotations

import io
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats

from fedeve import LocalWork, Run, datasets, methods, simulate
from fedeve.data import glyphs
from fedeve.drift import grids
from fedeve.drift.lab import Lab, size
from fedeve.drift.style import COLOURS, STYLE
from fedeve.drift.training_figures import condition_rows, draw_conditions
from fedeve.experiments import demo, demo_page, watching
from fedeve.methods import kalman
from fedeve.methods.bayes import GridFilter
from fedeve.report import results, tables
from fedeve.report.page import write_page
from fedeve.seeds import SEEDS

HERE = Path(__file__).parent / "img"
ROOT = HERE.parent.parent


def sheet() -> None:
    """Eight writers of the glyphs data set, the same characters in eight hands."""
    plt.imsave(HERE / "glyphs.png", np.kron(255 - glyphs.sheet(8), np.ones((2, 2), np.uint8)), cmap="gray")


def filter_() -> None:
    """The posterior of one parameter on a grid and in closed form, for two kinds of noise of one variance."""
    prior, noise, seen = 1.0, 0.5, 3.0
    closed = kalman.update(torch.zeros(1), torch.tensor(prior), torch.full((1,), seen), torch.tensor(noise))
    start = GridFilter.of(stats.norm(0, prior**0.5).pdf, low=-6, high=9, num_points=3001)
    kinds = {
        "Gaussian noise": stats.norm(0, noise**0.5).pdf,
        "Laplace noise": stats.laplace(0, (noise / 2) ** 0.5).pdf,
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axes, (name, density) in zip(panels, kinds.items(), strict=True):
        posterior = start.observe(seen, density)
        gaussian = stats.norm(closed.mean.item(), closed.variance.item() ** 0.5).pdf(start.points)
        axes.plot(start.points, start.density, color="#8a93a3", label="prediction")
        axes.plot(start.points, posterior.density, color="#009E73", linewidth=3, alpha=0.6, label="posterior, grid")
        axes.plot(start.points, gaussian, "k--", linewidth=1, label="posterior, closed form")
        axes.axvline(seen, color="#D55E00", linestyle=":", label="observation")
        axes.set(title=f"{name}: mean {posterior.mean:.3f}, Kalman {closed.mean.item():.3f}", xlim=(-3, 5))
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(HERE / "filter.png", dpi=140)


def demo_() -> None:
    """The demo's accuracy curves over all five seeds; takes some minutes."""
    chosen = demo.runs(rounds=200, seeds=SEEDS)
    groups = demo.play(chosen, out=Path("demo"), watching=watching.watching)
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    demo_page.draw_accuracy(axes, groups)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "demo.png", dpi=140)
    for row in demo_page.rows(groups, last=demo.last_rounds(200)):
        print(row)
    print(*demo_page.sentences(groups, last=demo.last_rounds(200)), sep="\n")


def report_() -> None:
    """A page of 40 short runs on digits, really run, as Chromium shows it; takes a minute or two."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        for alpha in (1.0, 0.1):
            data = datasets.load("digits", partition="dirichlet", alpha=alpha, num_clients=60)
            for method in ("fedavg", "fedavgm", "fedadam", "fedeve"):
                for seed in SEEDS:
                    options = {"model": "linear", "rounds": 120, "cohort": 5, "eval_every": 4}
                    run = Run(method=methods.create(method), data=data, local=LocalWork(lr=0.05), seed=seed, **options)
                    simulate(run, out=folder / f"{method}-{alpha}-{seed}")
            print(f"digits, alpha {alpha}: done", flush=True)
        page = Path(name) / "report.html"
        (section,) = results.read([folder], last=20).sections
        shown = replace(section, title="Four methods on digits", folder=Path("runs"))
        write_page(page, results.Results((shown,)), title=shown.title, made="python docs/figures.py report")
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1180, "height": 1280})
            tab.goto(page.as_uri())
            for number in range(4):
                tab.locator(".plot").nth(number).scroll_into_view_if_needed()
                tab.locator(".plot").nth(number).locator(".main-svg").first.wait_for()
            tab.evaluate("scrollTo(0, 0)")
            picture = tab.screenshot()
            browser.close()
    Image.open(io.BytesIO(picture)).convert("RGB").save(HERE / "report.webp", quality=85)


def paper() -> None:
    """What came of the paper's tables: every method against FedAvg on images, and hit rates on MovieLens-1M."""
    shown = {"FedAvgM": "FedAvgM", "FedProx": "FedProx", "SCAFFOLD": "SCAFFOLD", "FedOpt (FedAdam)": "FedAdam"}
    shown |= {"FedEve": "FedEve", "FedEveAdam (ours)": "FedEveAdam"}
    figure, (images, movies) = plt.subplots(
        1, 2, figsize=(10.5, 3.9), layout="constrained", width_ratios=(2.4, 1), sharex=False
    )
    labels, lowest, highest, colours = [], -2.5, 6.5, [COLOURS[n] for n in (0, 4, 2, 3, 1, 5)]
    sweeps = {
        "table3-glyphs-full": "glyphs",
        "table1-cifar100": "CIFAR-100\nN 100",
        "table1-cifar100-500": "CIFAR-100\nN 500",
    }
    for folder, name in sweeps.items():
        (table,) = tables.tables(results.read([ROOT / "results" / folder]).sections[0])
        for number, heading in enumerate(table.headings):
            if "E = 3" in heading.column or "E = 5" in heading.column:
                continue
            place = len(labels)
            setting = heading.column.split(", ")[1].replace("Dirichlet ", "α ")
            labels.append(f"{name}\n{setting}")
            for n, (row, colour) in enumerate(zip(shown, colours, strict=True)):
                if row not in table.rows or not table.cells[row, number].values:
                    continue
                theirs = table.cells["FedAvg", number].values
                gaps = [value - theirs[seed] for seed, value in table.cells[row, number].values.items()]
                gap = statistics.mean(gaps)
                x, y = place + (n - 2.5) * 0.12, min(max(gap, lowest), highest)
                marker = "o" if y == gap else "v" if gap < y else "^"
                images.scatter(x, y, marker=marker, color=colour, s=34, label=shown[row] if not place else "")
                if y == gap and len(gaps) > 1:
                    images.errorbar(x, y, yerr=statistics.stdev(gaps), color=colour, linewidth=1)
                if y != gap:
                    away, side = ((4, -3), "left") if gap < y else ((-4, -3), "right")
                    images.annotate(f"{gap:+.0f}", (x, y), away, textcoords="offset points", fontsize=7.5, ha=side)
    images.axhline(0, color="#333333", linewidth=1)
    images.set_xticks(range(len(labels)), labels, fontsize=7.5)
    images.set(ylabel="points of accuracy above FedAvg", ylim=(lowest - 0.5, highest + 1.2))
    words = "1,500 rounds, one local epoch; glyphs: five seeds, CIFAR-100: one to three; bars: deviation of their leads"
    images.set_title(words, fontsize=8.5)
    images.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    section = results.read([ROOT / "results" / "table2"]).sections[0]
    table = next(t for t in tables.tables(section) if t.title == "HR@10")
    names = ["FedAvg", *(row for row in shown if row != "SCAFFOLD")]
    for number, heading in enumerate(table.headings):
        at_printed_rate = heading.column.endswith("lr 0.01")
        for n, row in enumerate(names):
            cell, colour = table.cells[row, number], "#333333" if row == "FedAvg" else colours[list(shown).index(row)]
            place, face = -n + (0.12 if at_printed_rate else -0.12), colour if at_printed_rate else "white"
            movies.errorbar(cell.mean, place, xerr=cell.deviation, fmt="o", color=colour, mfc=face, capsize=3)
            if cell.printed:
                movies.scatter(cell.printed[0], -n, marker="x", color=colour, s=28)
    # tests/data/test_movielens_real.py finds it on the real file, which is not here.
    movies.axvline(0.457, color="#8a93a3", linestyle=":")
    movies.text(0.46, -4.5, "popularity", fontsize=7.5, color="#5a6373")
    movies.set_yticks([-n for n in range(len(names))], [shown.get(row, row) for row in names], fontsize=8)
    movies.set_title("MovieLens-1M: HR@10, five seeds\nAdam 0.01 full, 0.001 hollow, printed x", fontsize=9)
    for axes in (images, movies):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(HERE / "paper.png", dpi=140)


def conditions() -> None:
    """The four conditions at the paper's rounds, from their records: five seeds of one local epoch, one of the rest."""
    place = Lab(size("paper", data="mnist", num_clients=539), ROOT / "results")
    grid = grids.conditions(place)
    kept = [cell for cell in grid.cells if cell.keys["epochs"] == 1 or cell.keys["seed"] == SEEDS[0]]
    rows = condition_rows(grids.records(place, replace(grid, cells=kept)))
    with matplotlib.rc_context(STYLE):
        figure = plt.figure(figsize=(8.5, 7.2), layout="constrained")
        draw_conditions(figure, rows, place.size)
        figure.savefig(HERE / "drift-fig2b-1500.png", dpi=140)


PICTURES = {"sheet": sheet, "filter": filter_, "demo": demo_, "report": report_, "paper": paper}
PICTURES |= {"conditions": conditions}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
