"""The lane engine beside the bare loop, in one run on one device: `python benchmarks/lanes.py [quick]`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from bare import bare_rounds
from machine import save

from fedeve import FederatedData, LocalWork, Run, all_methods, datasets
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import Book, _play, _steady

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORK = LocalWork(lr=0.05, batch=20)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def bare(data: FederatedData, *, rounds: int, model: str = "lenet5") -> float:
    """Rounds a second of the hand-written loop."""
    run = Run(method=all_methods()["fedavg"](), data=data, model=model, rounds=1)
    net = run.build_model().to(DEVICE)
    rows = [data.rows(k) for k in range(data.num_clients)]
    clients = [(data.inputs(data.x[r]).to(DEVICE), torch.from_numpy(data.y[r]).to(DEVICE)) for r in rows if len(r)]
    bare_rounds(net, clients, rounds=2, cohort=10, lr=0.05, batch=20)
    wait()
    start = time.perf_counter()
    bare_rounds(net, clients, rounds=rounds, cohort=10, lr=0.05, batch=20)
    wait()
    return rounds / (time.perf_counter() - start)


def lanes(runs: list[Run], *, width: int) -> dict[str, Any]:
    """Run-rounds a second, client-steps a second and occupancy; the first round, which captures, is not timed."""
    engine = Lanes(runs, DEVICE, width=width)
    books = [Book(engine, number, None, resume=False, every=1e9) for number in range(len(runs))]
    marks: list[float] = []

    def watch(progress: Any) -> None:
        wait()
        marks.append(time.perf_counter())

    _play(engine, books, watch)
    skipped = len(runs)
    seconds = marks[-1] - marks[skipped - 1]
    rounds = len(marks) - skipped
    steps = engine.work["client_steps"] * rounds / len(marks)
    return {
        "run_rounds_per_second": round(rounds / seconds, 2),
        "client_steps_per_second": round(steps / seconds),
        "occupancy": round(engine.work["client_steps"] / engine.work["lane_steps"], 3),
        "width": width,
    }


def sweep(data: FederatedData, count: int, rounds: int) -> list[Run]:
    """Runs of all methods in turn, with seeds of their own."""
    names = list(all_methods())
    return [
        Run(
            method=all_methods()[names[n % len(names)]](),
            data=data,
            rounds=rounds,
            seed=n,
            local=WORK,
            eval_every=rounds,
        )
        for n in range(count)
    ]


def main() -> None:
    quick = sys.argv[1:] == ["quick"]
    even = datasets.load("glyphs", num_writers=340, num_images=68_000, partition="iid")
    skewed = datasets.load("glyphs", num_writers=340, num_images=68_000, partition="dirichlet", alpha=0.01)
    result: dict[str, Any] = {"clients": "340 of 200 images, 10 a round, batch 20, LeNet-5"}
    with _steady(1):
        result["bare_rounds_per_second"] = round(bare(even, rounds=3 if quick else 20), 3)
        result["one_run"] = lanes(sweep(even, 1, 4 if quick else 200), width=10)
        for width in (16,) if quick else (100, 300, 600):
            result[f"sixty_runs_{width}"] = lanes(sweep(even, 4 if quick else 60, 3 if quick else 12), width=width)
        if not quick:
            result["sixty_runs_dirichlet_0.01"] = lanes(sweep(skewed, 60, 12), width=300)
    bare_speed = result["bare_rounds_per_second"]
    for value in result.values():
        if isinstance(value, dict):
            value["times_bare_per_run"] = round(value["run_rounds_per_second"] / bare_speed, 1)
    save(f"lanes-{DEVICE.type}", result)


if __name__ == "__main__":
    main()
