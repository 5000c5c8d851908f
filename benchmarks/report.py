"""How large the page of 400 long runs is, how long it takes to make and to open in Chromium.

`python benchmarks/report.py [FILE]`; with FILE the page is kept there.

The records are as long as the paper's: 1,500 rounds, 150 evaluations, four facts in every round of every run, under the
header of a run that was really made. Their curves are drawn from a random walk; nobody reads them.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import save

from fedeve import FedEve, LocalWork, Record, Run, datasets, simulate
from fedeve.record import RecordFile
from fedeve.report import page, results

ROWS, COLUMNS, SEEDS, ROUNDS, EVERY = 8, 10, 5, 1500, 10
REPEATS = 5


def lines(seed: int, every: int) -> list[dict[str, Any]]:
    """The lines of a long record."""
    rng = np.random.default_rng(seed)
    accuracy = 0.8 * (1 - np.exp(-np.arange(1, ROUNDS + 1) / 300)) + rng.normal(0, 0.01, ROUNDS)
    facts = {
        "client_drift": 1e-5 * np.exp(rng.normal(0, 0.3, ROUNDS)),
        "gain": rng.beta(5, 5, ROUNDS),
        "period_drift": 1e-5 * np.exp(rng.normal(0, 0.3, ROUNDS)),
        "variance": 1e-6 * np.exp(rng.normal(0, 0.3, ROUNDS)),
    }
    found = []
    for end in range(every, ROUNDS + 1, every):
        part = {name: values[end - every : end].tolist() for name, values in facts.items()}
        value = float(accuracy[end - 1])
        found.append({"round": end, "accuracy": value, "loss": 1 - value, "facts": part, "answered": [10] * every})
    return found


def build(folder: Path, *, every: int) -> None:
    """A sweep of 400 runs with their records."""
    data = datasets.load("digits", num_clients=30)
    run = Run(method=FedEve(), data=data, model="linear", rounds=1, cohort=5, local=LocalWork(lr=0.1))
    header = simulate(run).header
    header["config"] |= {"rounds": ROUNDS, "eval_every": every}
    runs = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            for seed in range(SEEDS):
                place = f"runs/method-{row}-column-{column}-seed-{seed}"
                (folder / place).mkdir(parents=True)
                file = RecordFile(folder / place / "record.jsonl")
                file.create(header | {"seed": seed})
                text = "".join(json.dumps(line) + "\n" for line in lines(seed + 10 * (column + 20 * row), every))
                with file.path.open("a") as stream:
                    stream.write(text)
                timing = {"seconds": 812.5, "client_steps": 1_234_567, "examples": 24_691_340}
                (folder / place / "timing.json").write_text(json.dumps(timing))
                name = "FedEve" if row == ROWS - 1 else f"method {row}"
                entry = {"folder": place, "row": name, "column": f"setting {column}", "seed": seed, "config": {}}
                runs.append(entry)
    printed = {"accuracy": {"FedEve": {f"setting {column}": [79.0, 0.2] for column in range(COLUMNS)}}}
    table = {"format": 1, "title": "400 long runs", "metrics": ["accuracy", "loss"], "last": 100, "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(table | {"printed": printed, "source": "nowhere"}))
    assert Record.read(folder / runs[0]["folder"] / "record.jsonl").evaluated[-1] == ROUNDS


def opening(path: Path) -> dict[str, dict[str, float]]:
    """Seconds: until the page is loaded and its scripts have run, and until a chart scrolled to is drawn."""
    from playwright.sync_api import sync_playwright

    loaded, drawn, switched = [], [], []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(REPEATS):
            tab = chromium.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            tab.goto(path.as_uri(), wait_until="load")
            tab.wait_for_selector("html[data-ready]", state="attached")
            loaded.append(time.perf_counter() - start)
            start = time.perf_counter()
            tab.locator(".plot").first.scroll_into_view_if_needed()
            tab.wait_for_selector(".plot .main-svg")
            drawn.append(time.perf_counter() - start)
            start = time.perf_counter()
            tab.locator(".choice").select_option("column:3")
            tab.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
            switched.append(time.perf_counter() - start)
            tab.close()
        chromium.close()
    names = {"open_seconds": loaded, "first_chart_seconds": drawn, "change_column_seconds": switched}
    return {name: {"median": round(statistics.median(t), 2), "least": round(min(t), 2)} for name, t in names.items()}


def bench(every: int) -> dict[str, Any]:
    """The page of 400 runs evaluated every so many rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name) / "sweep", Path(name) / "report.html"
        build(folder, every=every)
        start = time.perf_counter()
        found = results.read([folder])
        page.write_page(path, found, title="400 long runs", made="a benchmark")
        took = time.perf_counter() - start
        if len(sys.argv) > 1:  # keep it, to be looked at
            shutil.copy(path, sys.argv[1])
        return {"megabytes": round(path.stat().st_size / 1e6, 2), "make_seconds": round(took, 1), **opening(path)}


if __name__ == "__main__":
    shape = {"runs": ROWS * COLUMNS * SEEDS, "rounds": ROUNDS}
    save("report", shape | {f"evaluated_every_{every}": bench(every) for every in (1, EVERY)})
