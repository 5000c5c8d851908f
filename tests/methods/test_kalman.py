"""Predict, gain, fuse, update: the closed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedeve.methods import kalman

positive = st.floats(1e-12, 1e12)
modest = settings(max_examples=100, deadline=None, derandomize=True)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_period_drift_is_the_mean_squared_distance_over_the_cohort():
    momentum, u = normal(7, seed=0), normal(7, seed=1)
    by_hand = sum((m - o) ** 2 for m, o in zip(momentum.tolist(), u.tolist(), strict=True)) / (4 * 7)
    assert kalman.period_drift(momentum, u, scalar(4)).item() == pytest.approx(by_hand, rel=1e-14)


def test_period_drift_from_no_prediction_is_the_updates_own_size():
    u = normal(7, seed=1)
    assert kalman.period_drift(0.0, u, scalar(4)).item() == pytest.approx(u.square().sum().item() / 28, rel=1e-14)


def test_client_drift_is_the_spread_over_the_cohort_squared():
    assert kalman.client_drift(scalar(12.0), scalar(2.0), 3).item() == pytest.approx(12 / (4 * 3))


def test_a_prediction_is_as_uncertain_as_the_estimate_and_the_drift_together():
    assert kalman.predict(scalar(2.0), scalar(0.5)).item() == 2.5


@modest
@given(variance=positive, noise=positive)
def test_the_gain_is_the_priors_share_of_the_variance(variance, noise):
    gain = kalman.kalman_gain(scalar(variance), scalar(noise)).item()
    assert gain == pytest.approx(variance / (variance + noise), rel=1e-14)
    assert 0 <= gain <= 1


def test_the_gain_where_nothing_moved_is_one():
    assert kalman.kalman_gain(scalar(0.0), scalar(0.0)).item() == 1


def test_without_client_drift_the_gain_is_one_and_without_uncertainty_zero():
    assert kalman.kalman_gain(scalar(0.3), scalar(0.0)).item() == 1
    assert kalman.kalman_gain(scalar(0.0), scalar(0.3)).item() == 0


def test_client_drift_without_end_leaves_the_prediction():
    prediction, observation = normal(3, seed=2), normal(3, seed=3)
    fused = kalman.update(prediction, scalar(1.0), observation, scalar(1e30))
    torch.testing.assert_close(fused.mean, prediction, rtol=1e-12, atol=0)
    assert fused.gain.item() < 1e-29
    assert fused.variance.item() == pytest.approx(1.0)


def test_client_drift_that_vanishes_leaves_the_observation():
    prediction, observation = normal(3, seed=2), normal(3, seed=3)
    fused = kalman.update(prediction, scalar(1.0), observation, scalar(0.0))
    torch.testing.assert_close(fused.mean, observation, rtol=1e-14, atol=1e-15)
    assert fused.variance.item() == 0


@pytest.mark.parametrize("gain", [0.0, 0.25, 1.0])
def test_fusing_weighs_observation_and_prediction(gain):
    prediction, observation = normal(3, seed=2), normal(3, seed=3)
    torch.testing.assert_close(
        kalman.fuse(prediction, observation, gain), (1 - gain) * prediction + gain * observation, rtol=0, atol=1e-14
    )


@modest
@given(variance=positive, noise=positive)
def test_the_posterior_variance_is_at_most_the_smaller_of_both(variance, noise):
    fused = kalman.update(torch.zeros(1, dtype=torch.float64), scalar(variance), torch.ones(1), scalar(noise))
    assert 0 <= fused.variance.item() <= min(variance, noise)
    # 1 - gain is known to one rounding of 1, so the variance to that share of the prior's.
    rounding = 2.3e-16 * variance
    assert fused.variance.item() == pytest.approx(variance * noise / (variance + noise), rel=1e-12, abs=rounding)


@modest
@given(variance=st.floats(1e-3, 1e3), noise=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6))
def test_an_update_is_the_product_of_two_gaussians(variance, noise, seed):
    prediction, observation = normal(4, seed=seed), normal(4, seed=seed + 1)
    fused = kalman.update(prediction, scalar(variance), observation, scalar(noise))
    precision = 1 / variance + 1 / noise
    torch.testing.assert_close(
        fused.mean, (prediction / variance + observation / noise) / precision, rtol=1e-9, atol=1e-9
    )
    assert fused.variance.item() == pytest.approx(1 / precision, rel=1e-9)


def test_two_observations_in_either_order_give_the_same_posterior():
    prior, first, second = normal(4, seed=0), normal(4, seed=1), normal(4, seed=2)
    noise = scalar(0.7), scalar(2.0)
    a = kalman.update(prior, scalar(1.3), first, noise[0])
    a = kalman.update(a.mean, a.variance, second, noise[1])
    b = kalman.update(prior, scalar(1.3), second, noise[1])
    b = kalman.update(b.mean, b.variance, first, noise[0])
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(a.variance, b.variance, rtol=1e-12, atol=1e-13)


def test_at_constant_noise_the_variance_settles_at_the_riccati_solution():
    drift, noise, variance = scalar(0.2), scalar(1.5), scalar(0.0)
    for _ in range(200):
        variance = kalman.update(torch.zeros(1), kalman.predict(variance, drift), torch.zeros(1), noise).variance
    # v = (v + Q) R / (v + Q + R), so v^2 + Q v - Q R = 0.
    q, r = drift.item(), noise.item()
    assert variance.item() == pytest.approx((-q + (q * q + 4 * q * r) ** 0.5) / 2, rel=1e-12)


def test_lanes_are_filtered_one_by_one():
    prediction, observation = normal(3, 4, seed=0), normal(3, 4, seed=1)
    variance, noise = normal(3, seed=2).square(), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    count = torch.tensor([2.0, 5.0, 9.0], dtype=torch.float64)
    together = kalman.update(prediction, variance, observation, noise)
    drifts = kalman.period_drift(prediction, observation, count)
    assert together.mean.shape == (3, 4)
    for lane in range(3):
        alone = kalman.update(prediction[lane], variance[lane], observation[lane], noise[lane])
        for name in alone._fields:
            torch.testing.assert_close(getattr(together, name)[lane], getattr(alone, name), rtol=1e-14, atol=1e-15)
        drift = kalman.period_drift(prediction[lane], observation[lane], count[lane])
        torch.testing.assert_close(drifts[lane], drift, rtol=1e-14, atol=0)


def test_float32_updates_are_squared_in_float64():
    tiny = torch.full((4,), 1e-30, dtype=torch.float32)
    assert kalman.period_drift(torch.zeros(4), tiny, scalar(1.0)).item() == pytest.approx(1e-60, rel=1e-6)
