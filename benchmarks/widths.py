"""How full lanes are in the runs of Table 3, by width: `python benchmarks/widths.py`. Nobody trains: steps do nothing.

One seed of the table at FEMNIST's size, a pool for every partition and one for all of them, as many rounds as ROUNDS.
`steps` is how many steps of the whole pool it takes; a step takes the longer the wider the pool is (`steps.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from machine import save
from torch import nn

from fedeve import FederatedData, LocalWork, Run, all_methods, datasets
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import Book, _play, _steady
from fedeve.engines.pool import Batch
from fedeve.engines.width import useful

METHODS = ("fedavg", "fedavgm", "fedprox", "scaffold", "fedadam", "fedeve", "fedeveadam")
PARTITIONS: dict[str, dict[str, Any]] = {"natural": {}} | {
    f"dirichlet {alpha}": {"partition": "dirichlet", "alpha": alpha} for alpha in (1.0, 0.1, 0.01)
}
ROUNDS = 20
MODEL = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(2), nn.Linear(2, 62))  # its size does not matter here


def runs(data: FederatedData) -> list[Run]:
    """Seven methods by three numbers of epochs."""
    works = [LocalWork(lr=0.01, batch=20, epochs=epochs) for epochs in (1, 3, 5)]
    common: dict[str, Any] = {"data": data, "model": MODEL, "rounds": ROUNDS, "eval_every": ROUNDS, "seed": 192}
    return [Run(method=all_methods()[name](), local=work, **common) for work in works for name in METHODS]


def played(some: list[Run], width: int) -> dict[str, Any]:
    """Who sits where, at a width, without the steps."""
    with _steady(1, "float32"):
        engine = Lanes(some, torch.device("cpu"), width=width, batched=True)
        _play(engine, [Book(engine, n, None, resume=False, every=1e9) for n in range(len(some))], None)
    steps = engine.profile.lane_steps // width
    return {"width": width, "steps": steps, "occupancy": round(engine.profile.occupancy, 3)}


def main() -> None:
    Batch._step = lambda self: None  # type: ignore[method-assign]
    result: dict[str, Any] = {"runs": len(METHODS) * 3, "rounds": ROUNDS}
    kinds: dict[str, list[Run]] = {}
    for name, options in PARTITIONS.items():
        kinds[name] = runs(datasets.load("glyphs", num_writers=3400, num_images=671_585, num_test=100, **options))
    kinds["all of them"] = [run for some in kinds.values() for run in some]
    for name, some in kinds.items():
        widths = {"a lane for every client": sum(run.cohort for run in some), "as many as are of use": useful(some)}
        result[name] = {words: played(some, width) for words, width in widths.items()}
    save("widths", result)


if __name__ == "__main__":
    main()
