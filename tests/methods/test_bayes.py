"""The general filter on a grid, beside the closed form where there is one and beside plain integrals where not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate

from fedeve import FedeveError
from fedeve.methods import kalman
from fedeve.methods.bayes import GridFilter


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def gaussian(mean: float = 0.0, variance: float = 1.0):
    return lambda w: np.exp(-((w - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)


def standard(num_points: int = 2001) -> GridFilter:
    return GridFilter.of(gaussian(), low=-12, high=12, num_points=num_points)


@pytest.mark.parametrize("seed", range(4))
def test_on_gaussian_noise_the_grid_is_the_closed_form(seed):
    rng = np.random.default_rng(seed)
    belief, mean, variance = standard(1201), scalar(0.0), scalar(1.0)
    for _ in range(6):
        step, observed = rng.normal(scale=0.5), rng.normal(scale=1.5)
        period, client = rng.uniform(0.05, 1.0, size=2)
        belief = belief.predict(gaussian(variance=period), transition=lambda w, step=step: w + step)
        belief = belief.observe(observed, gaussian(variance=client))
        prior = kalman.predict(variance, scalar(period))
        fused = kalman.update((mean + step)[None], prior, scalar(observed)[None], scalar(client))
        mean, variance = fused.mean[0], fused.variance
        assert belief.mean == pytest.approx(mean.item(), abs=1e-6)
        assert belief.variance == pytest.approx(variance.item(), abs=1e-6)


def test_a_prediction_is_the_convolution_with_the_noise():
    belief = standard().predict(gaussian(variance=0.5), transition=lambda w: w + 1)
    expected = gaussian(1.0, 1.5)(belief.points)
    assert np.abs(belief.density - expected).max() < 1e-9


def test_a_linear_transition_scales_the_variance():
    belief = standard().predict(gaussian(variance=0.25), transition=lambda w: 0.5 * w)
    assert belief.mean == pytest.approx(0.0, abs=1e-9)
    assert belief.variance == pytest.approx(0.25 + 0.25, abs=1e-9)


def test_what_is_observed_can_be_a_function_of_the_parameter():
    belief = standard().observe(3.0, gaussian(variance=2.0), observation=lambda w: 2 * w)
    # 3 = 2 w + noise of variance 2 is 1.5 = w + noise of variance 0.5.
    fused = kalman.update(scalar(0.0)[None], scalar(1.0), scalar(1.5)[None], scalar(0.5))
    assert belief.mean == pytest.approx(fused.mean.item(), abs=1e-9)
    assert belief.variance == pytest.approx(fused.variance.item(), abs=1e-9)


def laplace(w):
    return np.exp(-np.abs(w)) / 2


def mixture(w):
    return 0.85 * gaussian(0.0, 0.25)(w) + 0.15 * gaussian(0.0, 25.0)(w)


def moments_by_quadrature(noise, value: float) -> tuple[float, float]:
    """Mean and variance of the posterior of a standard normal prior, by scipy's adaptive integration."""

    def integral(power: int, around: float = 0.0) -> float:
        def integrand(w: float) -> float:
            return (w - around) ** power * noise(value - w) * gaussian()(w)

        return integrate.quad(integrand, -12, 12, points=[value, 0.0], epsabs=1e-13, epsrel=1e-12, limit=500)[0]

    total = integral(0)
    mean = integral(1) / total
    return mean, integral(2, mean) / total


@pytest.mark.parametrize(("noise", "variance"), [(laplace, 2.0), (mixture, 0.85 * 0.25 + 0.15 * 25)])
def test_on_other_noise_the_grid_is_the_integral_and_not_the_closed_form(noise, variance):
    value = 4.0
    belief = standard(4801).observe(value, noise)
    mean, expected_variance = moments_by_quadrature(noise, value)
    assert belief.mean == pytest.approx(mean, abs=1e-5)
    assert belief.variance == pytest.approx(expected_variance, abs=1e-5)
    closed = kalman.update(scalar(0.0)[None], scalar(1.0), scalar(value)[None], scalar(variance))
    assert abs(belief.mean - closed.mean.item()) > 0.1


def test_heavy_tails_trust_a_far_observation_less_than_a_near_one():
    gains = [standard().observe(value, mixture).mean / value for value in (0.5, 6.0)]
    assert gains[1] < 0.5 * gains[0]


def test_a_finer_grid_is_a_better_one():
    exact = moments_by_quadrature(laplace, 1.3)[0]
    errors = [abs(standard(num).observe(1.3, laplace).mean - exact) for num in (51, 501, 5001)]
    assert errors[0] > errors[1] > errors[2]


def test_a_density_is_normalised_whatever_its_factor():
    belief = GridFilter.of(lambda w: 17 * np.exp(-(w**2) / 2), low=-10, high=10)
    assert np.trapezoid(belief.density, belief.points) == pytest.approx(1.0)
    after = belief.observe(1.0, lambda w: 1e-200 * np.exp(-(w**2) / 2))
    assert np.trapezoid(after.density, after.points) == pytest.approx(1.0)
    assert after.mean == pytest.approx(0.5)


def test_a_filter_is_not_changed_by_what_follows_from_it():
    belief = standard()
    before = belief.density.copy()
    belief.predict(gaussian()).observe(2.0, gaussian())
    assert np.array_equal(belief.density, before)


def test_a_density_that_vanishes_on_the_grid_is_refused_with_advice():
    with pytest.raises(FedeveError, match=r"vanishes on the grid.*widen the grid"):
        standard().observe(1000.0, gaussian())
    with pytest.raises(FedeveError, match="vanishes"):
        standard().predict(gaussian(), transition=lambda w: w + 1000)
    with pytest.raises(FedeveError, match="vanishes"):
        GridFilter.of(lambda w: np.zeros_like(w), low=-1, high=1)
    with pytest.raises(FedeveError, match="vanishes"):
        GridFilter.of(lambda w: np.full_like(w, np.nan), low=-1, high=1)


@pytest.mark.parametrize("bad", [{"low": 1, "high": 1}, {"low": 2, "high": 1}, {"low": 0, "high": 1, "num_points": 2}])
def test_a_grid_without_room_is_refused(bad):
    with pytest.raises(FedeveError, match="needs room"):
        GridFilter.of(gaussian(), **bad)
