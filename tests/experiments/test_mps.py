"""MPS's daemon is started and ended as NVIDIA's program wants it, and a sweep goes on where it cannot be."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from fedeve.experiments import mps

NOTES = 'echo "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {log}'


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without MPS so far; its temporary folder and the first of its programs' are ours."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(mps, "_DEFAULT", tmp_path / "nvidia-mps")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "log"


def install(log: Path, *lines: str) -> None:
    control = log.parent / "nvidia-cuda-mps-control"
    control.write_text("\n".join(["#!/bin/sh", NOTES.format(log=log), *lines, ""]))
    control.chmod(0o755)


def calls(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def test_a_private_daemon_serves_meanwhile_and_nothing_is_left(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install(log, 'test "$1" != -d || sleep 3 &')  # a daemon that keeps its parent's pipes
    begun = time.monotonic()
    with mps.sharing() as variables:
        place = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert time.monotonic() - begun < 2 and Path(variables["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert calls(log) == [["-d", place]]
    assert calls(log) == [["-d", place], ["quit", place]]
    assert not list((log.parent / "tmp").iterdir())
    assert capfd.readouterr().err == ""


def test_it_is_ended_when_the_sweep_is_stopped(log: Path) -> None:
    install(log)
    with pytest.raises(KeyboardInterrupt), mps.sharing():
        raise KeyboardInterrupt
    assert [call[0] for call in calls(log)] == ["-d", "quit"] and not list((log.parent / "tmp").iterdir())


def test_what_a_killed_sweep_left_is_ended_by_the_next(log: Path) -> None:
    install(log)
    left = log.parent / "tmp" / "fedeve-mps-left"
    left.mkdir()
    with mps.sharing() as first, mps.sharing() as second:
        assert not left.exists()
        assert first != second and Path(first["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()  # that one is at work
    assert calls(log)[0] == ["quit", str(left / "pipe")]


def test_without_the_program_or_where_it_fails_the_user_is_told_once(
    log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(log, "echo cannot find the card >&2", "exit 3")
    with mps.sharing() as variables:
        assert variables == {}
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1 and "take turns" in said and "exit code 3 cannot find the card" in said
    monkeypatch.setenv("PATH", str(log.parent / "tmp"))
    with mps.sharing() as variables:
        assert variables == {}
    assert "nvidia-cuda-mps-control is not installed" in capfd.readouterr().err


@pytest.mark.parametrize("by", ["variable", "default"])
def test_a_daemon_that_is_there_already_is_left_alone(log: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    install(log)
    if by == "variable":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    else:
        (log.parent / "nvidia-mps").mkdir()
        (log.parent / "nvidia-mps" / "control").touch()
    with mps.sharing() as variables:
        assert variables == {}
    assert calls(log) == []
