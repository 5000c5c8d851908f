"""Sweeps killed with SIGKILL at random moments end as if never touched: every record and checkpoint, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeping import SWEEP, assert_same_runs, write

from fedeve.experiments import sweep_commands

# The kills are real and so are the processes; only their seconds of importing are spared.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["fedeve.experiments.sweep_commands", "fedeve.experiments.sweep_view", "sklearn.datasets"]
)


def start(config: Path, out: Path, engine: str, **options: Any) -> Any:
    options = {"checkpoint_every": 0.0, "no_calibration": True, "as_json": True} | options
    process = SERVER.Process(target=sweep_commands.sweep, args=(config, out), kwargs={"engine": engine, **options})
    process.start()
    return process


def kill_and_continue(config: Path, out: Path, engine: str, *, kills: int, seed: int) -> int:
    """Kill a sweep again and again, then let it finish; how many kills met it at work."""
    rng, met = np.random.default_rng(seed), 0
    for _ in range(kills):
        process = start(config, out, engine, checkpoint_every=float(rng.choice([0.0, 0.05])))
        seen, deadline = marks(out), time.monotonic() + 60
        while process.is_alive() and marks(out) == seen and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(float(rng.exponential(0.1)))
        met += process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    process = start(config, out, engine)
    process.join()
    assert process.exitcode == 0
    return met


def marks(out: Path) -> tuple[int, ...]:
    """Changes with every record line and every checkpoint."""
    found = []
    for path in (*out.glob("runs/*/record.jsonl"), *out.glob("runs/*/checkpoint.safetensors")):
        try:
            found.append(path.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
    return tuple(found)


def check(tmp_path: Path, engine: str, *, kills: int, seed: int, text: str = SWEEP) -> None:
    config = write(tmp_path, text)
    whole = start(config, tmp_path / "whole", engine)
    whole.join()
    assert whole.exitcode == 0
    met = kill_and_continue(config, tmp_path / "parts", engine, kills=kills, seed=seed)
    assert met >= kills // 2, "most kills came when everything was done: make the sweep longer"
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_killed_at_random_moments_every_record_is_as_if_never_touched(tmp_path: Path, engine: str) -> None:
    check(tmp_path, engine, kills=10, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "lanes"])
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_killed_thirty_times_with_every_method(tmp_path: Path, engine: str, seed: int) -> None:
    methods = '["fedavg", "scaffold", "fedeve", "feddyn", "fedadam", "fedprox", "fedavgm"]'
    check(tmp_path, engine, kills=30, seed=seed, text=SWEEP.replace('["fedavg", "scaffold"]', methods))
