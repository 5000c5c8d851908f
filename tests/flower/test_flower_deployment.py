"""A real SuperLink and real SuperNodes on loopback, with TLS and node authentication."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from certificates import make_authority, make_node_key
from deploy import notes, play
from digits_app.task import describe
from federation import APP, BIN, Federation, free_port
from safetensors.torch import load_file

from fedeve import Run, all_methods, simulate


def settings(**changes) -> dict:
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return config | changes


def assert_is_reference(result: Path, run: Run) -> None:
    found = load_file(result)
    got = torch.cat([found[name].reshape(-1) for name in run.build_model().state_dict()])
    expected = simulate(run, engine="reference", device="cpu").params
    assert (got - expected).norm() / expected.norm() < 1e-5


def trained(federation: Federation, method: str, *, rounds: int, name: str = "result") -> Path:
    result = federation.folder / f"{name}.safetensors"
    federation.run(method=method, num_rounds=rounds, fraction_train=1.0, min_nodes=3, result=str(result))
    federation.wait(result.exists, f"{method} to finish", seconds=400)
    return result


def test_a_federation_over_tls_is_the_reference_and_strangers_are_turned_away(tmp_path):
    with Federation(tmp_path, num_nodes=3) as federation:
        # A node whose key was never registered, and one that trusts another authority than the server's.
        make_node_key(tmp_path, "stranger")
        make_authority(tmp_path / "other", name="another authority")
        stranger = federation.node(3, key="stranger")
        misled = federation.node(0, key="node0", authority=tmp_path / "other" / "ca.crt")
        misled.log = tmp_path / "misled.log"
        misled.command += ["--max-retries", "1"]
        try:
            stranger.start()
            misled.start()
            result = trained(federation, "scaffold", rounds=2)
            federation.wait(lambda: not stranger.alive, "the stranger to give up", seconds=60)
            federation.wait(lambda: not misled.alive, "the misled node to give up", seconds=60)
        finally:
            stranger.stop()
            misled.stop()
        assert "Exit Code" in (tmp_path / "stranger.log").read_text()
        assert "CERTIFICATE_VERIFY_FAILED" in (tmp_path / "misled.log").read_text()
        listed = federation.flwr("supernode", "list", "here")["nodes"]
        assert len(listed) == 3
        config = settings(**{"method": "scaffold", "num-rounds": 2, "fraction-train": 1.0})
        assert_is_reference(result, describe(config, 3))


@pytest.mark.slow
def test_every_method_over_tls_is_the_reference_and_two_runs_have_identical_bits(tmp_path):
    with Federation(tmp_path, num_nodes=3) as federation:
        for method in all_methods():
            result = trained(federation, method, rounds=2, name=method)
            assert_is_reference(
                result, describe(settings(**{"method": method, "num-rounds": 2, "fraction-train": 1.0}), 3)
            )
        again = trained(federation, "fedeve", rounds=2, name="again")
        first = load_file(tmp_path / "fedeve.safetensors")
        assert all(torch.equal(tensor, first[name]) for name, tensor in load_file(again).items())


@pytest.mark.slow
def test_a_federation_survives_a_killed_node_and_a_killed_server(tmp_path):
    accuracy, left_out = notes(play(tmp_path, rounds=5))
    assert list(accuracy) == [0, 1, 2, 3, 4, 5]  # the restarted server went on where the killed one stopped
    assert accuracy[5] > accuracy[0] + 0.2
    assert set(left_out) & {"2", "3"}  # the killed node was missed, and named


@pytest.mark.slow
def test_flwr_run_works_as_it_stands(tmp_path):
    """`flwr run .` in a copy of the app, on a SuperLink for simulations, as Flower itself would start one."""
    port = free_port()
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = os.environ | {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PATH": f"{BIN}:{os.environ['PATH']}"}
    from federation import Process, _listens

    link = Process(
        [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)],
        tmp_path / "superlink.log", env,
    )  # fmt: skip
    try:
        link.start()
        for _ in range(400):
            if _listens(port):
                break
            subprocess.run(["sleep", "0.25"], check=True)
        for num_nodes, more in ((2, []), (10, ["--federation-config", "num-supernodes=10"])):  # Flower's default is 2
            result = tmp_path / f"result{num_nodes}.safetensors"
            done = subprocess.run(
                [str(BIN / "flwr"), "run", ".", "--stream", "--run-config", f'result="{result}"', *more],
                cwd=APP, env=env, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert "round 5: accuracy" in done.stdout + done.stderr, done.stdout[-3000:] + done.stderr[-3000:]
            assert_is_reference(result, describe(settings(), num_nodes))
    finally:
        link.stop()
