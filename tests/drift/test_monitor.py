"""The monitor sees what FedEve would, changes nothing, and survives a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedeve import FedAvg, FedAvgM, FedEve, FedEveAdam, FedEveParts, Scaffold, Summary, all_methods, simulate
from fedeve.drift.monitor import FACTS, watched

METHODS = [cls() for cls in all_methods().values()]


def rounds(number: int = 6, clients: int = 4, dim: int = 5, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        (torch.from_numpy(rng.normal(size=(clients, dim))), torch.from_numpy(rng.integers(1, 9, clients) * 1.0))
        for _ in range(number)
    ]


def test_its_facts_are_fedeves_equations_on_the_updates_the_method_saw() -> None:
    method = watched(FedAvgM())
    state = method.init(torch.zeros(5, dtype=torch.float64))
    momentum, variance = np.zeros(5), 0.0
    for updates, weights in rounds():
        state, facts = method.step(state, Summary.of(updates, weights))
        u_k, n = updates.numpy(), weights.numpy()
        u = (n[:, None] * u_k).sum(0) / n.sum()
        period = np.square(momentum - u).sum() / (4 * 5)
        client = np.square(u_k - u).sum() / (16 * 5)
        gain = (variance + period) / (variance + period + client)
        momentum, variance = momentum + gain * (u - momentum), (1 - gain) * (variance + period)
        assert float(facts["period_drift"]) == pytest.approx(period, rel=1e-9)
        assert float(facts["client_drift"]) == pytest.approx(client, rel=1e-9)
        assert float(facts["gain"]) == pytest.approx(gain, rel=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_watching_changes_no_number_of_any_method(method: Any, engine: str, small_run: Any) -> None:
    on, off = (
        simulate(small_run(method=method, watch_drift=watch), engine=engine, device="cpu") for watch in (True, False)
    )
    assert torch.equal(on.params, off.params)
    assert on.metric("loss").tolist() == off.metric("loss").tolist()
    for name in off.lines[0]["facts"]:
        assert on.facts(name).tolist() == off.facts(name).tolist()
    for name in FACTS:
        assert np.isfinite(on.facts(name)).all() and (on.facts(name) >= 0).all()
    assert (on.facts("gain") <= 1).all()


def test_fedeve_keeps_its_own_facts() -> None:
    for kin in (FedEveAdam(), FedEveParts(gain=0.3)):
        assert watched(kin) is kin
    assert watched(FedEve()) == FedEve() and type(watched(FedEve(drift="released"))) is FedEve


def test_without_client_drift_the_gain_is_one_and_nothing_moving_gives_one() -> None:
    method = watched(FedAvg())
    state = method.init(torch.zeros(3))
    state, facts = method.step(state, Summary.of(torch.zeros(2, 3), torch.ones(2)))
    assert float(facts["gain"]) == 1.0
    state, facts = method.step(state, Summary.of(torch.ones(2, 3), torch.ones(2)))
    assert float(facts["gain"]) == 1.0 and float(facts["client_drift"]) == 0.0
    _, facts = method.step(state, Summary.of(torch.ones(1, 3), torch.ones(1)))  # a cohort of one
    assert float(facts["client_drift"]) == 0.0


@pytest.mark.parametrize("method", [FedAvg(), FedAvgM(), Scaffold()], ids=lambda method: method.name)
def test_a_stopped_run_goes_on_with_the_same_facts(method: Any, small_run: Any, tmp_path: Path) -> None:
    run = small_run(method=method, rounds=7, eval_every=3)

    def stop(progress: Any) -> None:
        if progress.num_rounds == 4:
            raise KeyboardInterrupt

    for engine in ("reference", "lanes"):
        out = tmp_path / engine
        with pytest.raises(KeyboardInterrupt):
            simulate(run, engine=engine, device="cpu", out=out, watch=stop)
        resumed = simulate(run, engine=engine, device="cpu", out=out, resume=True)
        assert resumed.lines == simulate(run, engine=engine, device="cpu").lines


def test_both_engines_see_the_same_drifts(small_run: Any) -> None:
    run = small_run(method=FedAvg(), dtype="float64")
    ours, theirs = (simulate(run, engine=engine, device="cpu") for engine in ("lanes", "reference"))
    for name in FACTS:
        assert ours.facts(name) == pytest.approx(theirs.facts(name), rel=1e-9)


def test_stacked_lanes_are_watched_as_if_alone() -> None:
    method = watched(FedAvgM(beta=0.5))
    alone = [method.init(torch.zeros(5, dtype=torch.float64)) for _ in range(2)]
    stacked = method.init(torch.zeros(2, 5, dtype=torch.float64))
    for (first, n), (second, m) in zip(rounds(seed=1), rounds(seed=2), strict=True):
        stacked, facts = method.step(stacked, Summary.of(torch.stack([first, second]), torch.stack([n, m])))
        for lane, (updates, weights) in enumerate([(first, n), (second, m)]):
            alone[lane], single = method.step(alone[lane], Summary.of(updates, weights))
            for name in FACTS:
                torch.testing.assert_close(facts[name][lane], single[name], rtol=1e-12, atol=0)
            torch.testing.assert_close(stacked.params[lane], alone[lane].params, rtol=1e-12, atol=0)


def test_a_watched_run_says_which_method_it_is(small_run: Any) -> None:
    run = small_run(method=FedAvgM(beta=0.5))
    assert run.describe()["method"] == {"name": "fedavgm", "server_lr": 1.0, "beta": 0.5}
    assert run.server.name == "fedavgm" and isinstance(run.server, FedAvgM) and run.server.beta == 0.5
    assert type(run.method) is FedAvgM
    assert run.identity() != small_run(method=FedAvgM(beta=0.5), watch_drift=False).identity()
    assert "fedavgm" in all_methods() and all_methods()["fedavgm"] is FedAvgM


def test_the_dtype_of_the_state_is_kept_and_the_method_sees_its_own_state() -> None:
    method = watched(Scaffold())
    state = method.init(torch.zeros(3), num_clients=7)
    assert state._fields[-2:] == ("watch_momentum", "watch_variance") and float(state.num_clients) == 7
    extras = {name: torch.ones(2, 3) for name in Scaffold.replies}
    state, _ = method.step(state, Summary.of(torch.ones(2, 3), torch.ones(2), extras))
    assert state.watch_momentum.dtype == torch.float32 and state.watch_variance.dtype == torch.float64
    assert torch.equal(state.params, torch.ones(3))
