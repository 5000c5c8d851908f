"""What FedEve's gain does at its limits, and to whom order, weights and number formats make no difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import EPS, FedEveOracle, assert_close, assert_same_facts, each_method, summarised
from torch import Tensor

from fedeve import (
    FedEve,
    Method,
    Summary,
)
from fedeve.method import Vectors
from fedeve.methods import kalman


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def warm(method: FedEve, seed: int, dim: int = 5) -> tuple[Any, FedEveOracle]:
    """A state after three random rounds, so that momentum and variance are not zero, and its oracle."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=dim)
    state, oracle = method.init(torch.from_numpy(first.copy())), FedEveOracle(first, 1, method.server_lr, method.drift)
    for _ in range(3):
        updates = 1 + rng.normal(size=(4, dim))
        state, _ = method.step(state, Summary.of(torch.from_numpy(updates), double(1, 2, 3, 4)))
        oracle.step(list(updates), [1.0, 2.0, 3.0, 4.0])
    assert oracle.v > 0.01
    assert np.abs(oracle.M).min() > 0.01
    return state, oracle


def test_without_client_drift_the_gain_goes_to_one_and_the_observation_is_added() -> None:
    state, oracle = warm(FedEve(), seed=0)
    rng = np.random.default_rng(1)
    u, noise = rng.normal(size=5), rng.normal(size=(6, 5))
    noise -= noise.mean(0)
    gaps, distances = [], []
    for size in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 0.0):
        new, facts = FedEve().step(state, Summary.of(torch.from_numpy(u + size * noise), torch.ones(6)))
        gaps.append(1 - float(facts["gain"]))
        distances.append(float(np.abs(new.params.numpy() - (oracle.w + u)).max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1e-2
    assert gaps[-2] < 1e-7
    assert gaps[-1] < 1e-15
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-14


def test_with_endless_client_drift_the_gain_goes_to_zero_and_only_momentum_moves() -> None:
    state, oracle = warm(FedEve(), seed=2)
    u, apart = np.linspace(-1, 1, 5), np.array([1.0, -2.0, 3.0, -4.0, 5.0])
    gains, distances = [], []
    for size in (1.0, 1e2, 1e4, 1e6):
        updates = np.stack([u + size * apart, u - size * apart])
        new, facts = FedEve().step(state, Summary.of(torch.from_numpy(updates), torch.ones(2)))
        gains.append(float(facts["gain"]))
        distances.append(float(np.abs(new.params.numpy() - (oracle.w + oracle.M)).max()))
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1e-11
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-10


def test_known_observation_noise_adds_to_the_client_drift_and_lowers_the_gain() -> None:
    state, _ = warm(FedEve(), seed=3)
    updates = np.random.default_rng(4).normal(size=(6, 5))
    summary = Summary.of(torch.from_numpy(updates), torch.ones(6))
    _, plain = FedEve().step(state, summary)
    gains = [float(plain["gain"])]
    for noise in (1e-3, 1.0, 1e3, 1e9):
        new, facts = FedEve(observation_noise=noise).step(state, summary)
        prior = float(state.variance + plain["period_drift"])
        assert facts["client_drift"] == plain["client_drift"]  # what was measured stays what was measured
        assert float(facts["gain"]) == pytest.approx(prior / (prior + float(plain["client_drift"]) + noise), rel=1e-12)
        assert float(facts["variance"]) <= min(prior, float(plain["client_drift"]) + noise)
        gains.append(float(facts["gain"]))
    assert gains == sorted(gains, reverse=True)
    np.testing.assert_allclose(new.momentum, state.momentum, atol=1e-6)  # without trust only momentum is left


variances = st.floats(min_value=1e-140, max_value=1e140) | st.just(0.0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(v_hat=variances, noise=variances)
def test_the_posterior_variance_is_at_most_the_smaller_of_prior_and_noise(v_hat: float, noise: float) -> None:
    _, variance, gain = kalman.update(double(1.0, -2.0), double(v_hat)[0], double(3.0, 5.0), double(noise)[0])
    slack = 4 * EPS * v_hat  # (1 - G) v_hat knows 1 - G to the last digit of G only
    assert 0 <= float(gain) <= 1
    assert 0 <= float(variance) <= min(v_hat, noise) + slack
    exact = v_hat / (1 + v_hat / noise) if noise else 0.0  # v_hat R / (v_hat + R)
    assert abs(float(variance) - exact) <= slack


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    v=variances,
    drift=variances,
    noise=variances,
    prediction=st.floats(-1e6, 1e6, allow_subnormal=False),
    observation=st.floats(-1e6, 1e6, allow_subnormal=False),
)
def test_the_kalman_functions_are_the_specification_line_by_line(
    v: float, drift: float, noise: float, prediction: float, observation: float
) -> None:
    v_hat = kalman.predict(double(v)[0], double(drift)[0])
    assert float(v_hat) == v + drift
    mean, variance, gain = kalman.update(double(prediction), v_hat, double(observation), double(noise)[0])
    expected = (v + drift) / (v + drift + noise) if v + drift + noise > 0 else 1.0
    assert float(gain) == pytest.approx(expected, rel=4 * EPS, abs=0)
    assert float(variance) == pytest.approx((1 - expected) * (v + drift), rel=1e-12, abs=4 * EPS * (v + drift))
    fused = prediction + expected * (observation - prediction)
    assert float(mean[0]) == pytest.approx(fused, rel=1e-12, abs=1e-14 * max(abs(prediction), abs(observation)))


@pytest.mark.parametrize("drift", ["paper", "released"])
@pytest.mark.parametrize("weight", [1.0, 37.0])
def test_a_cohort_of_one_has_no_client_drift(drift: str, weight: float) -> None:
    state, oracle = warm(FedEve(drift=drift), seed=4)
    update = np.random.default_rng(4).normal(size=5)
    new, facts = FedEve(drift=drift).step(state, Summary.of(torch.from_numpy(update)[None], double(weight)))
    assert float(facts["client_drift"]) == 0.0
    assert float(facts["gain"]) == 1.0
    assert_close(new.params, oracle.w + update, rel=1e-14)


@pytest.mark.parametrize("drift", ["paper", "released"])
def test_equal_updates_are_averaged_whatever_the_weights(drift: str) -> None:
    method, u = FedEve(drift=drift), np.array([0.1, -1 / 3, np.pi])  # sums of these round
    state = method.init(torch.zeros(3, dtype=torch.float64))
    for done in range(1, 6):
        weights = double(3, 0, 7, 1, 1, 9, 2)
        state, facts = method.step(state, Summary.of(torch.from_numpy(np.stack([u] * 7)), weights))
        assert float(facts["client_drift"]) == 0.0
        assert float(facts["gain"]) == 1.0
        assert_close(state.params, done * u, rel=1e-14)
        assert_close(method.send(state).params, (done + 1) * u, rel=1e-14)


@pytest.mark.parametrize("drift", ["paper", "released"])
def test_zero_updates_have_gain_one_and_move_nothing(drift: str) -> None:
    method, first = FedEve(drift=drift), np.array([1.0, -2.0, 3.0])
    state = method.init(torch.from_numpy(first.copy()))
    for _ in range(3):
        state, facts = method.step(state, Summary.of(torch.zeros(4, 3, dtype=torch.float64), double(1, 2, 0, 4)))
        assert_same_facts(facts, {"gain": 1.0, "period_drift": 0.0, "client_drift": 0.0})
        assert np.array_equal(state.params.numpy(), first)
        assert np.array_equal(method.send(state).params.numpy(), first)


def test_zero_updates_stop_a_model_under_way() -> None:
    state, oracle = warm(FedEve(), seed=6)
    new, facts = FedEve().step(state, Summary.of(torch.zeros(4, 5, dtype=torch.float64), torch.ones(4)))
    assert float(facts["gain"]) == 1.0
    assert_close(new.params, oracle.w, rel=1e-14)
    assert_close(FedEve().send(new).params, oracle.w, rel=1e-14)


def groupings(rng: np.random.Generator, size: int) -> Iterator[list[NDArray[np.int64]]]:
    """Clients in random orders, cut at random places."""
    for _ in range(8):
        cuts = np.sort(rng.choice(np.arange(1, size), size=int(rng.integers(0, size)), replace=False))
        yield [part for part in np.split(rng.permutation(size), cuts) if len(part)]


@pytest.mark.parametrize("drift", ["paper", "released"])
@pytest.mark.parametrize("offset", [0.0, 1e4], ids=["centred", "mean-dominates"])
def test_order_and_grouping_of_clients_change_nothing_but_rounding(drift: str, offset: float) -> None:
    rng = np.random.default_rng(8)
    method = FedEve(drift=drift)
    state, _ = warm(method, seed=8)
    updates = torch.from_numpy(offset + rng.normal(size=(10, 5)))
    weights = torch.from_numpy(rng.integers(0, 50, size=10).astype(np.float64))
    expected, expected_facts = method.step(state, Summary.of(updates, weights))
    for parts in groupings(rng, 10):
        pieces = [Summary.of(updates[part], weights[part]) for part in map(torch.from_numpy, parts)]
        actual, facts = method.step(state, Summary.merged(pieces))
        assert_close(actual.params, expected.params.numpy(), rel=1e-14)
        for name, value in expected_facts.items():
            assert float(facts[name]) == pytest.approx(float(value), rel=1e-11), name


@each_method
def test_float32_parameters_stay_float32_while_scalars_are_float64(method: Method) -> None:
    rng = np.random.default_rng(9)
    state = method.init(torch.from_numpy(rng.normal(size=6)).float(), num_clients=5)
    memory: Vectors = {name: torch.zeros(6) for name in method.remembers}
    for _ in range(3):
        sent = method.send(state)
        assert sent.params.dtype == torch.float32
        update = torch.from_numpy(rng.normal(size=6)).float()
        extras, memory = method.finish(update, 4, 0.1, sent, memory)
        other = torch.from_numpy(rng.normal(size=6)).float()
        state, facts = method.step(
            state, summarised([update, other], [1.0, 3.0], [extras, dict(extras)], one_by_one=False)
        )
        for name, value in state._asdict().items():
            assert value.dtype == (torch.float32 if value.ndim else torch.float64), name
        assert all(value.dtype == torch.float64 for value in facts.values())
        assert all(value.dtype == torch.float32 for value in memory.values())
