"""The reference engine does, client by client, what the specification says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedeve import (
    FedAvg,
    FedDyn,
    FederatedData,
    FedEve,
    FedeveError,
    Layout,
    LocalWork,
    Record,
    Run,
    Scaffold,
    Summary,
    local,
)
from fedeve import simulate as simulate_anywhere
from fedeve.engines.reference import Reference
from fedeve.memory import Memory

CPU = torch.device("cpu")
SIZES = [5, 9, 1, 30, 12, 7]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As `simulate` does by itself: the order of sums, so the last bits, may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simulate(run: Run, **options) -> Record:
    return simulate_anywhere(run, engine="reference", device="cpu", **options)


def blobs(sizes: list[int] = SIZES, *, seed: int = 0, num_test: int = 50) -> FederatedData:
    """Three linearly separable classes in four dimensions, dealt to clients of these sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes) + num_test, 4))
    y = (x @ rng.normal(size=(4, 3))).argmax(-1)
    clients = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    train, test = slice(0, sum(sizes)), slice(sum(sizes), None)
    return FederatedData.from_arrays(x[train], y[train], clients, x_test=x[test], y_test=y[test], num_classes=3)


def short_run(**changes) -> Run:
    options = {
        "method": FedAvg(), "data": blobs(), "model": "linear", "rounds": 4, "cohort": 3, "dtype": "float64", "seed": 1,
        "local": LocalWork(lr=0.2, batch=4),
    }  # fmt: skip
    return Run(**(options | changes))


def turns_of(run: Run, num_rounds: int | None = None):
    """The engine's turns, with what clients remember put back as its caller must."""
    learner = Reference(run, CPU)
    memory = Memory(run.method.remembers, like=learner.start)
    state, turns = run.method.init(learner.start, num_clients=run.data.num_clients), []
    for turn in learner.play(state, memory, 0):
        memory.put(turn.writes)
        turns.append(turn)
        if len(turns) == num_rounds:
            break
    return turns


def logits_of(params: torch.Tensor, x: np.ndarray) -> torch.Tensor:
    weight, bias = params[:12].reshape(3, 4), params[12:]
    return torch.from_numpy(x) @ weight.T + bias


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


# The record's words.


def test_final_is_the_mean_over_the_evaluations_of_the_last_rounds():
    record = simulate(short_run(rounds=9, eval_every=2))
    losses = record.metric("loss")
    assert record.evaluated.tolist() == [2, 4, 6, 8, 9]
    assert record.final("loss") == pytest.approx(losses.mean())
    assert record.final("loss", last=1) == losses[-1]
    assert record.final("loss", last=3) == pytest.approx(losses[-2:].mean())
    assert record.final("loss", last=4) == pytest.approx(losses[-3:].mean())


def test_final_leaves_out_what_lies_more_than_a_hundred_rounds_back():
    lines = [{"round": r, "accuracy": float(r), "facts": {}, "answered": [1]} for r in range(1, 151)]
    assert Record({}, lines).final("accuracy") == pytest.approx(np.mean(range(51, 151)))


def test_facts_are_those_the_method_gave_in_every_round():
    run = short_run(method=FedEve(), eval_every=3)
    record, turns = simulate(run), turns_of(run)
    for name in ("gain", "period_drift", "client_drift", "variance"):
        assert record.facts(name).tolist() == [turn.facts[name] for turn in turns]
    assert record.facts("gain").dtype == np.float64


def test_unknown_names_are_refused_with_the_known_ones():
    record = simulate(short_run(method=FedEve()))
    with pytest.raises(FedeveError, match=r"no metric 'auc'.*accuracy.*loss"):
        record.metric("auc")
    with pytest.raises(FedeveError, match=r"no metric 'auc'"):
        record.final("auc")
    with pytest.raises(FedeveError, match=r"no fact 'gian'.*client_drift.*gain"):
        record.facts("gian")
    with pytest.raises(FedeveError, match="no fact 'gain'"):
        simulate(short_run(watch_drift=False)).facts("gain")


@pytest.mark.parametrize("name", ["facts", "answered"])
def test_bookkeeping_is_no_metric(name):
    record = simulate(short_run(method=FedEve()))
    with pytest.raises(FedeveError, match=f"no metric '{name}'"):
        record.metric(name)


def test_a_record_without_evaluations_has_no_final_value():
    with pytest.raises(FedeveError, match="nothing was evaluated"):
        Record({}).final("accuracy")


# Models.


