"""Draws the pictures of the documentation into docs/img: `python docs/figures.py [sheet] [filter] [demo] [report]`."""

from __future__ import annotations

import io
import shutil
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
from fedeve.experiments import demo, demo_page, watching
from fedeve.methods import kalman
from fedeve.methods.bayes import GridFilter
from fedeve.report import results
from fedeve.report.page import write_page

HERE = Path(__file__).parent / "img"


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
    chosen = demo.runs(rounds=200, seeds=demo.SEEDS)
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
                for seed in demo.SEEDS:
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


PICTURES = {"sheet": sheet, "filter": filter_, "demo": demo_, "report": report_}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
