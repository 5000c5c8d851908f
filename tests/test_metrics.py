"""Metrics against their definitions, scikit-learn, and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score, roc_auc_score

from fedeve import metrics


def tied(seed: int, *shape: int, levels: int) -> torch.Tensor:
    """Random scores with few different values."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, levels, shape).astype(np.float64) / 7 - 0.3)


def labels(seed: int, n: int) -> torch.Tensor:
    y = np.random.default_rng(seed).integers(0, 2, n)
    y[:2] = 0, 1
    return torch.from_numpy(y)


@pytest.mark.parametrize("levels", [1, 2, 5, 50, 10**9])
@pytest.mark.parametrize("seed", range(5))
def test_auc_is_scikit_learns_with_any_number_of_ties(seed, levels):
    y, scores = labels(seed, 997), tied(seed, 997, levels=levels)
    assert metrics.auc(scores, y).item() == pytest.approx(roc_auc_score(y, scores), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=2, max_size=30))
@settings(max_examples=200, deadline=None)
def test_auc_is_how_often_a_positive_beats_a_negative_and_half_of_the_ties(rows):
    positive, negative = ([score for label, score in rows if label == kind] for kind in (1, 0))
    y, scores = torch.tensor([label for label, _ in rows]), torch.tensor([float(score) for _, score in rows])
    got = metrics.auc(scores, y).item()
    if not positive or not negative:
        assert math.isnan(got)
    else:
        wins = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
        assert got == pytest.approx(wins / len(positive) / len(negative), abs=1e-12)


def test_auc_judges_many_models_at_once():
    y, scores = labels(1, 200), tied(1, 2, 3, 200, levels=20)
    got = metrics.auc(scores, y)
    assert got.shape == (2, 3)
    assert got.dtype == torch.float64
    assert torch.equal(got[1, 2], metrics.auc(scores[1, 2], y))


def test_auc_does_not_depend_on_the_order_of_rows_or_a_monotone_change():
    y, scores = labels(2, 500), tied(2, 500, levels=30)
    order = torch.from_numpy(np.random.default_rng(3).permutation(500))
    assert torch.equal(metrics.auc(scores[order], y[order]), metrics.auc(scores, y))
    assert torch.equal(metrics.auc(scores.exp(), y), metrics.auc(scores, y))
    assert metrics.auc(-scores, y).item() == pytest.approx(1 - metrics.auc(scores, y).item(), abs=1e-12)


def test_auc_of_single_precision_and_infinite_scores_is_exact():
    y = torch.tensor([1, 1, 0, 0, 0])
    scores = torch.tensor([math.inf, -math.inf, -math.inf, 0.0, 1.0])
    assert metrics.auc(scores, y).item() == (3 + 0.5) / 6


def test_auc_with_a_score_that_is_no_number_is_none_either_and_leaves_other_models_alone():
    y = torch.tensor([1, 0, 0])
    scores = torch.tensor([[math.nan, 0.0, 1.0], [2.0, 0.0, 1.0], [2.0, math.nan, 1.0]])
    assert metrics.auc(scores, y).isnan().tolist() == [True, False, True]


def test_a_rank_counts_those_at_least_as_high():
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    assert metrics.ranks(scores).tolist() == [1, 3, 4, 4]
    assert metrics.ranks(scores[None].expand(5, 4, 4)).shape == (5, 4)


def test_a_constant_model_scores_nothing():
    ranks = metrics.ranks(torch.full((20, 100), 0.7))
    assert metrics.hit_rate(ranks, 99).item() == 0
    assert metrics.ndcg(ranks, 99).item() == 0


@pytest.mark.parametrize(("bad", "rank"), [([math.nan, 1.0, 2.0], 3), ([5.0, math.nan, 2.0], 2), ([math.nan] * 3, 3)])
def test_a_score_that_is_no_number_counts_against_the_positive(bad, rank):
    assert metrics.ranks(torch.tensor([bad])).tolist() == [rank]


def test_hits_and_gains_of_known_ranks():
    ranks = torch.tensor([1, 2, 3, 11])
    assert metrics.hit_rate(ranks, 1).item() == 0.25
    assert metrics.hit_rate(ranks, 10).item() == 0.75
    assert metrics.hit_rate(ranks, 11).item() == 1.0
    assert metrics.ndcg(ranks, 1).item() == 0.25
    assert metrics.ndcg(ranks, 10).item() == pytest.approx((1 + 1 / math.log2(3) + 0.5) / 4, abs=1e-15)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_ndcg_is_scikit_learns_where_nothing_is_tied(k):
    scores = torch.from_numpy(np.random.default_rng(4).normal(size=(50, 30)))
    relevant = np.zeros((50, 30))
    relevant[:, 0] = 1
    got = metrics.ndcg(metrics.ranks(scores), k).item()
    assert got == pytest.approx(ndcg_score(relevant, scores.numpy(), k=k), abs=1e-12)


def test_hits_and_gains_judge_many_models_at_once():
    ranks = torch.from_numpy(np.random.default_rng(5).integers(1, 101, (3, 2, 40)))
    for judge in (metrics.hit_rate, metrics.ndcg):
        got = judge(ranks, 10)
        assert got.shape == (3, 2)
        assert got[2, 1] == judge(ranks[2, 1], 10)


def test_accuracy_is_the_share_of_largest_entries_at_the_label():
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]])
    assert metrics.accuracy(logits, torch.tensor([1, 0])).tolist() == [1.0, 0.5]


def test_a_model_that_ran_away_has_the_share_of_the_first_class() -> None:
    assert metrics.accuracy(torch.full((4, 3), math.nan), torch.tensor([0, 0, 1, 2])).item() == 0.5
