"""What a task's loss and metrics are of."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedeve import metrics, tasks

USERS, CANDIDATES = 7, 20


def ranking(*lead: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.zeros(USERS, CANDIDATES, dtype=torch.int64)
    y[:, 0] = 1
    return torch.randn(*lead, USERS * CANDIDATES, 1, generator=generator), y.reshape(-1)


def test_classes_are_judged_by_cross_entropy_and_accuracy():
    outputs, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    assert torch.equal(tasks.loss("classes", outputs, y), cross_entropy(outputs, y))
    judged = tasks.metrics("classes", outputs, y)
    assert list(judged) == ["accuracy", "loss"]
    assert judged["accuracy"] == metrics.accuracy(outputs, y)


def test_the_ranking_loss_is_the_mean_of_minus_log_probabilities():
    outputs, y = torch.tensor([[2.0], [-1.0], [0.0]]), torch.tensor([1, 0, 0])
    parts = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(-1.0)), math.log(2)]
    assert tasks.loss("ranking", outputs, y).item() == pytest.approx(sum(parts) / 3)


def test_the_ranking_loss_of_a_huge_logit_is_finite():
    assert tasks.loss("ranking", torch.tensor([[1e4], [-1e4]]), torch.tensor([0, 1])).item() == 1e4


def test_ranking_is_judged_by_user_with_the_positive_first():
    outputs, y = ranking()
    judged = tasks.metrics("ranking", outputs, y)
    assert list(judged) == ["auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10", "loss"]
    places = metrics.ranks(outputs.reshape(USERS, CANDIDATES))
    assert judged["auc"] == metrics.auc(outputs[:, 0], y)
    assert judged["hr@5"] == metrics.hit_rate(places, 5)
    assert judged["ndcg@10"] == metrics.ndcg(places, 10)
    assert judged["loss"] == tasks.loss("ranking", outputs.double(), y)


def test_ranking_judges_many_models_at_once():
    outputs, y = ranking(3)
    judged = tasks.metrics("ranking", outputs, y)
    alone = tasks.metrics("ranking", outputs[1], y)
    assert {name: value.shape for name, value in judged.items()} == dict.fromkeys(judged, (3,))
    assert {name: value[1].item() for name, value in judged.items()} == {k: v.item() for k, v in alone.items()}


def test_the_ranking_loss_works_in_lanes():
    outputs, y = ranking(4)
    labels = torch.stack([y.roll(shift) for shift in range(4)])
    got = torch.func.vmap(lambda o, t: tasks.loss("ranking", o, t))(outputs, labels)
    assert torch.allclose(got, torch.stack([tasks.loss("ranking", o, t) for o, t in zip(outputs, labels, strict=True)]))


def test_rows_that_do_not_lie_user_by_user_are_a_mistake_of_ours():
    outputs, y = ranking()
    with pytest.raises(AssertionError, match="positive first"):
        tasks.metrics("ranking", outputs, y.roll(1))


@pytest.mark.parametrize("judge", [tasks.loss, tasks.metrics])
def test_an_unknown_task_is_a_mistake_of_ours(judge):
    with pytest.raises(AssertionError, match="guessing"):
        judge("guessing", *ranking())
