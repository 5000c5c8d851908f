"""Gaussianity: are the drifts of parameters normal? D'Agostino and Pearson's test, for one parameter or many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..errors import FedeveError
from .cohorts import Floats

FEWEST = 20  # below, the test's approximation of the kurtosis does not hold


@dataclass(frozen=True)
class Normality:
    """What the test says of P series of T values each."""

    num_values: int
    """T, the sample size of every test."""
    p_values: Floats
    """[P] one p-value per series; NaN where a series is constant and there is nothing to test."""
    skewness: Floats
    """[P]"""
    kurtosis: Floats
    """[P] in excess of the normal's."""
    level: float

    @property
    def num_tested(self) -> int:
        return int(np.isfinite(self.p_values).sum())

    @property
    def num_constant(self) -> int:
        return len(self.p_values) - self.num_tested

    @property
    def rejected(self) -> int:
        """Series that are not normal at the level, each test taken alone: of so many normal ones, a share of `level`
        would be rejected by chance."""
        return int((self.p_values[np.isfinite(self.p_values)] < self.level).sum())

    @property
    def rejected_corrected(self) -> int:
        """Series that are not normal with Holm's correction: the chance that even one of them is wrong is `level`."""
        return int(holm(self.p_values[np.isfinite(self.p_values)], level=self.level).sum())

    @property
    def verdict(self) -> str:
        """One sentence, with the sample size."""
        constant = f" ({self.num_constant} constant ones left out)" if self.num_constant else ""
        if not self.num_tested:
            return f"nothing to test: all {self.num_constant} series are constant"
        share = self.rejected / self.num_tested
        return (
            f"{self.rejected} of {self.num_tested} rejected at {self.level:g} ({100 * share:.0f} %), "
            f"{self.rejected_corrected} after Holm's correction, {self.num_values} values each{constant}"
        )


def normality(series: NDArray[np.floating], *, level: float = 0.05) -> Normality:
    """Test every column of `series` [T, P] for normality.

    >>> normal = normality(np.random.default_rng(0).normal(size=(500, 3)))
    >>> normal.verdict
    "0 of 3 rejected at 0.05 (0 %), 0 after Holm's correction, 500 values each"
    """
    values = np.asarray(series, dtype=np.float64).reshape(len(series), -1)
    if len(values) < FEWEST:
        raise FedeveError("too few values to test for normality", got=len(values), do=f"trace {FEWEST} rounds or more")
    if not np.isfinite(values).all():
        raise FedeveError("a traced value is not finite", got="NaN or infinity", do="lower the learning rate")
    p_values, skewness, kurtosis = (np.full(values.shape[1], np.nan) for _ in range(3))
    # A series whose spread is rounding alone is as constant as one of equal numbers.
    moving = values.std(0) > 1e-12 * np.abs(values).max(0)
    if moving.any():
        alive = values[:, moving]
        p_values[moving] = stats.normaltest(alive, axis=0).pvalue
        skewness[moving], kurtosis[moving] = stats.skew(alive, axis=0), stats.kurtosis(alive, axis=0)
    return Normality(len(values), p_values, skewness, kurtosis, level)


def holm(p_values: Floats, *, level: float = 0.05) -> NDArray[np.bool_]:
    """Which hypotheses Holm's step-down procedure rejects: all errors together have probability `level`.

    >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
    [True, False, False]
    """
    order = np.argsort(p_values, kind="stable")
    passed = p_values[order] <= level / np.arange(len(p_values), 0, -1)
    stop = len(passed) if passed.all() else int(np.argmin(passed))
    rejected = np.zeros(len(p_values), dtype=bool)
    rejected[order[:stop]] = True
    return rejected


def quantiles(values: NDArray[np.floating]) -> tuple[Floats, Floats]:
    """A Q-Q plot's points: the normal's quantiles [T] and those of the values, standardised."""
    plain = np.sort(np.asarray(values, dtype=np.float64))
    spread = plain.std()
    places = (np.arange(1, len(plain) + 1) - 0.5) / len(plain)
    return np.asarray(stats.norm.ppf(places)), (plain - plain.mean()) / (spread if spread else 1.0)
