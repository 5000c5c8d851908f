"""Every draw is a pure function of what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedeve import seeds


def draws(*path: int | str) -> list[float]:
    return seeds.generator(*path).random(4).tolist()


def test_a_path_always_gives_the_same_draws_whatever_else_was_drawn():
    first = draws(1, 2, "batches")
    seeds.generator(1, 2, "batches").random(1000)
    np.random.default_rng(0).random(10)
    torch.manual_seed(0)
    assert draws(1, 2, "batches") == first


def test_different_paths_give_different_draws():
    paths = [(1, 2), (2, 1), (12,), (1, 2, 0), (1, "2"), ("1", 2), (1, 2, "a"), (1, 2, "b"), ("1, 2",), ()]
    assert len({tuple(draws(*path)) for path in paths}) == len(paths)


def test_numpy_integers_name_the_same_path_as_pythons():
    assert draws(np.int64(5), np.int32(3), "cohort") == draws(5, 3, "cohort")
    assert seeds.torch_seed(np.int64(5), "model") == seeds.torch_seed(5, "model")


def test_streams_of_neighbouring_rounds_are_not_correlated():
    table = np.array([seeds.generator(0, round, "x").standard_normal(200) for round in range(40)])
    correlations = np.corrcoef(table)[~np.eye(40, dtype=bool)]
    assert np.abs(correlations).max() < 0.35  # 780 pairs of 200 draws: five standard deviations of 1/sqrt(200)


def test_a_torch_seed_is_accepted_by_torch_and_belongs_to_its_path():
    values = {seeds.torch_seed(0, round, "layers") for round in range(100)}
    assert len(values) == 100
    assert all(0 <= value < 2**63 for value in values)
    torch.Generator().manual_seed(max(values))


# Cohorts.


def cohort(population=30, size: int = 10, *, seed: int = 0, round: int = 0) -> list[int]:
    return seeds.cohort(population, size, seed=seed, round=round).tolist()


def test_a_cohort_is_a_pure_function_of_seed_and_round():
    assert cohort(seed=4, round=7) == cohort(seed=4, round=7)
    assert cohort(seed=4, round=7) != cohort(seed=4, round=8)
    assert cohort(seed=4, round=7) != cohort(seed=5, round=7)


@pytest.mark.parametrize("size", [1, 10, 29, 30])
def test_a_cohort_is_drawn_without_replacement(size):
    for round in range(50):
        drawn = cohort(size=size, round=round)
        assert len(drawn) == len(set(drawn)) == size
        assert set(drawn) <= set(range(30))


def test_a_cohort_is_drawn_from_the_clients_given():
    population = np.array([3, 17, 40, 41, 99])
    drawn = [seeds.cohort(population, 3, seed=0, round=round) for round in range(40)]
    assert {int(client) for each in drawn for client in each} == set(population.tolist())
    assert all(each.dtype == np.int64 for each in drawn)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("population", [20, np.arange(20)], ids=["a number", "an array"])
def test_cohorts_are_uniform(population):
    rounds, size, num = 4000, 5, 20
    drawn = np.array([seeds.cohort(population, size, seed=1, round=round) for round in range(rounds)])
    # Drawn without replacement, counts vary less by (1 - size/num), so this bound, chi-square(19) at 1e-4, is generous.
    assert chi_square(np.bincount(drawn.reshape(-1), minlength=num)) < 52
    # Every place of the order is uniform as well: nobody is favoured to come first.
    for place in range(size):
        assert chi_square(np.bincount(drawn[:, place], minlength=num)) < 52


def test_pairs_of_clients_meet_equally_often():
    num, rounds = 8, 4000
    counts = np.zeros((num, num))
    for round in range(rounds):
        first, second = seeds.cohort(num, 2, seed=2, round=round)
        counts[min(first, second), max(first, second)] += 1
    assert chi_square(counts[np.triu_indices(num, 1)]) < 70  # 28 pairs: chi-square(27) at about 1e-5


# Dropout.


def test_nobody_is_silent_at_share_zero_and_everybody_at_share_one():
    drawn = np.arange(10)
    for round in range(20):
        assert seeds.silent(drawn, share=0.0, seed=0, round=round).tolist() == []
        assert seeds.silent(drawn, share=1.0, seed=0, round=round).tolist() == drawn.tolist()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_of_silent_clients_is_the_one_asked_for(share):
    drawn, rounds = np.arange(10), 1000
    silent = [len(seeds.silent(drawn, share=share, seed=3, round=round)) for round in range(rounds)]
    deviation = np.sqrt(share * (1 - share) / (10 * rounds))
    assert abs(np.mean(silent) / 10 - share) < 4 * deviation
    assert np.var(silent) == pytest.approx(10 * share * (1 - share), rel=0.2)  # each for itself, not all together


def test_who_is_silent_is_a_pure_function_and_a_part_of_the_cohort():
    drawn = np.array([4, 9, 1, 7, 30])
    first = seeds.silent(drawn, share=0.5, seed=0, round=1).tolist()
    assert seeds.silent(drawn, share=0.5, seed=0, round=1).tolist() == first
    assert set(first) <= set(drawn.tolist())
    others = [seeds.silent(drawn, share=0.5, seed=seed, round=2).tolist() for seed in range(10)]
    assert any(other != first for other in others)


def test_more_dropout_silences_those_silent_before_and_more():
    drawn = np.arange(50)
    few = set(seeds.silent(drawn, share=0.2, seed=0, round=0).tolist())
    many = set(seeds.silent(drawn, share=0.6, seed=0, round=0).tolist())
    assert few < many
