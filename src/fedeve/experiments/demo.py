"""The demo: FedAvg, FedAvgM and FedEve on the same drifting clients and seeds, as a table and a page.

The setting is what a cross-device user has: a few hundred clients with skewed labels, ten of them a round. Methods
run with the paper's values, the local rate was chosen for FedAvg, and what comes out is what is shown.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any

from .. import __version__, methods
from ..data import datasets
from ..engines.loop import Watcher, simulate
from ..local import LocalWork
from ..record import Record
from ..run import Run
from ..seeds import SEEDS
from .demo_page import write_report

METHODS = {"FedAvg": "fedavg", "FedAvgM": "fedavgm", "FedEve": "fedeve"}
DATA: dict[str, Any] = {"name": "glyphs", "num_writers": 300, "partition": "dirichlet", "alpha": 0.1}
LOCAL = LocalWork(lr=0.1, batch=20, epochs=1)  # FedAvg's best of 0.03, 0.05, 0.1 and 0.2, at the first seed


def runs(*, rounds: int, seeds: tuple[int, ...] = SEEDS[:1]) -> list[tuple[str, Run]]:
    """The demo's runs with the names under which they are shown."""
    data = datasets.load(**DATA)
    return [
        (label, Run(method=methods.create(name), data=data, model="lenet5", rounds=rounds, local=LOCAL, seed=seed))
        for label, name in METHODS.items()
        for seed in seeds
    ]


def play(
    chosen: list[tuple[str, Run]], *, out: Path, watching: Callable[..., AbstractContextManager[Watcher]]
) -> dict[str, list[Record]]:
    """Play the runs in one pool of lanes and write the page; returns the records by name."""
    groups: dict[str, list[Record]] = {}
    with watching(*(f"{label} seed {run.seed}" for label, run in chosen)) as watch:
        records = simulate([run for _, run in chosen], watch=watch)
    for (label, _), record in zip(chosen, records, strict=True):
        groups.setdefault(label, []).append(record)
    run = chosen[0][1]
    out.mkdir(parents=True, exist_ok=True)
    write_report(
        out / "report.html",
        groups,
        title="FedEve beside FedAvg and FedAvgM on drifting clients",
        setting=describe(run),
        last=last_rounds(run.rounds),
        footer=f"fedeve {__version__}, {date.today()}, {platform.processor() or platform.machine()}, "
        f"PyTorch {records[0].header['versions']['torch']}. Made by: fedeve demo --rounds {run.rounds}",
    )
    return groups


def last_rounds(rounds: int) -> int:
    """How many of the last rounds the table averages: a fifth of them."""
    return max(rounds // 5, 1)


def describe(run: Run) -> str:
    """The setting in one sentence."""
    return (
        f"{run.data.num_clients} clients hold {len(run.data.order):,} images of 62 handwriting-like characters, dealt "
        f"by label with Dirichlet({DATA['alpha']}); {run.cohort} clients a round, LeNet-5, {run.rounds} rounds, one "
        f"local epoch of SGD at {run.local.lr} in batches of {run.local.batch}; {len(run.data.y_test):,} test images."
    )
