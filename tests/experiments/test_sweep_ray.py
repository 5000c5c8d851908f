"""A sweep on a real Ray cluster of two workers, one of them killed half-way, leaves what one process leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweeping import SWEEP, assert_same_runs, fedeve, write

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and not os.environ.get("FEDEVE_REQUIRE_EXTRAS"),
    reason="ray is an extra; make test-sweep installs and requires it",
)
# One process leaves them in order; the workers take them as they come. Long enough for a worker that starts late.
LONG = SWEEP.replace("rounds = 30", "rounds = 600")


def workers() -> dict[int, str]:
    """Processes of this machine that are workers of ours, and what they say they do."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text.startswith("ray::RayWorker"):
            found[int(path.parent.name)] = text
    return found


def holders(out: Path) -> set[int]:
    """Processes that are, or were last, playing a run."""
    return {int(path.read_text().split()[0]) for path in out.glob("runs/*/.lock") if path.read_text()}


def two_at_work(process: subprocess.Popen[str], out: Path, before: set[int]) -> set[int]:
    """The workers that play, once both do and one of them has left something to go on from."""
    deadline, found = time.monotonic() + 250, set[int]()
    while len(found) < 2 or not any(out.glob("runs/*/checkpoint.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline, "two workers are at it"
        time.sleep(0.05)
        found = (holders(out) & set(workers())) - before
    return found


@needs_ray
@pytest.mark.slow
def test_two_workers_one_killed_half_way_leave_what_one_process_leaves(tmp_path: Path) -> None:
    config, out = write(tmp_path, LONG), tmp_path / "out"
    assert (
        fedeve("sweep", config, "--out", tmp_path / "whole", "--engine", "reference", "--no-calibration").returncode
        == 0
    )
    before = set(workers())
    command = [sys.executable, "-m", "fedeve", "sweep", str(config), "--out", str(out), "--engine", "ray"]
    command += ["--device", "cpu", "--checkpoint-every", "0.2", "--json"]
    # Ray's workers step back for every other process (niceness 15): beside another test they would get next to nothing.
    own = {"RAY_ADDRESS": "local", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | own) as process:
        try:
            victims = two_at_work(process, out, before)
            os.kill(min(victims), signal.SIGKILL)
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, output
    events = [json.loads(line) for line in output.splitlines()]
    assert sum(event["event"] == "finished" for event in events) == 8 and events[-1]["failed"] == 0
    assert len(holders(out) - {min(victims)}) >= 2  # another worker took its place
    assert_same_runs(out, tmp_path / "whole")


def test_without_ray_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--engine", "ray")
    assert refused.returncode == 2 and "pip install 'fedeve[ray]'" in refused.stderr
