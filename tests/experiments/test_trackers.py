"""TensorBoard, Weights & Biases and MLflow, the real ones, get the numbers that the records have."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeping import SWEEP, fedeve, write

from fedeve import Record
from fedeve.experiments.manifest import read_manifest

SMALL = SWEEP.replace("seeds = [1, 2]", "seeds = [1]").replace("[1, 0.1]", "[1]").replace("rounds = 30", "rounds = 6")
SMALL = SMALL.replace('["fedavg", "scaffold"]', '["fedeve", { name = "fedeve", drift = "released" }]')


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None and not os.environ.get("FEDEVE_REQUIRE_EXTRAS")
    return pytest.mark.skipif(missing, reason=f"{name} is an extra; make test-sweep installs and requires it")


def sweep(tmp_path: Path, tracker: str, text: str = SMALL, **environment: str) -> Path:
    """A tracked sweep in a process of its own; the folder."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedeve", "sweep", str(write(tmp_path, text)), "--out", str(out)]
    command += ["--track", tracker, "--no-calibration"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left alone" not in done.stderr
    return out


def expected(out: Path) -> dict[str, tuple[list[tuple[int, float]], int]]:
    """Of every run: its accuracies by round, and how many rounds have facts."""
    result = {}
    for run in read_manifest(out)["runs"]:
        record = Record.read(out / run["folder"] / "record.jsonl")
        values = [(line["round"], line["accuracy"]) for line in record.lines]
        result[Path(run["folder"]).name] = (values, run["config"]["rounds"])
    return result


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_every_evaluation_and_every_round(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = sweep(tmp_path, "tensorboard")
    for name, (values, rounds) in expected(out).items():
        events = EventAccumulator(str(out / "tensorboard" / name))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("accuracy")]
        assert [step for step, _ in found] == [step for step, _ in values]
        assert [value for _, value in found] == pytest.approx([value for _, value in values])
        facts = [tag for tag in events.Tags()["scalars"] if tag.startswith("facts/")]
        assert facts and all(len(events.Scalars(tag)) == rounds for tag in facts)


@needs("wandb")
def test_wandb_keeps_runs_offline_with_their_numbers(tmp_path: Path) -> None:
    out = sweep(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    kept = {path.name.removeprefix("run-").removesuffix(".wandb"): path for path in out.glob("wandb/**/run-*.wandb")}
    wanted = expected(out)
    assert kept.keys() == wanted.keys()
    for name, (values, _) in wanted.items():
        content = kept[name].read_bytes()
        assert b"accuracy" in content and b"facts/" in content
        assert all(repr(value)[:12].encode() in content for _, value in values)


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_number_in_a_local_store_and_goes_on_in_the_same_run(tmp_path: Path) -> None:
    out = sweep(tmp_path, "mlflow", GIT_PYTHON_REFRESH="quiet")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("Small")
    runs = {run.data.tags["fedeve"]: run for run in client.search_runs([experiment.experiment_id])}
    wanted = expected(out)
    assert runs.keys() == wanted.keys()
    for name, (values, rounds) in wanted.items():
        history = client.get_metric_history(runs[name].info.run_id, "accuracy")
        assert sorted((point.step, point.value) for point in history) == values
        facts = [key for key in runs[name].data.metrics if key.startswith("facts/")]
        assert facts and len(client.get_metric_history(runs[name].info.run_id, facts[0])) == rounds
        assert runs[name].data.params["local.lr"] == "0.1" and runs[name].info.status == "FINISHED"


def test_an_unknown_or_missing_tracker_is_refused_before_anything_runs(tmp_path: Path) -> None:
    refused = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--track", "tensorbord")
    assert refused.returncode == 2 and "did you mean 'tensorboard'?" in refused.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        refused = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--track", "wandb")
    assert refused.returncode == 2 and "pip install 'fedeve[wandb]'" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_raises_is_left_alone_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections.abc import Iterator
    from contextlib import contextmanager

    from fedeve.experiments import trackers

    class Broken:
        def log(self, *_: object) -> None:
            raise OSError("no network")

    @contextmanager
    def opener(_: object) -> Iterator[Broken]:
        yield Broken()

    monkeypatch.setitem(trackers._OPENERS, "tensorboard", opener)
    monkeypatch.setattr(trackers, "check", lambda names: None)
    ended = fedeve("sweep", write(tmp_path, SMALL), "--out", tmp_path / "out", "--track", "tensorboard")
    assert ended.returncode == 0 and "2 finished" in ended.stdout
    assert ended.stderr.count("tensorboard is left alone from here on: no network") == 1
