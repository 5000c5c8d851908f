"""A small sweep that is really run, with everything a page must cope with: a failed run, one not run, bad names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedeve import FederatedData, LocalWork, Run, datasets, methods, simulate

SEEDS = (192, 225, 226)
ROWS = {"FedAvg": "fedavg", "FedAvgM": "fedavgm", "FedEve": "fedeve"}
COLUMNS = {"digits, Dirichlet 0.3": 0.3, "digits, Dirichlet 0.1": 0.1}
NASTY = "<script>alert(1)</script> & 100 % of_it"


def tiny(data: FederatedData, *, method: str, seed: int, rounds: int = 12, **settings: Any) -> Run:
    return Run(
        method=methods.create(method, **settings), data=data, model="linear", rounds=rounds, cohort=5, eval_every=2,
        local=LocalWork(lr=0.1), seed=seed,
    )  # fmt: skip


def write_sweep(folder: Path, runs: list[dict[str, Any]], **changes: Any) -> None:
    table = {"format": 1, "title": "A small sweep", "metrics": ["accuracy", "loss"], "last": 4, "runs": runs}
    table["engine"] = "reference"
    (folder / "sweep.json").write_text(json.dumps(table | changes))


def listed(folder: str, row: str, column: str, seed: int, config: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"folder": folder, "row": row, "column": column, "seed": seed, "config": config or {}}


def build(folder: Path) -> None:
    """Run the sweep into a folder."""
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
    write_sweep(folder, runs, printed=printed, source="a table that was made up for this test", notes=["Not <real>."])
