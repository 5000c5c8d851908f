"""The reference engine does, client by client, what the specification says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from referee import CPU, SIZES, blobs, logits_of, short_run, simulate, turns_of
from torch import nn
from torch.nn.functional import cross_entropy

from fedeve import (
    FedAvg,
    FedDyn,
    FederatedData,
    FedEve,
    FedeveError,
    LocalWork,
    Run,
    Scaffold,
    Summary,
    local,
)
from fedeve import simulate as simulate_anywhere
from fedeve.engines.reference import Reference

# Cohorts and replies.


@pytest.mark.parametrize("method", [Scaffold(), FedDyn()])
def test_those_who_train_are_the_cohort_the_run_names(method):
    run = short_run(method=method, rounds=6)
    for round, turn in enumerate(turns_of(run)):
        assert list(turn.writes) == run.cohort_of(round).tolist()
        assert turn.answered == 3
        assert turn.num_rounds == round + 1


def test_a_round_is_send_train_summarise_in_cohort_order_and_step_to_the_last_bit():
    run = short_run(method=FedEve(), cohort=6)
    learner = Reference(run, CPU)
    state = run.method.init(learner.start, num_clients=6)
    for round in range(run.rounds):
        sent = run.method.send(state)
        parts = []
        for client in run.cohort_of(round).tolist():
            update, _ = learner.train(client, round, sent, {})
            parts.append(Summary.of(update[None], torch.tensor([float(SIZES[client])])))
        state, _ = run.method.step(state, Summary.merged(parts))
    assert torch.equal(simulate(run).params, state.params)


def test_the_same_run_gives_the_same_record_and_another_seed_another():
    assert simulate(short_run()).lines == simulate(short_run()).lines
    assert torch.equal(simulate(short_run()).params, simulate(short_run()).params)
    assert not torch.equal(simulate(short_run()).params, simulate(short_run(seed=2)).params)


def test_several_runs_give_the_records_of_each():
    runs = [short_run(), short_run(method=FedEve()), short_run(seed=9)]
    together = simulate_anywhere(runs, engine="reference", device="cpu")
    assert [record.lines for record in together] == [simulate(run).lines for run in runs]


def test_one_client_with_all_the_data_is_plain_training():
    data = blobs([40])
    run = short_run(data=data, cohort=1, rounds=3, local=LocalWork(lr=0.2, batch=8, epochs=2, momentum=0.5))
    model = run.build_model()
    for round in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
        for batch in local.plan(run.local, 40, seed=run.seed, round=round, client=0):
            x, y = torch.from_numpy(data.x[batch[batch >= 0]]), torch.from_numpy(data.y[batch[batch >= 0]])
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    by_torch = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(simulate(run).params, by_torch, rtol=1e-12, atol=1e-12)


def test_averages_are_weighted_by_examples():
    run = short_run(cohort=6, rounds=1)
    learner = Reference(run, CPU)
    sent = run.method.send(run.method.init(learner.start))
    updates = [learner.train(client, 0, sent, {})[0] for client in range(6)]
    by_hand = sum(size * update for size, update in zip(SIZES, updates, strict=True)) / sum(SIZES)
    torch.testing.assert_close(simulate(run).params - learner.start, by_hand, rtol=1e-10, atol=1e-12)


def test_training_lowers_the_loss_and_raises_the_accuracy():
    run = short_run(data=blobs([40] * 6), rounds=40, eval_every=1)
    record = simulate(run)
    assert record.metric("loss")[-1] < 0.5 * record.metric("loss")[0]
    assert record.metric("accuracy")[-1] > 0.85


# Empty clients.


def with_empty() -> FederatedData:
    return blobs([5, 0, 9, 0, 0, 4])


def test_empty_clients_are_never_sampled_unless_kept():
    run = short_run(data=with_empty(), rounds=30)
    drawn = {client for round in range(30) for client in run.cohort_of(round).tolist()}
    assert drawn == {0, 2, 5}


def test_kept_empty_clients_are_sampled_like_all_others():
    run = short_run(data=with_empty(), empty="keep", rounds=60)
    drawn = np.bincount(np.concatenate([run.cohort_of(round) for round in range(60)]), minlength=6)
    assert drawn.min() > 15


def test_a_kept_empty_client_returns_its_start_with_weight_zero():
    run = short_run(data=with_empty(), empty="keep", cohort=6, method=Scaffold())
    learner = Reference(run, CPU)
    sent = run.method.send(run.method.init(learner.start, num_clients=6))
    update, num_steps = learner.train(1, 0, sent, {"control": torch.ones_like(learner.start)})
    assert num_steps == 0
    assert not update.any()
    assert learner.summarise(len(run.data.rows(1)), update, {}).weight == 0


def test_kept_empty_clients_leave_the_average_as_it_is_and_count_in_the_cohort():
    kept = short_run(data=with_empty(), empty="keep", cohort=6)
    skipped = short_run(data=with_empty(), cohort=3)
    torch.testing.assert_close(simulate(kept).params, simulate(skipped).params, rtol=1e-10, atol=1e-12)
    assert simulate(kept).lines[-1]["answered"] == [6] * 4
    assert simulate(skipped).lines[-1]["answered"] == [3] * 4


def test_kept_empty_clients_count_in_fedeves_drifts():
    # Q has S in its denominator and the first round's u is the same, so twice the cohort halves it.
    kept = simulate(short_run(data=with_empty(), empty="keep", cohort=6, method=FedEve()))
    skipped = simulate(short_run(data=with_empty(), cohort=3, method=FedEve()))
    assert kept.facts("period_drift")[0] == pytest.approx(skipped.facts("period_drift")[0] / 2, rel=1e-9)


@pytest.mark.parametrize("method", [FedAvg(), FedEve(), Scaffold()])
def test_a_cohort_of_empty_clients_leaves_the_state_as_it_was(method):
    run = short_run(data=blobs([5, 0, 0, 0]), empty="keep", cohort=1, method=method, rounds=12)
    turns = turns_of(run)
    drawn = [run.cohort_of(round)[0] == 0 for round in range(12)]
    assert 0 < sum(drawn[1:]) < 11
    for (before, after), has_data in zip(itertools.pairwise(turns), drawn[1:], strict=True):
        same = all(torch.equal(a, b) for a, b in zip(before.state, after.state, strict=True))
        assert same != has_data
        assert (after.facts is None) != has_data


def test_a_cohort_larger_than_the_clients_with_data_is_refused():
    with pytest.raises(FedeveError, match="larger than the 3 clients with data"):
        short_run(data=with_empty(), cohort=4)
    with pytest.raises(FedeveError, match="larger than the 6 clients"):
        short_run(data=with_empty(), cohort=7, empty="keep")


# Dropout.


@pytest.mark.parametrize("method", [FedAvg(), FedEve(), Scaffold(), FedDyn()])
def test_when_everybody_drops_out_every_round_is_lost_and_nothing_changes(method):
    run = short_run(dropout=1.0, method=method, eval_every=2)
    record, start = simulate(run), Reference(run, CPU).start
    assert torch.equal(record.params, start)
    assert record.lost == [1, 2, 3, 4]
    assert [line["answered"] for line in record.lines] == [[0, 0], [0, 0]]
    for turn in turns_of(run):
        assert turn.facts is None
        assert not turn.writes
        assert all(torch.equal(a, b) for a, b in zip(turn.state, method.init(start, num_clients=6), strict=True))
    assert np.ptp(record.metric("loss")) == 0


def test_those_who_drop_out_are_those_the_run_names():
    run = short_run(dropout=0.5, cohort=5, rounds=10, method=Scaffold())
    for round, turn in enumerate(turns_of(run)):
        silent = run.silent_in(round)
        assert list(turn.writes) == [client for client in run.cohort_of(round).tolist() if client not in silent]
        assert turn.answered == 5 - len(silent)


def test_a_lost_round_has_no_facts_and_the_others_keep_theirs():
    run = short_run(dropout=0.6, cohort=2, rounds=20, method=FedEve(), eval_every=7)
    record = simulate(run)
    lost = [round + 1 for round in range(20) if len(run.silent_in(round)) == 2]
    assert 0 < len(lost) < 20
    assert record.lost == lost
    gains = record.facts("gain")
    assert len(gains) == 20
    assert (np.flatnonzero(np.isnan(gains)) + 1).tolist() == lost


# Updates that are not finite.


def with_silent_client(method) -> tuple[Run, int]:
    """A run of two rounds in which exactly one client, the same in both, drops out."""
    for seed in range(2000):
        run = short_run(method=method, cohort=6, rounds=2, dropout=0.2, seed=seed)
        first, second = run.silent_in(0), run.silent_in(1)
        if len(first) == 1 and first == second and first != {2}:
            return run, first.pop()
    raise AssertionError("no such seed")


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("method", [FedAvg(), FedEve(), Scaffold(), FedDyn()])
def test_a_client_whose_update_is_not_finite_is_left_out_as_if_it_had_dropped_out(method, poison):
    dropped, client = with_silent_client(method)
    x = dropped.data.x.copy()
    x[dropped.data.rows(client)[0]] = poison
    poisoned = dataclasses.replace(dropped, data=dataclasses.replace(dropped.data, x=x), dropout=0.0)
    record, expected = simulate(poisoned), simulate(dropped)
    assert torch.equal(record.params, expected.params)
    assert torch.isfinite(record.params).all()
    assert record.left_out == {1: [client], 2: [client]}
    assert expected.left_out == {}
    assert record.lost == []
    without = [{key: value for key, value in line.items() if key != "left_out"} for line in record.lines]
    assert without == expected.lines
    assert record.lines[-1]["answered"] == [5, 5]
    assert all(client not in turn.writes for turn in turns_of(poisoned))


def test_a_round_of_updates_that_are_not_finite_is_lost():
    data = blobs([5, 9])
    run = short_run(data=dataclasses.replace(data, x=np.full_like(data.x, np.nan)), cohort=2, method=FedEve())
    record = simulate(run)
    assert record.lost == [1, 2, 3, 4]
    assert {round: sorted(clients) for round, clients in record.left_out.items()} == {r: [0, 1] for r in range(1, 5)}
    assert torch.equal(record.params, Reference(run, CPU).start)


# Evaluation.


@pytest.mark.parametrize(
    ("rounds", "eval_every", "expected"),
    [(7, 3, [3, 6, 7]), (6, 3, [3, 6]), (3, 10, [3]), (3, 1, [1, 2, 3]), (1, 1, [1])],
)
def test_the_model_is_evaluated_every_so_many_rounds_and_after_the_last(rounds, eval_every, expected):
    record = simulate(short_run(rounds=rounds, eval_every=eval_every, method=FedEve()))
    assert record.evaluated.tolist() == expected
    assert len(record.metric("accuracy")) == len(expected)
    assert len(record.facts("gain")) == rounds


def test_how_often_is_evaluated_changes_no_number():
    often, seldom = simulate(short_run(eval_every=1, method=FedEve())), simulate(short_run(method=FedEve()))
    assert torch.equal(often.params, seldom.params)
    assert often.lines[-1]["loss"] == seldom.lines[-1]["loss"]
    assert often.facts("gain").tolist() == seldom.facts("gain").tolist()


@pytest.mark.parametrize("num_test", [1, 50, 1000, 1001, 2500])
def test_accuracy_and_loss_are_those_of_the_whole_test_set(num_test):
    run = short_run(data=blobs(num_test=num_test), rounds=2)
    record = simulate(run)
    logits, y = logits_of(record.params, run.data.x_test), torch.from_numpy(run.data.y_test)
    assert record.metric("accuracy")[-1] == (logits.argmax(-1) == y).double().mean().item()
    assert record.metric("loss")[-1] == pytest.approx(cross_entropy(logits, y).item(), rel=1e-12)


def test_without_a_test_set_nothing_is_evaluated_but_the_run_goes_on():
    record = simulate(short_run(data=blobs(num_test=0), method=FedEve()))
    assert record.metrics == []
    assert len(record.facts("gain")) == 4
    with pytest.raises(FedeveError, match="no metric 'accuracy'"):
        record.final("accuracy")
