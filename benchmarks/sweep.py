"""What a sweep costs beyond its engine: 200 short runs as a sweep, and the same runs by the engine alone.

`python benchmarks/sweep.py [quick]`. Both have the same runs, engine and thread; the sweep writes records, checkpoints,
timings and its list of runs, shows lines, and is measured from reading its file to its end.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import save

from fedeve import simulate
from fedeve.experiments import sweep as sweeps
from fedeve.experiments import sweep_commands
from fedeve.experiments.sweep_play import DataSets, batches

SWEEP = """
title = "Short runs"
seeds = [{seeds}]
[grid]
method = ["fedavg", "fedavgm", "fedprox", "fedeve"]
local.lr = [0.05, 0.1]
[base]
rounds = {rounds}
cohort = 5
model = "lenet5"
eval_every = 5
[base.data]
name = "glyphs"
num_writers = 100
num_images = 3000
num_test = 300
partition = "dirichlet"
alpha = 0.3
"""


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor: on a busy machine only the latter can be compared."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def engine_alone(path: Path, engine: str) -> None:
    """The data and the rounds, with nothing written."""
    points, datasets = sweeps.read(path).points, DataSets()
    for some in batches(points, engine=engine):
        simulate([point.plan.build(datasets.get(point.plan)) for point in some], engine=engine, device="auto", width=64)


def as_sweep(path: Path, engine: str) -> None:
    """The whole command, calibration included."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = sweep_commands.Options(engine=engine, device="auto", width=64)
        sweep_commands.play(sweeps.read(path), Path(folder) / "out", options)


def compare(path: Path, engine: str, repeats: int) -> dict[str, float]:
    """Medians over repeats, one after the other in turn."""
    pairs = [(timed(lambda: engine_alone(path, engine)), timed(lambda: as_sweep(path, engine))) for _ in range(repeats)]
    result = {}
    for number, clock in enumerate(("", "cpu_")):
        result[f"engine_alone_{clock}seconds"] = round(statistics.median(a[number] for a, _ in pairs), 2)
        result[f"sweep_{clock}seconds"] = round(statistics.median(b[number] for _, b in pairs), 2)
        overhead = statistics.median(b[number] / a[number] - 1 for a, b in pairs)
        result[f"{clock}overhead_percent"] = round(100 * overhead, 1)
    return result


def main() -> None:
    quick = sys.argv[1:] == ["quick"]
    result: dict[str, Any] = {"runs": 200, "rounds": 5, "model": "LeNet-5, 5 clients a round"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "short.toml"
        path.write_text(SWEEP.format(seeds=", ".join(map(str, range(25))), rounds=5))
        for engine in ("reference", "lanes") if torch.cuda.is_available() else ("reference",):
            result[engine] = compare(path, engine, 1 if quick else 3)
    save("sweep", result)


if __name__ == "__main__":
    main()
