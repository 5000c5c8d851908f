"""Traces are the gradients of the run they follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedeve import FedAvg, FederatedData, FedeveError, simulate
from fedeve.drift.objectives import ModelObjective
from fedeve.drift.traces import Trace, some_clients, trace_standing, trace_training


def test_a_trace_follows_training_and_its_parts_add_up(small_run: Any, digits: FederatedData) -> None:
    run = small_run(method=FedAvg(), dtype="float64", rounds=3, eval_every=1, cohort=4)
    trace = trace_training(run)
    objective = ModelObjective(digits, "linear", seed=run.seed)
    params = objective.start
    for round in range(3):
        full = objective.on_rows(digits.order, params)[1].numpy()
        np.testing.assert_allclose(trace.full[round], full, rtol=1e-4, atol=1e-6)
        cohort = [int(np.searchsorted(objective.clients, k)) for k in run.cohort_of(round)]
        grads = np.stack([objective.loss_and_gradient(k, params)[1].numpy() for k in cohort])
        np.testing.assert_allclose(trace.period[round], grads.mean(0) - full, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(trace.client[round], grads[0] - grads.mean(0), rtol=1e-4, atol=1e-6)
        assert np.abs(trace.batch[round]).max() > 0
        params = simulate(small_run(method=FedAvg(), dtype="float64", rounds=round + 1, cohort=4)).params


def test_standing_cohorts_are_right_on_average_and_a_cohort_of_all_never_drifts(digits: FederatedData) -> None:
    objective = ModelObjective(some_clients(digits, 8), "linear", dtype="float32")
    trace = trace_standing(objective, rounds=30, cohort=3)
    assert trace.period.shape == trace.batch.shape == (30, 650)
    assert np.ptp(trace.full, axis=0).max() == 0
    grads = np.stack([objective.loss_and_gradient(k, objective.start)[1].numpy() for k in range(8)])
    everybody = trace_standing(objective, rounds=3, cohort=8)
    np.testing.assert_allclose(everybody.period[0], grads.mean(0) - everybody.full[0], atol=1e-5)
    assert np.ptp(everybody.period, axis=0).max() < 1e-6 and np.abs(everybody.batch).max() < 1e-5


def test_some_clients_are_a_federation_of_their_own(digits: FederatedData) -> None:
    few = some_clients(digits, 5, examples=7, seed=1)
    assert few.num_clients == 5 and few.sizes.max() <= 7 and few.sizes.min() >= 1
    owners = [set(digits.rows(k).tolist()) for k in range(digits.num_clients)]
    assert all(any(set(few.rows(k).tolist()) <= owner for owner in owners) for k in range(5))
    assert some_clients(digits, 10**6).num_clients == len(digits.with_data)
    assert few.fingerprint == some_clients(digits, 5, examples=7, seed=1).fingerprint != digits.fingerprint


def test_parameters_are_picked_among_those_that_move() -> None:
    moving = np.zeros((4, 6), dtype=np.float32)
    moving[2, [1, 4]] = 1.0
    trace = Trace(moving, moving, moving, moving)
    assert trace.pick(10).tolist() == [1, 4] and len(trace.pick(1)) == 1
    with pytest.raises(FedeveError, match="no parameter's gradient ever moves"):
        Trace(*(np.zeros((4, 6), dtype=np.float32),) * 4).pick(1)


def test_rounds_without_data_leave_no_trace_and_too_many_numbers_are_refused(small_run: Any) -> None:
    lonely = FederatedData.from_arrays(np.zeros((2, 4), np.float32), [0, 1], [[0, 1], [], [], []], num_classes=2)
    run = small_run(method=FedAvg(), data=lonely, empty="keep", cohort=1, rounds=12)
    present = sum(0 in run.cohort_of(round) for round in range(12))
    assert 0 < present < 12 and len(trace_training(run).period) == present
    objective = ModelObjective(lonely, "linear")
    with pytest.raises(FedeveError, match="do not fit into memory"):
        trace_standing(objective, torch.zeros(10), rounds=10**9, cohort=1)
