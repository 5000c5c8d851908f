"""A sweep as its user meets it: budgets, a second process, failures, changed files, full disks, foreign folders."""

from __future__ import annotations

import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sweeping import SWEEP, assert_same_runs, fedeve, write

from fedeve import FedeveError, Record, simulate
from fedeve.experiments import config as configs
from fedeve.experiments import sweep as sweeps
from fedeve.experiments.manifest import read_manifest
from fedeve.experiments.sweep_clock import parse_seconds, words, work
from fedeve.experiments.sweep_folder import SweepFolder
from fedeve.experiments.sweep_play import Player
from fedeve.lock import locked

QUICK = ("--no-calibration",)
SHORT = ("--set", "rounds=5")


def records(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(out.glob("runs/*/record.jsonl"))}


def times(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(out.glob("runs/*/*")) if path.name != ".lock"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sweep that is finished; not to be written to."""
    folder = tmp_path_factory.mktemp("done")
    ended = fedeve("sweep", write(folder), "--out", folder / "out", *SHORT)
    assert ended.returncode == 0, ended.stderr
    return folder / "out"


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "out")
    return tmp_path / "out"


def test_a_sweep_leaves_a_list_of_its_runs_and_a_record_of_each(done: Path) -> None:
    listed = read_manifest(done)
    assert listed["title"] == "Small" and listed["metrics"] == ["accuracy"] and listed["last"] == 100
    assert len(listed["runs"]) == 8
    for run in listed["runs"]:
        record = Record.read(done / run["folder"] / "record.jsonl")
        assert record.header["config"] == run["config"] and record.evaluated[-1] == 5
        assert {"row": run["row"], "seed": run["seed"]} == {
            "row": {"fedavg": "FedAvg", "scaffold": "Scaffold"}[run["config"]["method"]["name"]],
            "seed": record.header["seed"],
        }
    assert not list(done.glob("**/*.part"))


def test_the_records_are_those_of_single_runs(done: Path) -> None:
    for run in read_manifest(done)["runs"][:3]:
        alone = simulate(configs.check(run["config"]).build())
        found = Record.read(done / run["folder"] / "record.jsonl")
        assert found.lines == json.loads(json.dumps(alone.lines)) and found.header == alone.header


def test_the_timing_counts_steps_and_examples_as_the_plan_has_them(done: Path) -> None:
    from fedeve import local

    entry = read_manifest(done)["runs"][0]
    run = configs.check(entry["config"]).build()
    steps = examples = 0
    for round in range(run.rounds):
        for client in set(run.cohort_of(round).tolist()) - run.silent_in(round):
            plan = local.plan(run.local, run.data.sizes[client], seed=run.seed, round=round, client=client)
            steps, examples = steps + len(plan), examples + int((plan >= 0).sum())
    timing = json.loads((done / entry["folder"] / "timing.json").read_text())
    assert timing["client_steps"] == steps and timing["examples"] == examples and timing["seconds"] > 0


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_work_with_a_fixed_number_of_steps_is_counted_as_planned(small_run: Any, steps: int) -> None:
    from fedeve import LocalWork, local

    run = small_run(local=LocalWork(steps=steps, batch=20), empty="keep")
    plans = [
        local.plan(run.local, run.data.sizes[client], seed=run.seed, round=0, client=client)
        for client in run.cohort_of(0).tolist()
    ]
    found = work(run)
    assert found.steps[0] == 0 and found.steps[1] == sum(map(len, plans))
    assert found.examples[1] == sum(int((plan >= 0).sum()) for plan in plans)


def test_what_is_finished_is_never_run_again(copy: Path) -> None:
    before = times(copy)
    ended = fedeve("sweep", write(copy.parent), "--out", copy, *SHORT)
    assert ended.returncode == 0 and "8 finished" in ended.stdout and "Calibrating" not in ended.stdout
    assert times(copy) == before


def test_a_changed_configuration_runs_again_and_the_others_do_not(copy: Path) -> None:
    before = times(copy)
    config = write(copy.parent, SWEEP.replace("data.alpha = [1, 0.1]", "data.alpha = [1, 0.3]"))
    ended = fedeve("sweep", config, "--out", copy, *SHORT, *QUICK)
    assert ended.returncode == 0 and "4 finished, 4 waiting" in ended.stdout
    after = times(copy)
    assert {path: after[path] for path in before} == before and len(after) == len(before) // 8 * 12
    assert len(read_manifest(copy)["runs"]) == 8


@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_a_budget_stops_in_time_and_the_same_command_goes_on(tmp_path: Path, engine: str) -> None:
    config, sessions, ended = write(tmp_path), 0, None

    def seconds(folder: str, *options: str) -> tuple[float, Any]:
        begun = time.monotonic()
        ended = fedeve("sweep", config, "--out", tmp_path / folder, "--engine", engine, *options, *QUICK)
        return time.monotonic() - begun, ended

    seconds("whole")
    while ended is None or ended.returncode == 3:
        took, ended = seconds("parts", "--budget", "1s")
        idle, _ = seconds("whole")  # a session with nothing to do, on a machine that may be busy
        assert took < 1.2 + 5 * idle
        assert ended.returncode in (0, 3), ended
        sessions += 1
    assert sessions > 1 or engine == "lanes"
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")


def test_a_sweep_continues_with_the_engine_it_was_begun_with(tmp_path: Path) -> None:
    config, out = write(tmp_path), tmp_path / "out"
    assert fedeve("sweep", config, "--out", out, "--engine", "lanes", "--budget", "0.2s", *QUICK).returncode in (0, 3)
    refused = fedeve("sweep", config, "--out", out, "--engine", "reference")
    assert refused.returncode == 2 and "begun with another engine" in refused.stderr
    widths = read_manifest(out)["widths"]
    assert len(widths) == 1 and all(1 <= width < 32 for width in widths.values())  # eight runs of four clients, unequal
    refused = fedeve("sweep", config, "--out", out, "--width", 17)
    assert refused.returncode == 2 and "another width: got 17; leave it at" in refused.stderr
    assert fedeve("sweep", config, "--out", out, *QUICK).returncode == 0
    assert read_manifest(out)["engine"] == "lanes" and read_manifest(out)["widths"] == widths


def test_a_second_process_is_told_who_holds_the_folder(copy: Path) -> None:
    with locked(copy):
        refused = fedeve("sweep", write(copy.parent), "--out", copy, *SHORT)
    assert refused.returncode == 2 and f"is in use: got process {os.getpid()}" in refused.stderr


def broken(monkeypatch: pytest.MonkeyPatch, cause: list[str]) -> None:
    """FedAvg's server step raises as long as there is a cause, after the second round of seed 2."""
    from fedeve import FedAvg
    from fedeve.engines.loop import Book

    keep = Book.keep

    def failing(self: Book, turn: Any) -> Any:
        if cause and self.run.seed == 2 and isinstance(self.run.method, FedAvg) and turn.num_rounds == 3:
            raise ArithmeticError(cause[0])
        return keep(self, turn)

    monkeypatch.setattr(Book, "keep", failing)


@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_a_run_that_raises_is_listed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    config, out, options = write(tmp_path), tmp_path / "out", ("--engine", engine, *SHORT, *QUICK)
    fedeve("sweep", config, "--out", tmp_path / "whole", *options)
    cause = ["the\nworld ended"]
    broken(monkeypatch, cause)
    ended = fedeve("sweep", config, "--out", out, *options)
    assert ended.returncode == 1 and "6 finished, 2 failed" in ended.stdout
    assert "ArithmeticError: the world ended" in ended.stdout and "--retry" in ended.stdout
    failed = [path.parent for path in out.glob("runs/*/failed.json")]
    assert len(failed) == 2
    assert json.loads((failed[0] / "failed.json").read_text()) == {"reason": "ArithmeticError: the world ended"}
    before = times(out)
    again = fedeve("sweep", config, "--out", out, *options)
    assert again.returncode == 1 and times(out) == before  # listed, not retried
    cause.clear()
    assert fedeve("sweep", config, "--out", out, "--retry", *options).returncode == 0
    assert not list(out.glob("runs/*/failed.json"))
    assert_same_runs(out, tmp_path / "whole")


def test_a_damaged_line_is_named_and_nothing_is_lost(copy: Path) -> None:
    name = sorted(records(copy))[3]
    path = copy / "runs" / name / "record.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"round": 5', b'"round": '))
    before = records(copy)
    ended = fedeve("sweep", write(copy.parent), "--out", copy, *SHORT)
    assert ended.returncode == 1 and "7 finished, 1 failed" in ended.stdout
    assert f"line 2 of {path} is damaged" in ended.stdout
    assert records(copy) == before
    assert fedeve("sweep", write(copy.parent), "--out", copy, "--retry", *SHORT, *QUICK).returncode == 0
    assert path.read_bytes() == whole
    assert (copy / "runs" / f"{name}.damaged-1" / "record.jsonl").read_bytes() == before[name]


def test_the_states_are_read_from_the_files_whenever_they_change(copy: Path) -> None:
    folder = SweepFolder(copy, sweeps.read(write(copy.parent), assignments=["rounds=5"]))
    point = folder.sweep.points[0]
    place = folder.folder(point)
    finished = folder.status(point)
    best = max(line["accuracy"] for line in Record.read(place / "record.jsonl").lines)
    assert (finished.state, finished.num_rounds, finished.best["accuracy"]) == ("finished", 5, best)
    assert folder.status(point) is finished
    (place / "checkpoint.safetensors").rename(place / "aside")
    assert folder.status(point).state == "begun" and folder.unfinished() == [point]
    (place / "checkpoint.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in folder.status(point).reason
    (place / "aside").rename(place / "checkpoint.safetensors")
    folder.fail(point, "no reason")
    assert folder.status(point).state == "failed" and folder.failures() == {"no reason": [point.name]}
    folder.forgive(point)
    assert folder.status(point).state == "finished"
    whole = (place / "record.jsonl").read_text()
    (place / "record.jsonl").write_text(whole.replace('"rounds": 5', '"rounds": 6'))
    assert "holds another run" in folder.status(point).reason
    (place / "record.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert folder.status(point).state == "failed" and "lacks lines" in folder.status(point).reason


def test_a_folder_of_another_sweep_is_refused(copy: Path) -> None:
    before = times(copy)
    for text in (SWEEP.replace('"Small"', '"Large"'), SWEEP.replace("seeds = [1, 2]", "seeds = [3, 4]")):
        refused = fedeve("sweep", write(copy.parent, text), "--out", copy, *SHORT)
        assert refused.returncode == 2 and "holds another sweep: got 'Small' with 8 runs" in refused.stderr
    (copy / "sweep.json").write_text("{}")
    refused = fedeve("sweep", write(copy.parent), "--out", copy, *SHORT)
    assert refused.returncode == 2 and "sweep.json is damaged" in refused.stderr
    assert times(copy) == before


def test_a_dry_run_shows_and_writes_nothing(tmp_path: Path, copy: Path) -> None:
    ended = fedeve("sweep", write(tmp_path), "--out", tmp_path / "new", "--dry-run")
    assert ended.returncode == 0 and "Small: 8 runs" in ended.stdout and "8 waiting" in ended.stdout
    assert "rows     FedAvg; Scaffold" in ended.stdout and "columns  alpha 1; alpha 0.1" in ended.stdout
    assert not (tmp_path / "new").exists()
    listed = [
        json.loads(line)
        for line in fedeve("sweep", write(tmp_path), "--out", copy, "--dry-run", "--json", *SHORT).stdout.splitlines()
    ]
    assert len(listed) == 8 and {run["state"] for run in listed} == {"finished"}


def test_calibration_tells_an_expected_time_and_changes_no_number(tmp_path: Path, done: Path) -> None:
    ended = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", *SHORT)
    assert "Calibrating ..." in ended.stdout and "Expected: " in ended.stdout
    assert records(tmp_path / "out") == records(done)


@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_a_calibration_foresees_what_a_sweep_takes(tmp_path: Path, engine: str) -> None:
    folder = SweepFolder(tmp_path / "out", sweeps.read(write(tmp_path, SWEEP.replace("rounds = 30", "rounds = 60"))))
    folder.out.mkdir()
    folder.open(engine=engine)
    player = Player(folder, lambda event: None, device="cpu")
    per_round = player.calibrate(folder.sweep.points)
    foreseen = sum(point.rounds * per_round[point.name] for point in folder.sweep.points)
    begun = time.monotonic()
    player.play(folder.sweep.points)
    took = time.monotonic() - begun
    assert 0.2 * took < foreseen < 5 * took  # a busy machine is not a clock


def test_json_is_for_machines(tmp_path: Path) -> None:
    ended = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--json", *SHORT)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert sum(line["event"] == "finished" for line in lines) == 8
    assert lines[-1]["event"] == "end" and lines[-1]["finished"] == 8 and lines[-1]["failed"] == 0


def test_a_disk_that_fills_up_stops_the_sweep_and_loses_nothing(tmp_path: Path) -> None:
    """No file may grow beyond some bytes, as a full disk would have it; then there is room again."""
    config, out = write(tmp_path), tmp_path / "out"
    command = [sys.executable, "-m", "fedeve", "sweep", str(config), "--out", str(out), *SHORT, *QUICK]

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))  # sweep.json fits, a checkpoint does not

    full = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=small_disk)
    assert full.returncode == 2, full
    assert len(full.stderr.strip().splitlines()) == 1 and "cannot write" in full.stderr and "make room" in full.stderr
    assert list(out.glob("runs/*/record.jsonl")) and not list(out.glob("runs/*/failed.json"))  # no run is to blame
    assert fedeve("sweep", config, "--out", out, *SHORT, *QUICK).returncode == 0
    fedeve("sweep", config, "--out", tmp_path / "whole", *SHORT, *QUICK)
    assert_same_runs(out, tmp_path / "whole")


