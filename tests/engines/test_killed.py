"""Real processes, killed at random moments: the run leaves what one leaves that was never touched."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import assert_same_files

from commandline import in_process
from fedeve.store import CHECKPOINT, RECORD

CONFIG = """
rounds = 60
cohort = 5
model = "linear"
eval_every = 4
dropout = 0.2
method = "scaffold"
[data]
name = "digits"
num_clients = 30
[local]
lr = 0.1
"""

# The kills are real and so are the processes; only their seconds of importing are spared.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["commandline", "fedeve.engines.lanes", "fedeve.experiments.watching", "sklearn.datasets"]
)


def _fedeve(*arguments: str) -> None:
    sys.exit(in_process(*arguments).returncode)


def play_cli(*arguments: str) -> Any:
    process = SERVER.Process(target=_fedeve, args=arguments)
    process.start()
    return process


def finish(process: Any) -> int:
    """Wait for its exit code."""
    process.join()
    return int(process.exitcode)


def kill_at_random_moments(config: Path, out: Path, *, kills: int, seed: int, engine: str = "auto") -> None:
    """Start and kill a run again and again, then let it finish."""
    rng = np.random.default_rng(seed)
    start = ("run", str(config), "--out", str(out), "--engine", engine)
    for _ in range(kills):
        command = ("resume", str(out)) if (out / RECORD).exists() else start
        process = play_cli(*command, "--checkpoint-every", "0")
        seen = _progress(out)
        deadline = time.monotonic() + 60
        # Getting ready takes a while; the moments that matter come after a first sign of progress.
        while process.is_alive() and _progress(out) == seen and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.06)))
        process.kill()
        process.join()
    assert finish(play_cli(*(("resume", str(out)) if (out / RECORD).exists() else start))) == 0


def _progress(out: Path) -> tuple[float, ...]:
    return tuple(path.stat().st_mtime if path.exists() else 0.0 for path in (out / RECORD, out / CHECKPOINT))


@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_killed_at_random_moments_a_run_ends_as_if_never_touched(tmp_path: Path, engine: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    assert finish(play_cli("run", str(config), "--out", str(tmp_path / "whole"), "--engine", engine)) == 0
    kill_at_random_moments(config, tmp_path / "parts", kills=3, seed=1, engine=engine)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedeve", "feddyn", "fedadam"])
def test_killed_many_times_whatever_the_method(tmp_path: Path, method: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.replace("scaffold", method))
    assert finish(play_cli("run", str(config), "--out", str(tmp_path / "whole"))) == 0
    kill_at_random_moments(config, tmp_path / "parts", kills=15, seed=2)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")
