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
from pathlib import Path
from typing import Any

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
cohort = 10
model = "lenet5"
eval_every = 10
[base.data]
name = "glyphs"
num_writers = 100
partition = "dirichlet"
alpha = 0.3
"""


def engine_alone(path: Path, engine: str) -> float:
    """Seconds for the data and the rounds, with nothing written."""
    begun = time.perf_counter()
    points, datasets = sweeps.read(path).points, DataSets()
    for some in batches(points, engine=engine):
        simulate([point.plan.build(datasets.get(point.plan)) for point in some], engine=engine, device="cpu", width=32)
    return time.perf_counter() - begun


def as_sweep(path: Path, engine: str) -> float:
    """Seconds for the whole command, calibration included."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        begun = time.perf_counter()
        options = sweep_commands.Options(engine=engine, device="cpu", width=32)
        sweep_commands.play(sweeps.read(path), Path(folder) / "out", options)
        return time.perf_counter() - begun


def main() -> None:
    quick = sys.argv[1:] == ["quick"]
    result: dict[str, Any] = {"runs": 16 if quick else 200, "rounds": 10, "model": "LeNet-5, 10 clients a round"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "short.toml"
        path.write_text(SWEEP.format(seeds=", ".join(map(str, range(2 if quick else 25))), rounds=10))
        for engine in ("reference",) if quick else ("reference", "lanes"):
            pairs = [(engine_alone(path, engine), as_sweep(path, engine)) for _ in range(1 if quick else 3)]
            alone, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
            overhead = statistics.median(b / a - 1 for a, b in pairs)
            seconds = {"engine_alone_seconds": round(alone, 2), "sweep_seconds": round(whole, 2)}
            result[engine] = {**seconds, "overhead_percent": round(100 * overhead, 1)}
    save("sweep", result)


if __name__ == "__main__":
    main()
