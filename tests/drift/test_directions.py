"""Directions of sequences whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from fedeve import FedeveError
from fedeve.drift.directions import directions


def test_the_same_vector_every_round_has_cosine_one_and_one_direction() -> None:
    found = directions(np.tile([3.0, 4.0, 0.0], (30, 1)), lags=5)
    assert found.square == pytest.approx(25) and found.cosine == pytest.approx(1)
    assert found.autocorrelation == pytest.approx(np.ones(5))
    assert found.effective_rank == pytest.approx(1) and found.top_share == pytest.approx(1)


def test_axes_in_turn_have_cosine_zero_and_as_many_directions_as_axes() -> None:
    found = directions(np.tile(np.eye(4), (10, 1)), lags=8)
    assert found.cosine == 0 and found.effective_rank == pytest.approx(4)
    assert found.autocorrelation[3] == pytest.approx(1) and found.autocorrelation[[0, 1, 2]] == pytest.approx(0)


def test_independent_noise_is_uncorrelated_and_a_moving_average_is_not() -> None:
    noise = np.random.default_rng(0).normal(size=(400, 50))
    plain = directions(noise)
    assert abs(plain.cosine) < 4 * plain.cosine_error and abs(plain.autocorrelation).max() < 0.05
    assert 40 < plain.effective_rank <= 50
    smooth = directions(noise[1:] + noise[:-1])
    assert smooth.autocorrelation[0] == pytest.approx(0.5, abs=0.05) and abs(smooth.autocorrelation[1]) < 0.05


def test_silence_has_no_direction_and_two_rounds_are_too_few() -> None:
    still = directions(np.zeros((5, 3)))
    assert still.square == still.cosine == still.effective_rank == still.top_share == 0
    with pytest.raises(FedeveError, match="directions need rounds"):
        directions(np.ones((2, 3)))