def module(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), *layers, nn.Linear(8, 3))


def test_a_module_starts_from_its_own_weights_and_keeps_them():
    model = module(nn.Tanh()).double()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    run = short_run(model=model)
    assert torch.equal(Reference(run, CPU).start, before)
    record = simulate(run)
    assert not torch.equal(record.params, before)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    assert torch.equal(simulate(run).params, record.params)


def test_a_module_like_a_named_model_gives_its_numbers():
    named = short_run()
    assert torch.equal(simulate(short_run(model=named.build_model())).params, simulate(named).params)


def test_a_float64_run_does_not_change_the_module_it_was_given():
    model = module(nn.Tanh())
    simulate(short_run(model=model, dtype="float64"))
    assert all(param.dtype == torch.float32 for param in model.parameters())


def test_a_float64_run_of_a_module_is_the_same_run_before_and_after_it_was_played():
    run = short_run(model=module(nn.Tanh()), dtype="float64")
    before = run.identity()
    assert simulate(run).header["identity"] == before
    assert run.identity() == before


def test_batch_normalisation_is_refused_when_the_run_is_made():
    with pytest.raises(FedeveError, match=r"running statistics.*BatchNorm1d"):
        short_run(model=module(nn.BatchNorm1d(8)))


def test_a_module_with_dropout_layers_is_reproducible_and_drops():
    run = short_run(model=module(nn.ReLU(), nn.Dropout(0.5)))
    torch.manual_seed(0)
    first = simulate(run)
    torch.manual_seed(1)
    torch.rand(100)
    second = simulate(run)
    assert torch.equal(first.params, second.params)
    assert first.lines == second.lines
    undropped = simulate(short_run(model=module(nn.ReLU(), nn.Dropout(0.0))))
    assert not torch.equal(first.params, undropped.params)


def test_dropout_layers_rest_during_evaluation():
    run = short_run(model=module(nn.ReLU(), nn.Dropout(0.5)))
    learner = Reference(run, CPU)
    assert learner.evaluate(learner.start) == learner.evaluate(learner.start)


def test_dropout_layers_of_a_client_do_not_depend_on_who_else_takes_part():
    run = short_run(model=module(nn.ReLU(), nn.Dropout(0.5)))
    learner = Reference(run, CPU)
    sent = run.method.send(run.method.init(learner.start))
    alone = learner.train(3, 0, sent, {})[0]
    learner.train(1, 0, sent, {})
    assert torch.equal(learner.train(3, 0, sent, {})[0], alone)
    assert not torch.equal(learner.train(3, 1, sent, {})[0], alone)


def test_a_simulation_leaves_the_callers_random_numbers_alone():
    run = short_run(model=module(nn.Dropout(0.5)))
    torch.manual_seed(7)
    np.random.seed(7)
    expected = torch.rand(3).tolist(), np.random.rand(3).tolist()
    torch.manual_seed(7)
    np.random.seed(7)
    simulate(run)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_have_the_dtype_of_the_run(dtype):
    assert simulate(short_run(dtype=dtype, method=FedEve())).params.dtype == getattr(torch, dtype)


def test_float32_is_float64_up_to_rounding():
    single, double = simulate(short_run(dtype="float32")), simulate(short_run(dtype="float64"))
    torch.testing.assert_close(single.params.double(), double.params, rtol=1e-3, atol=1e-3)


def test_an_unknown_engine_is_refused_with_advice():
    with pytest.raises(FedeveError, match=r"unknown engine.*did you mean 'reference'\?"):
        simulate_anywhere(short_run(), engine="refrence")


def test_frozen_parameters_stay_as_they_were_and_the_rest_is_trained(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10))
    model[1].requires_grad_(False)
    record = simulate(Run(method=FedAvg(), data=digits, model=model, rounds=2, cohort=3))
    assert record.params.shape == (16 * 10 + 10,)
    assert not torch.equal(record.params, Layout.of(model).flatten(dict(model.named_parameters())))


def test_a_model_that_does_not_fit_the_data_is_refused_before_the_first_round(digits):
    with pytest.raises(FedeveError, match="cannot read this data"):
        simulate(Run(method=FedAvg(), data=digits, model=nn.Linear(63, 10), rounds=1, cohort=3))
    with pytest.raises(FedeveError, match="fewer outputs than there are classes: got 9; give it 10 outputs"):
        few = nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
        simulate(Run(method=FedAvg(), data=digits, model=few, rounds=1, cohort=3))
