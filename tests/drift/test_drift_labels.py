"""Labels: H, the law, and the picture of a federation."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from fedeve import FederatedData, FedeveError, partition
from fedeve.drift import labels

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 5, size=2000)


def dealt(clients: list[np.ndarray], y: np.ndarray = Y, num_classes: int = 5) -> FederatedData:
    return FederatedData.from_arrays(np.zeros((len(y), 0)), y, clients, num_classes=num_classes)


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.1, 1.0, 1e6])
def test_the_law_holds_over_all_cohorts_of_eight_at_every_alpha(alpha: float) -> None:
    data = dealt(partition.dirichlet(Y, num_clients=8, alpha=alpha, seed=1))
    mix = labels.shares(data)
    count, heterogeneity = len(mix), labels.heterogeneity(mix)
    for size in {1, min(3, count), count}:
        mean = np.mean([
            np.square(mix[list(cohort)].mean(0) - mix.mean(0)).mean()
            for cohort in itertools.combinations(range(count), size)
        ])  # fmt: skip
        law = labels.expected_distance(heterogeneity, num_clients=count, size=size)
        assert law == pytest.approx(mean, rel=1e-9, abs=1e-12)
        assert labels.measured_distance(mix, size=size, how="enumeration").value == pytest.approx(law, abs=1e-9)
        sampled = labels.measured_distance(mix, size=size, num_cohorts=500)
        assert abs(sampled.value - law) <= 5 * sampled.error + 1e-12


def test_heterogeneity_falls_as_alpha_grows() -> None:
    found = [
        labels.heterogeneity(labels.shares(dealt(partition.dirichlet(Y, num_clients=50, alpha=alpha, seed=0))))
        for alpha in (0.01, 0.1, 1.0, 100.0)
    ]
    assert sorted(found, reverse=True) == found


def test_what_chance_alone_would_give_is_the_mean_over_random_deals() -> None:
    sizes = np.array([1, 3, 10, 40, 2, 7, 80, 57])
    y, found = Y[:200], []
    for seed in range(400):
        rows = np.random.default_rng(seed).permutation(200)
        data = dealt(np.split(rows, np.cumsum(sizes)[:-1]), y)
        found.append(labels.heterogeneity(labels.shares(data)))
    picture = labels.inspect(data, cohort=2)
    assert picture.by_chance == pytest.approx(np.mean(found), abs=4 * np.std(found) / 20)


def test_the_picture_counts_what_is_there() -> None:
    data = dealt([np.arange(0, 10), np.arange(10, 11), np.empty(0, np.int64), np.arange(11, 40)])
    picture = labels.inspect(data, cohort=2, num_cohorts=50)
    assert (picture.num_clients, picture.num_empty, picture.num_examples) == (4, 1, 40)
    assert picture.sizes["min"] == 1 and picture.sizes["max"] == 29 and picture.classes["min"] == 1
    assert picture.classes["one"] == pytest.approx(1 / 3)
    mix = labels.shares(data)
    assert picture.heterogeneity == pytest.approx(labels.heterogeneity(mix), rel=1e-12)
    assert [step["cohort"] for step in picture.law] == [1, 2, 3] and picture.law[-1]["distance"] == 0
    assert picture.law[1]["distance"] == pytest.approx(picture.heterogeneity / 4)
    assert json.loads(json.dumps(picture.as_dict()))["halving"] == 3


def test_blocks_of_clients_give_what_all_at_once_give(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dealt(partition.dirichlet(Y, num_clients=30, alpha=0.05, seed=2))
    whole = labels.inspect(data, cohort=3, num_cohorts=20)
    counted = labels.counts(data)
    monkeypatch.setattr(labels, "_BLOCK", 7)
    assert labels.inspect(data, cohort=3, num_cohorts=20).heterogeneity == pytest.approx(whole.heterogeneity, rel=1e-12)
    assert (labels.counts(data) == counted).all()
    assert (labels.counts(data, np.array([3, 1])) == counted[[3, 1]]).all()
    assert counted.sum() == len(Y) and (counted.sum(1) == data.sizes).all()


def test_pooled_cohorts_weigh_clients_by_their_examples() -> None:
    data = dealt([np.flatnonzero(Y == 0), np.flatnonzero(Y == 1)[:5], np.flatnonzero(Y == 2)])
    found = labels.inspect(data, cohort=2, num_cohorts=4000).pooled
    counts = labels.counts(data)
    population = counts.sum(0) / counts.sum()
    cohorts = [counts[list(c)].sum(0) for c in itertools.combinations(range(3), 2)]
    exact = np.mean([np.square(mine / mine.sum() - population).mean() for mine in cohorts])
    assert abs(found["distance"] - exact) < 4 * found["error"]


def test_one_client_one_class_and_the_largest_cohort_work_and_nobody_is_refused() -> None:
    alone = labels.inspect(dealt([np.arange(7)]), cohort=1, num_cohorts=3)
    assert alone.heterogeneity == 0 and alone.halving == 1 and alone.law == [{"cohort": 1, "distance": 0, "typical": 0}]
    single = labels.inspect(dealt([np.array([0]), np.array([1])], np.zeros(2, int), 1), cohort=1, num_cohorts=3)
    assert single.heterogeneity == 0 and single.classes["one"] == 1
    with pytest.raises(FedeveError, match="cohort cannot be drawn"):
        labels.inspect(dealt([np.arange(7)]), cohort=2)
    for ask in (labels.inspect, labels.shares):
        with pytest.raises(FedeveError, match="nobody has data"):
            ask(dealt([np.empty(0, np.int64)]))


def test_many_classes_are_counted_in_pieces_that_fit_into_memory() -> None:
    many = 200_000
    data = dealt([np.array([k]) for k in range(300)], np.arange(300), many)
    blocks = [(first, block.shape, int(block.sum())) for first, block in labels._blocks(data)]
    assert all(rows * classes <= 2**23 for _, (rows, classes), _ in blocks)
    assert [first for first, _, _ in blocks] == list(range(0, 300, 41)) and sum(each for *_, each in blocks) == 300
