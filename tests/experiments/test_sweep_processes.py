"""A sweep played by several real processes leaves what one leaves, whoever of them is stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sweeping import SWEEP, assert_same_runs, fedeve, write

from fedeve import FedeveError
from fedeve.experiments import sweep as sweeps
from fedeve.experiments.manifest import read_manifest
from fedeve.experiments.sweep_folder import SweepFolder
from fedeve.experiments.sweep_play import Player
from fedeve.experiments.sweep_processes import play_in_processes
from fedeve.experiments.sweep_worker import Waiting
from fedeve.lock import locked

LONG = SWEEP.replace("rounds = 30", "rounds = 120")
FEW = SWEEP.replace("rounds = 30", "rounds = 50").replace("data.alpha = [1, 0.1]", "data.alpha = [0.1]")
SHORT = ("--set", "rounds=5")
OFTEN = ("--no-calibration", "--checkpoint-every", "0.2")
DEADLINE = 60.0


def start(config: Path, out: Path, *options: object, **more: Any) -> subprocess.Popen[str]:
    """The command as a user gives it, at a terminal of its own."""
    command = [sys.executable, "-m", "fedeve", "sweep", config, "--out", out, "--processes", 2, *OFTEN, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*map(str, command)], text=True, start_new_session=True, **pipes, **more)


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def at_work(out: Path, pid: int) -> set[int]:
    """Wait until two children play; which they are."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        notes = [path.read_text() for path in out.glob("runs/*/.lock")]
        found = {int(note.split()[0]) for note in notes if note} & children(pid)
        begun = {path.parent.name for path in out.glob("runs/*/record.jsonl") if path.read_bytes().count(b"\n") > 1}
        if len(found) == 2 and len(begun) > 1:
            return found
        time.sleep(0.01)
    raise AssertionError("two processes did not begin in time")


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def whole(folder: Path, config: Path, *options: object) -> Path:
    """What one process that nobody stopped leaves."""
    done = fedeve("sweep", config, "--out", folder / "whole", *OFTEN, *options)
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def test_stopped_by_a_budget_and_a_process_killed_the_records_are_those_of_one(tmp_path: Path) -> None:
    config, out = write(tmp_path, LONG), tmp_path / "out"
    begun = time.monotonic()
    ended = fedeve("sweep", config, "--out", out, "--processes", 2, *OFTEN, "--budget", "2s")
    assert ended.returncode == 3 and not ended.stderr, ended
    assert time.monotonic() - begun < 5
    victims: list[int] = []

    def kill_one() -> None:
        victims.append(min(at_work(out, os.getpid())))
        os.kill(victims[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    ended = fedeve("sweep", config, "--out", out, "--processes", 2, *OFTEN, "--json")
    killer.join()
    assert ended.returncode == 0, ended.stderr
    assert f"process {victims[0]} died with exit code -9; its 4 runs go on" in ended.stderr
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert events[-1]["finished"] == 8 and events[-1]["failed"] == 0
    assert "--processes 2" in read_manifest(out)["sessions"][-1]["command"]
    assert_same_runs(out, whole(tmp_path, config))


def test_interrupted_and_then_its_parent_killed_it_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    config, out, engine = write(tmp_path, FEW), tmp_path / "out", ("--engine", "reference")
    process = start(config, out, *engine, "--checkpoint-every", 1000)
    workers = at_work(out, process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130 and "the same command goes on" in errors
    assert "Traceback" not in errors and "died" not in errors
    assert not any(map(is_alive, workers))
    stopped = {path.parent.name for path in out.glob("runs/*/checkpoint.safetensors")}
    assert stopped == {path.parent.name for path in out.glob("runs/*/record.jsonl")}  # checkpointed on the way out

    process = start(config, out)
    workers = at_work(out, process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers)), "orphans play on"
    ended = fedeve("sweep", config, "--out", out, *OFTEN)
    assert ended.returncode == 0, ended.stdout
    assert_same_runs(out, whole(tmp_path, config, *engine))


def test_the_processes_of_a_killed_parent_keep_the_folder_until_they_have_stopped(tmp_path: Path) -> None:
    holder = "import sys, time; print('ready', flush=True); time.sleep(60)"
    with locked(tmp_path) as held:
        command = [sys.executable, "-c", holder]
        child = subprocess.Popen(command, pass_fds=(held,), stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
    with pytest.raises(FedeveError, match="is in use"), locked(tmp_path):
        pass
    child.kill()
    child.communicate()
    with locked(tmp_path):
        pass


def test_a_disk_that_refuses_stops_all_processes_and_no_run_is_blamed(tmp_path: Path) -> None:
    folder, before = SweepFolder(tmp_path / "out", sweeps.read(write(tmp_path))), children(os.getpid())
    with locked(folder.out) as held:
        folder.open(engine="lanes")
        points = folder.sweep.points
        folder.folder(points[0]).parent.mkdir()
        folder.folder(points[0]).write_text("no folder can be made here")
        with pytest.raises(FedeveError, match="cannot write"):
            play_in_processes(Player(folder, print), points, processes=2, held=held)
    assert not list(folder.out.glob("runs/*/failed.json")) and children(os.getpid()) <= before


GPU = """#!/bin/sh
echo "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {log}
"""


def test_on_a_gpu_the_processes_are_served_by_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, log, seen = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log", set()
    control.write_text(GPU.format(log=log))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    # This process believes in a GPU; those it starts look for themselves and play on what there is.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    folder = SweepFolder(tmp_path / "out", sweeps.read(write(tmp_path), assignments=["rounds=5"]))

    def tell(event: dict[str, Any]) -> None:
        for pid in children(os.getpid()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            seen.update(v.decode() for v in variables if v.startswith(b"CUDA_MPS_PIPE_DIRECTORY="))

    with locked(folder.out) as held:
        folder.open(engine="lanes")
        play_in_processes(Player(folder, tell), folder.sweep.points, processes=2, held=held)
    assert {status.state for status in folder.statuses()} == {"finished"}
    (first, second), (variable,) = log.read_text().splitlines(), seen
    place = Path(variable.partition("=")[2]).parent
    served = [str(place / "pipe"), str(place / "log")]
    assert first.split() == ["-d", *served] and second.split() == ["quit", *served]
    assert not place.exists()
    monkeypatch.undo()
    assert_same_runs(folder.out, whole(tmp_path, write(tmp_path), *SHORT))


def test_runs_that_processes_die_of_are_found_and_failed_and_the_others_are_not(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "out", sweeps.read(write(tmp_path)))
    folder.out.mkdir()
    folder.open(engine="lanes")
    told: list[dict[str, Any]] = []
    waiting = Waiting(Player(folder, told.append), folder.sweep.points, num_workers=2, deaths=2)
    culprit, deaths, played = folder.sweep.points[3], 0, []
    while batch := waiting.take():
        if culprit in batch:
            deaths += 1
            waiting.died(batch, "process died with exit code -11")
        else:
            played += batch
    reason = "2 processes died of it: process died with exit code -11"
    assert told == [{"event": "failed", "run": culprit.name, "reason": reason}]
    assert folder.failures() == {reason: [culprit.name]}
    assert {point.name for point in played} == {p.name for p in folder.sweep.points if p is not culprit}
    assert deaths == 2 * 3  # with four runs, two, and alone


def test_processes_that_die_before_they_begin_are_not_started_for_ever(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "out", sweeps.read(write(tmp_path)))
    waiting = Waiting(Player(folder, print), folder.sweep.points, num_workers=2, deaths=2)
    with pytest.raises(FedeveError, match="exit code -4"):
        for _ in range(10):
            waiting.died([], "process died with exit code -4")


@pytest.mark.parametrize("other", [("--engine", "ray"), ("--profile",)])
def test_what_does_not_go_with_several_processes_is_refused(tmp_path: Path, other: tuple[str, ...]) -> None:
    refused = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--processes", 2, *other)
    assert refused.returncode == 2 and "got --processes 2 --" in refused.stderr and "leave one" in refused.stderr
    assert not (tmp_path / "out").exists()
