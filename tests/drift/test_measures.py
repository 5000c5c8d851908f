"""Definition 1: on quadratics the closed forms, on models all cohorts one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedeve import FederatedData, FedeveError
from fedeve.drift.cohorts import factor
from fedeve.drift.measures import client_drift, gradient_variance, gradients, period_drift
from fedeve.drift.objectives import ModelObjective, Quadratics, minimise

RNG = np.random.default_rng(1)
WEIGHTS = np.array([3, 1, 8, 2, 2, 5, 13, 1])


def quadratics(count: int = 8, dim: int = 4) -> Quadratics:
    rng = np.random.default_rng(2)
    half = rng.normal(size=(count, dim, dim))
    curvatures = half @ half.transpose(0, 2, 1) + np.eye(dim)
    return Quadratics(centres=rng.normal(size=(count, dim)), curvatures=curvatures, weights=WEIGHTS[:count])


def blobs(sizes: list[int], *, one_class: bool = False) -> FederatedData:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(sum(sizes), 3))
    y = np.zeros(sum(sizes), dtype=int) if one_class else rng.integers(0, 2, sum(sizes))
    return FederatedData.from_arrays(x, y, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), num_classes=2)


def linear(data: FederatedData) -> ModelObjective:
    torch.manual_seed(0)
    return ModelObjective(data, nn.Linear(3, 2))


def test_period_drift_on_quadratics_is_its_closed_form() -> None:
    objective, where = quadratics(), torch.ones(4, dtype=torch.float64)
    grads = np.stack([(objective.curvatures[k] @ (where - objective.centres[k])).numpy() for k in range(8)])
    full = (WEIGHTS[:, None] * grads).sum(0) / WEIGHTS.sum()
    by_hand = np.mean([((grads[list(s)].mean(0) - full) ** 2).sum() for s in itertools.combinations(range(8), 3)])
    found = period_drift(objective, where, size=3)
    assert found.value == pytest.approx(by_hand, rel=1e-9)
    assert found.how == "closed form" and found.cost == 8 and found.num_clients == 8
    assert found.bias == pytest.approx(((grads.mean(0) - full) ** 2).sum(), rel=1e-9)
    assert period_drift(objective, where, size=8).value == pytest.approx(found.bias, rel=1e-9)  # all that is left then
    assert gradient_variance(objective, where) * factor(8, 3) == pytest.approx(
        period_drift(objective, where, size=3, average="plain").value, rel=1e-9
    )


@pytest.mark.parametrize("average", ["definition", "plain", "examples"])
def test_period_drift_of_a_model_is_the_mean_over_all_cohorts(average: str) -> None:
    sizes = [4, 1, 7, 2, 9, 3, 3, 5]
    data = blobs(sizes)
    objective = linear(data)
    model = nn.Linear(3, 2).double()
    model.load_state_dict(objective.model.state_dict())
    grads = []
    for client in range(8):
        rows = data.rows(client)
        loss = cross_entropy(model(torch.from_numpy(data.x[rows])), torch.from_numpy(data.y[rows]))
        grads.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]).numpy())
    vectors, n = np.stack(grads), np.array(sizes, dtype=float)
    full = (n[:, None] * vectors).sum(0) / n.sum() if average != "plain" else vectors.mean(0)
    distances = []
    for cohort in map(list, itertools.combinations(range(8), 3)):
        share = n[cohort] if average == "examples" else np.ones(3)
        distances.append((((share[:, None] * vectors[cohort]).sum(0) / share.sum() - full) ** 2).sum())
    found = period_drift(objective, size=3, average=average)
    assert found.value == pytest.approx(np.mean(distances), rel=1e-9)
    np.testing.assert_allclose(gradients(objective, objective.start), vectors, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("average", ["plain", "definition"])
def test_a_sample_of_clients_is_right_on_average_and_knows_its_error(average: str) -> None:
    rng = np.random.default_rng(5)
    objective = Quadratics(centres=rng.normal(size=(60, 3)), weights=np.exp(0.7 * rng.normal(size=60)))
    for size in (5, 40):
        exact = period_drift(objective, size=size, average=average).value
        found = [period_drift(objective, size=size, average=average, max_clients=30, seed=seed) for seed in range(100)]
        values = np.array([one.value for one in found])
        assert values.mean() == pytest.approx(exact, abs=3 * values.std() / math.sqrt(100))
        # Its error is that of a sample from endlessly many: half of all clients seen know more than that.
        assert 0.7 * values.std() < np.mean([one.error for one in found]) < 3 * values.std()
    assert found[0].cost == 30 and not found[0].exact and found[0].num_clients == 60 and found[0].bias is None
    assert period_drift(objective, size=5, average=average, max_clients=99).exact


def test_samples_that_say_nothing_are_refused() -> None:
    objective = Quadratics(centres=np.eye(4))
    with pytest.raises(FedeveError, match="needs two clients"):
        period_drift(objective, size=2, max_clients=1)
    with pytest.raises(FedeveError, match="sample of clients is for averages with a closed form: got 'examples'"):
        period_drift(objective, size=2, average="examples", max_clients=3)
    for wrong in ({"max_steps": 0}, {"num_cohorts": 0}, {"num_cohorts": -1}):
        with pytest.raises(FedeveError, match="must be at least 1"):
            client_drift(objective, size=2, **wrong)


def test_client_drift_on_quadratics_is_its_closed_form_over_all_cohorts() -> None:
    objective = quadratics()
    values = []
    for cohort in itertools.combinations(range(8), 3):
        best = objective.optimum(cohort)
        values.append(
            np.mean([float((objective.curvatures[k] @ (best - objective.centres[k])).square().sum()) for k in cohort])
        )
    found = client_drift(objective, size=3, tolerance=1e-11)
    assert found.value == pytest.approx(np.mean(values), rel=1e-9)
    assert found.exact and found.num_cohorts == 56 and found.num_optima == 64
    weighted = client_drift(objective, size=8, tolerance=1e-11, average="examples")
    best = objective.optimum(range(8), WEIGHTS)
    by_hand = [float((objective.curvatures[k] @ (best - objective.centres[k])).square().sum()) for k in range(8)]
    assert weighted.value == pytest.approx(np.mean(by_hand), rel=1e-9)


def test_client_drift_over_drawn_cohorts_is_near_that_over_all() -> None:
    objective = quadratics()
    exact = client_drift(objective, size=3, tolerance=1e-6)
    drawn = client_drift(objective, size=3, tolerance=1e-6, num_cohorts=40)
    assert drawn.how == "sampled" and drawn.num_cohorts == 40 and drawn.cost > 0
    assert abs(drawn.value - exact.value) < 4 * drawn.error


def test_clients_that_agree_have_no_client_drift_and_a_cohort_of_one_neither() -> None:
    same = Quadratics(centres=np.ones((4, 3)))
    assert client_drift(same, size=2, tolerance=1e-9).value == pytest.approx(0, abs=1e-12)
    assert client_drift(quadratics(), size=1, tolerance=1e-3).value == 0.0


def test_an_optimum_is_reached_to_the_tolerance_or_said_not_to_be() -> None:
    objective = quadratics()
    far = minimise(objective, [0, 1], [1.0, 3.0], start=objective.start, tolerance=1e-9)
    assert far.reached and far.norm <= 1e-9 * far.start_norm
    torch.testing.assert_close(far.params, objective.optimum([0, 1], [1.0, 3.0]), rtol=1e-7, atol=1e-7)
    # One example pulls its logits to infinity: there is no optimum, but any tolerance is met on the way.
    alone = linear(blobs([1]))
    assert minimise(alone, [0], [1.0], start=alone.start, tolerance=1e-2).reached
    short = minimise(alone, [0], [1.0], start=alone.start, tolerance=1e-12, max_steps=1)
    assert not short.reached and short.norm < short.start_norm
    found = client_drift(alone, size=1, tolerance=1e-12, max_steps=1)
    assert found.num_reached == 0 and found.num_optima == 1
    with pytest.raises(FedeveError, match="between 0 and 1"):
        minimise(objective, [0], [1.0], start=objective.start, tolerance=0.0)


def test_clients_with_one_example_one_class_or_nothing_are_measured() -> None:
    objective = linear(blobs([1, 0, 5, 0, 3], one_class=True))
    assert objective.clients.tolist() == [0, 2, 4] and objective.weights.tolist() == [1.0, 5.0, 3.0]
    for size in (1, 3):
        assert math.isfinite(period_drift(objective, size=size).value)
    assert period_drift(objective, size=3, average="plain").value == 0.0
    assert client_drift(objective, size=2, tolerance=0.1).num_clients == 3
    with pytest.raises(FedeveError, match="1 to 3, the number of clients with data"):
        period_drift(objective, size=4)
    with pytest.raises(FedeveError, match="1 to 3"):
        client_drift(objective, size=4)
    nobody = FederatedData.from_arrays(np.zeros((1, 3)), [0], [[], []], num_classes=2)
    with pytest.raises(FedeveError, match="nobody has data"):
        linear(nobody)


def test_a_bad_average_and_too_many_gradients_are_refused() -> None:
    with pytest.raises(FedeveError, match="unknown average for client drift"):
        client_drift(quadratics(), size=2, average="definition")
    large = quadratics()
    large.weights = np.broadcast_to(1.0, 10**9)  # takes no memory
    with pytest.raises(FedeveError, match="do not fit into memory"):
        gradients(large, large.start)


def test_progress_is_told_client_by_client() -> None:
    seen: list[int] = []
    period_drift(quadratics(), size=3, tell=seen.append)
    assert seen == list(range(1, 9))
