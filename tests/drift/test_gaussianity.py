"""Normality: normal series pass, others do not, and what cannot be tested is said."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedeve import FedeveError
from fedeve.drift.gaussianity import holm, normality, quantiles

RNG = np.random.default_rng(0)


def test_p_values_are_scipys_and_of_normal_series_a_share_of_the_level_is_rejected() -> None:
    series = RNG.normal(size=(300, 400))
    found = normality(series)
    assert found.p_values[7] == pytest.approx(stats.normaltest(series[:, 7]).pvalue)
    assert 5 <= found.rejected <= 40 and found.rejected_corrected <= 2
    assert found.num_tested == 400 and found.num_values == 300


def test_skewed_and_heavy_series_are_rejected_even_after_correction() -> None:
    series = np.column_stack([RNG.exponential(size=(400, 10)), RNG.standard_t(2, size=(400, 10))])
    found = normality(series)
    assert found.rejected_corrected >= 19
    assert (found.skewness[:10] > 1).all() and (found.kurtosis[10:] > 1).all()


def test_constant_series_are_left_out_and_counted() -> None:
    series = np.column_stack([np.zeros(50), np.full(50, 3.0), 1e6 + 1e-9 * RNG.normal(size=50), RNG.normal(size=50)])
    found = normality(series)
    assert found.num_tested == 1 and found.num_constant == 3 and np.isnan(found.p_values[:3]).all()
    assert "3 constant ones left out" in found.verdict and "50 values each" in found.verdict
    assert normality(np.zeros((30, 2))).verdict == "nothing to test: all 2 series are constant"


def test_one_series_may_be_given_and_too_few_or_broken_values_are_refused() -> None:
    assert normality(RNG.normal(size=100)).num_tested == 1
    with pytest.raises(FedeveError, match=r"too few values.*20 rounds"):
        normality(np.zeros((19, 2)))
    with pytest.raises(FedeveError, match="not finite"):
        normality(np.full((30, 1), np.nan))


def test_holm_rejects_step_by_step() -> None:
    assert holm(np.array([0.001, 0.02, 0.026, 0.9])).tolist() == [True, False, False, False]
    assert holm(np.array([0.9, 0.01, 0.0125, 0.02])).tolist() == [False, True, True, True]
    assert holm(np.array([])).tolist() == []
    # Never fewer than Bonferroni, never more than each test alone.
    for seed in range(50):
        p_values = np.random.default_rng(seed).random(20) ** 3
        found = holm(p_values)
        assert (
            set(np.flatnonzero(p_values < 0.05 / 20))
            <= set(np.flatnonzero(found))
            <= set(np.flatnonzero(p_values < 0.05))
        )


def test_quantiles_of_a_normal_lie_on_the_diagonal() -> None:
    theory, sample = quantiles(5 + 3 * RNG.normal(size=5000))
    inner = slice(250, -250)
    assert sample[inner] == pytest.approx(theory[inner], abs=0.12)
    assert quantiles(np.ones(10))[1] == pytest.approx(np.zeros(10))
