"""Flower's own simulation, with real Ray processes, gives what the reference simulator gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")
pytest.importorskip("ray", reason="Flower's simulation is not installed: pip install 'fedeve[flower]'")

import secure_simulation
from digits_federation import make_run
from safetensors.torch import load_file
from simulation import METHODS, ROUNDS

from fedeve import FedEve, Summary, simulate

HERE = Path(__file__).parent


def play(script: str, out: Path) -> None:
    env = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(HERE), "FLWR_HOME": str(out.parent / "flwr")}
    env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(out)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and out.exists(), done.stderr[-4000:]


def test_every_method_in_flowers_simulation_is_the_reference_and_two_runs_have_identical_bits(tmp_path):
    play("simulation.py", tmp_path / "result.safetensors")
    found = load_file(tmp_path / "result.safetensors")
    assert {name.split(".")[0] for name in found} == set(METHODS)
    for name, method in METHODS.items():
        assert torch.equal(found[f"{name}.first"], found[f"{name}.second"]), name
        expected = simulate(make_run(method, rounds=ROUNDS), engine="reference", device="cpu").params
        error = (found[f"{name}.first"] - expected).norm() / expected.norm()
        assert error < 1e-5, (name, float(error))


@pytest.mark.slow
def test_fedeve_under_flowers_secagg_plus_is_fedeve_up_to_its_quantisation(tmp_path):
    play("secure_simulation.py", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["lost"] == {}
    method, state = (
        FedEve(),
        FedEve().init(torch.from_numpy(np.concatenate([s.reshape(-1) for s in secure_simulation.START]))),
    )
    for number in range(1, secure_simulation.ROUNDS + 1):
        start = method.send(state).params.double().numpy()
        ends = np.stack([secure_simulation.end_of(start, client) for client in range(secure_simulation.NUM_NODES)])
        state, facts = method.step(state, Summary.of(torch.from_numpy(ends - start), torch.ones(len(ends))))
        assert result["facts"][str(number)]["gain"] == pytest.approx(float(facts["gain"]), rel=1e-3)
    # A number is rounded to 2 CLIP / 2^22 = 1e-6, five of them, three rounds.
    torch.testing.assert_close(torch.tensor(result["params"]), state.params, rtol=0, atol=2e-5)
