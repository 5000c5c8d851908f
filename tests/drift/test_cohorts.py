"""Means over cohorts: closed forms are what enumeration gives, and sampling is within its error."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedeve import FedeveError
from fedeve.drift.cohorts import AVERAGES, Estimate, cohort_distance, factor, halving

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(8, 5)) + 3.0
WEIGHTS = np.array([1, 9, 4, 2, 30, 7, 7, 1])


def by_hand(size: int, average: str) -> float:
    """The definition, written down again: every cohort, one after another."""
    overall = np.ones(8) if average == "plain" else WEIGHTS
    target = (overall[:, None] * VECTORS).sum(0) / overall.sum()
    distances = []
    for cohort in itertools.combinations(range(8), size):
        share = WEIGHTS[list(cohort)] if average == "examples" else np.ones(size)
        mean = (share[:, None] * VECTORS[list(cohort)]).sum(0) / share.sum()
        distances.append(((mean - target) ** 2).sum())
    return float(np.mean(distances))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_all_cohorts_of_eight_clients(size: int, average: str) -> None:
    expected = by_hand(size, average)
    for how in ("auto", "enumeration"):
        found = cohort_distance(VECTORS, size=size, average=average, weights=WEIGHTS, how=how)
        assert found.value == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert found.exact and found.error == 0.0
    sampled = cohort_distance(VECTORS, size=size, average=average, weights=WEIGHTS, how="sampled", num_cohorts=3000)
    assert abs(sampled.value - expected) <= 4 * sampled.error + 1e-12
    assert sampled.num_cohorts == 3000 and not sampled.exact


def test_long_vectors_take_another_way_to_the_same_number() -> None:
    long = np.concatenate([VECTORS, np.zeros((8, 50))], axis=1)
    for how in ("enumeration", "sampled"):
        for average in AVERAGES:
            options = {"size": 3, "average": average, "weights": WEIGHTS, "how": how}
            short = cohort_distance(VECTORS, **options)
            assert cohort_distance(long, **options).value == pytest.approx(short.value, rel=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.data())
def test_the_factor_is_that_of_the_variance_lemma_and_halving_is_the_smallest_that_halves(
    count: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, count))
    if count > 1:
        assert factor(count, size) == pytest.approx((1 / size) * (1 - size / count) * count / (count - 1), abs=1e-15)
    half = halving(count, size)
    assert size <= half <= count
    assert factor(count, half) <= factor(count, size) / 2 + 1e-15
    assert half == size or factor(count, half - 1) > factor(count, size) / 2 - 1e-15


def test_a_cohort_of_one_keeps_the_variance_and_a_cohort_of_all_has_none() -> None:
    variance = VECTORS.var(0).sum()
    assert cohort_distance(VECTORS, size=1).value == pytest.approx(variance, rel=1e-12)
    assert cohort_distance(VECTORS, size=8).value == pytest.approx(0, abs=1e-25)
    assert cohort_distance(VECTORS[:1], size=1).value == 0.0


def test_the_bias_is_what_is_left_when_everybody_is_in_the_cohort() -> None:
    found = [cohort_distance(VECTORS, size=size, average="definition", weights=WEIGHTS) for size in (2, len(VECTORS))]
    assert found[0].bias == found[1].bias == pytest.approx(found[1].value, rel=1e-9)
    assert 0 < found[0].bias < found[0].value and cohort_distance(VECTORS, size=2).bias < 1e-20


def test_what_cannot_be_measured_is_refused() -> None:
    for size in (0, 9):
        with pytest.raises(FedeveError, match=r"cohort cannot be drawn.*1 to 8"):
            cohort_distance(VECTORS, size=size)
    with pytest.raises(FedeveError, match="nobody has data"):
        cohort_distance(np.zeros((0, 3)), size=1)
    with pytest.raises(FedeveError, match="needs weights"):
        cohort_distance(VECTORS, size=2, average="examples")
    with pytest.raises(FedeveError, match="positive, one per client"):
        cohort_distance(VECTORS, size=2, average="examples", weights=np.zeros(8))
    with pytest.raises(FedeveError, match="no closed form"):
        cohort_distance(VECTORS, size=2, average="examples", weights=WEIGHTS, how="closed form")
    with pytest.raises(FedeveError, match="too many cohorts"):
        cohort_distance(np.zeros((200, 1)), size=50, how="enumeration")
    with pytest.raises(FedeveError, match="standard error needs cohorts"):
        cohort_distance(VECTORS, size=2, how="sampled", num_cohorts=1)
    with pytest.raises(FedeveError, match=r"unknown average.*plain"):
        cohort_distance(VECTORS, size=2, average="plane")
    with pytest.raises(FedeveError, match="unknown way to measure"):
        cohort_distance(VECTORS, size=2, how="guess")


def test_an_estimate_says_how_it_was_found() -> None:
    assert str(Estimate(0.5, 0.0, "closed form", 0, 8)) == "0.5 (closed form)"
    assert str(Estimate(0.5, 0.01, "sampled", 1000, 8)) == "0.5 ± 0.01 (sampled, 1,000 cohorts)"
