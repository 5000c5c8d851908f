"""A small sweep that was really run, with everything a page must cope with: a failed run, one not run, one under way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedeve import FederatedData, LocalWork, Run, datasets, methods, simulate
from fedeve.report import results

SEEDS = (192, 225, 226)
ROWS = {"FedAvg": "fedavg", "FedAvgM": "fedavgm", "FedEve": "fedeve"}
COLUMNS = {"digits, Dirichlet 0.3": 0.3, "digits, Dirichlet 0.1": 0.1}
NASTY = "<script>alert(1)</script> & 100 % of_it"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def tiny(data: FederatedData, *, method: str, seed: int, rounds: int = 12, **settings: Any) -> Run:
    return Run(
        method=methods.create(method, **settings), data=data, model="linear", rounds=rounds, cohort=5, eval_every=2,
        local=LocalWork(lr=0.1), seed=seed,
    )  # fmt: skip


def write_sweep(folder: Path, runs: list[dict[str, Any]], **changes: Any) -> None:
    table = {"format": 1, "title": "A small sweep", "metrics": ["accuracy", "loss"], "last": 4, "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(table | changes))


def listed(folder: str, row: str, column: str, seed: int, config: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"folder": folder, "row": row, "column": column, "seed": seed, "config": config or {}}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep, run once; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("made") / "sweep"
    runs = []
    for column, alpha in COLUMNS.items():
        data = datasets.load("digits", partition="dirichlet", alpha=alpha, num_clients=30)
        for row, name in ROWS.items():
            for seed in SEEDS:
                run = tiny(data, method=name, seed=seed)
                place = f"runs/{name}-{alpha}-{seed}"
                simulate(run, out=folder / place)
                timing = {"seconds": 1.5, "client_steps": 240, "examples": 3600}
                (folder / place / "timing.json").write_text(json.dumps(timing))
                runs.append(listed(place, row, column, seed, run.describe()))
    first = next(iter(COLUMNS))
    runs += [listed(f"runs/nasty-{seed}", NASTY, first, seed) for seed in SEEDS[:1]]
    (folder / "runs/nasty-192").mkdir()
    (folder / "runs/nasty-192/failed.json").write_text(json.dumps({"reason": "<b>out of memory</b>"}))
    runs += [listed("runs/never", "SCAFFOLD", first, SEEDS[0])]
    printed = {"accuracy": {"FedEve": {first: [55.0, 0.5]}, "FedOpt": {first: [5.13, 0.0]}}}
    write_sweep(folder, runs, printed=printed, source="a table that was made up for this test")
    return folder


@pytest.fixture
def sweep(made: Path, tmp_path: Path) -> Path:
    """A copy of the sweep to change."""
    return Path(shutil.copytree(made, tmp_path / "sweep"))


@pytest.fixture
def section(made: Path) -> results.Section:
    return results.read([made]).sections[0]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real headless Chromium of this machine."""
    if BROWSER is None and not os.environ.get("FEDEVE_REQUIRE_BROWSER"):
        pytest.skip("no Chromium on this machine; CI installs and requires it")
    assert BROWSER is not None, "FEDEVE_REQUIRE_BROWSER is set, but there is no Chromium"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()
