"""The demo, shortened: the same path a newcomer takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fedeve.experiments import demo
from fedeve.seeds import SEEDS


def test_the_demo_compares_three_methods_on_the_same_clients_and_writes_its_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedeve", "demo", "--rounds", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    for label in demo.METHODS:
        assert f"{label} seed 192" in done.stdout
    assert "rounds to FedAvg's accuracy" in done.stdout and "FedEve's gain had a median of" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3 and "300 clients hold 18,000 images" in page


def test_the_demo_speaks_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedeve", "demo", "--rounds", "1", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert set(lines[-1]["accuracy"]) == set(demo.METHODS) and lines[-1]["report"].endswith("report.html")


def test_every_run_of_the_demo_has_the_same_data_seed_and_local_work() -> None:
    chosen = demo.runs(rounds=1, seeds=SEEDS[:2])
    assert len({run.data.fingerprint for _, run in chosen}) == 1
    assert len({run.local for _, run in chosen}) == 1
    assert sorted({run.seed for _, run in chosen}) == [192, 225]
