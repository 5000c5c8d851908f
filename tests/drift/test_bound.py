"""The convergence bound on a quadratic: exact values are what rounds with real cohorts give."""

from __future__ import annotations

import numpy as np
import pytest

from fedeve import FedeveError
from fedeve.drift.bound import Bowl, bound, bound_error, exact_average, exact_error, fedeve_error, simulated_error
from fedeve.drift.cohorts import factor
from fedeve.drift.measures import gradient_variance
from fedeve.drift.objectives import Quadratics

BOWL = Bowl.random(num_clients=20, dim=3)


@pytest.mark.parametrize("gain", [0.1, 0.5, 1.0])
def test_the_exact_floor_is_where_rounds_settle(gain: float) -> None:
    mean, error = simulated_error(BOWL, gain=gain, size=4, rounds=6000)
    assert abs(mean - exact_error(BOWL, gain=gain, size=4)) < 4 * error


def test_in_a_round_bowl_at_gain_one_the_floor_is_one_cohorts_variance() -> None:
    # Then w jumps to the cohort's optimum every round: the gradient there is the cohort's error and nothing else.
    bowl = Bowl(np.random.default_rng(0).normal(size=(12, 3)), 5.0 * np.eye(3))
    one_cohort = bowl.sigma_squared * factor(12, 4)
    assert exact_error(bowl, gain=1.0, size=4) == pytest.approx(one_cohort, rel=1e-9)
    assert one_cohort == pytest.approx(bound_error(bowl, gain=1.0, size=4) * 12 / 11, rel=1e-12)


def test_sigma_is_the_variance_of_the_clients_gradients_wherever_one_stands() -> None:
    same = Quadratics(centres=BOWL.centres, curvatures=BOWL.curvature)
    for where in (0.0, 7.0):
        assert gradient_variance(same, same.start + where) == pytest.approx(BOWL.sigma_squared, rel=1e-9)


def test_everybody_taking_part_leaves_no_floor() -> None:
    assert exact_error(BOWL, gain=0.5, size=20) == 0.0 == bound_error(BOWL, gain=0.5, size=20)


def test_the_average_over_rounds_goes_from_the_start_to_the_floor() -> None:
    start = np.full(3, 4.0)
    first = exact_average(BOWL, gain=0.5, size=4, rounds=1, start=start)
    assert first == pytest.approx(np.square(BOWL.curvature @ (start - BOWL.centres.mean(0))).sum())
    late = exact_average(BOWL, gain=0.5, size=4, rounds=20_000, start=start)
    assert late == pytest.approx(exact_error(BOWL, gain=0.5, size=4), rel=0.02)
    assert bound(BOWL, gain=0.5, size=4, rounds=10, start=start) > bound_error(BOWL, gain=0.5, size=4)


def test_the_bound_holds_at_gain_one_and_is_broken_at_small_gains() -> None:
    bowl = Bowl.random()
    assert exact_error(bowl, gain=1.0, size=10) < bound_error(bowl, gain=1.0, size=10)
    assert exact_error(bowl, gain=0.1, size=10) > 10 * bound_error(bowl, gain=0.1, size=10)


def test_fedeve_settles_at_a_moderate_rate_and_runs_away_at_the_theorems() -> None:
    gain, floor, error = fedeve_error(BOWL, size=4, rounds=600)
    assert 0 < gain < 1 and 0 < floor < 10 * exact_error(BOWL, gain=1.0, size=4) and error > 0
    with np.errstate(over="ignore", invalid="ignore"):
        assert not fedeve_error(BOWL, size=4, rate=1.0, rounds=600)[1] < 1e6


def test_gains_and_cohorts_that_make_no_sense_are_refused() -> None:
    for gain in (0.0, 1.1):
        with pytest.raises(FedeveError, match="gain lies above 0"):
            exact_error(BOWL, gain=gain, size=4)
    with pytest.raises(FedeveError, match="cohort cannot be drawn"):
        exact_error(BOWL, gain=0.5, size=21)