def test_ctrl_c_checkpoints_and_says_how_to_go_on(tmp_path: Path) -> None:
    config, out = write(tmp_path, SWEEP.replace("rounds = 30", "rounds = 3000")), tmp_path / "out"
    command = [sys.executable, "-m", "fedeve", "sweep", str(config), "--out", str(out), *QUICK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(path.read_bytes().count(b"\n") > 3 for path in out.glob("runs/*/record.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in errors and "Traceback" not in errors
    assert list(out.glob("runs/*/checkpoint.safetensors"))


def test_a_terminal_sees_one_view_of_the_whole(tmp_path: Path) -> None:
    config, (leader, follower) = write(tmp_path), pty.openpty()
    command = [
        sys.executable,
        "-m",
        "fedeve",
        "sweep",
        str(config),
        "--out",
        str(tmp_path / "out"),
        "--engine",
        "lanes",
    ]
    environment = os.environ | {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0
    text = seen.decode()
    for word in ("Small", "FedAvg", "Scaffold", "alpha 0.1", "best accuracy so far", "8 finished", "busy"):
        assert word in text, word


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("25m", 1500), ("1.5h", 5400), ("1h30m", 5400), ("1d", 86400)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "25 minutes", "-3m", "0s", "nan", "1h-3m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(FedeveError):
        parse_seconds(text)


def test_times_are_told_in_round_words() -> None:
    assert [words(s) for s in (5, 99, 600, 8000, 300_000)] == ["5 s", "99 s", "10 min", "2.2 h", "3.5 days"]


def test_a_sweep_says_where_its_time_went_and_how_full_its_lanes_were(tmp_path: Path) -> None:
    ended = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", *QUICK, *SHORT, "--profile")
    assert ended.returncode == 0, ended.stderr
    assert "client-steps in" in ended.stdout and "% full" in ended.stdout and "evaluation" in ended.stdout


def test_a_device_that_is_not_there_is_refused_and_no_run_is_blamed(tmp_path: Path) -> None:
    refused = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--device", "cuda:99", *QUICK)
    assert refused.returncode == 2 and "this device cannot be used" in refused.stderr
    assert not list(tmp_path.glob("out/runs/*/failed.json"))


def test_a_precision_that_the_device_lacks_is_refused_and_no_run_is_blamed(tmp_path: Path) -> None:
    asked = ("--device", "cpu", "--precision", "tf32")
    ended = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", *QUICK, *SHORT, *asked)
    assert ended.returncode == 2 and "only a GPU has this precision: got 'tf32'" in ended.stderr
    assert not list(tmp_path.glob("out/*"))
    assert fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", *QUICK, *SHORT).returncode == 0
    again = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", *QUICK, *SHORT, *asked)  # nothing is played
    assert again.returncode == 0, again.stderr
    failed = next(tmp_path.glob("out/runs/*")) / "failed.json"
    failed.write_text('{"reason": "out of memory"}')
    retried = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", *QUICK, *SHORT, *asked, "--retry")
    assert retried.returncode == 2 and failed.exists()
