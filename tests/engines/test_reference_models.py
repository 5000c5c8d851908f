"""What a record says of a run of the reference engine, and which models it plays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from referee import CPU, short_run, simulate, turns_of
from torch import nn

from fedeve import (
    FedAvg,
    FedEve,
    FedeveError,
    Layout,
    Record,
    Run,
)
from fedeve import simulate as simulate_anywhere
from fedeve.engines.reference import Reference

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


class Centred(nn.Module):
    """Takes a running mean off its inputs, kept in a buffer or, if it is not `running`, never changed."""

    def __init__(self, *, running: bool):
        super().__init__()
        self.running, self.inner = running, module(nn.Tanh())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training and self.running:
            self.seen = 0.9 * self.seen + 0.1 * x.mean().detach()
        return self.inner(x - self.seen)


@pytest.mark.parametrize("engine", ["reference", "lanes"])
def test_statistics_of_ones_own_are_refused_and_constants_are_not(engine):
    with pytest.raises(FedeveError, match=r"keeps statistics in a buffer.*'seen' changes"):
        simulate(short_run(model=Centred(running=True)), engine=engine)
    simulate(short_run(model=Centred(running=False)), engine=engine)


def test_modules_that_differ_in_anything_are_other_runs():
    tanh, frozen, moved, counted = (module(nn.Tanh()) for _ in range(4))
    for one in (frozen, moved):
        one[1].weight.requires_grad_(False)
    moved[1].weight.data += 1
    counted.register_buffer("counts", torch.ones(2), persistent=False)
    models = [tanh, module(nn.ReLU()), frozen, moved, counted]
    assert len({short_run(model=model).identity() for model in models}) == len(models)
    assert short_run(model=module(nn.Tanh())).identity() == short_run(model=tanh).identity()


@pytest.mark.parametrize("change", [{"method": FedEve}, {"method": "fedeve"}, {"data": None}, {"local": {"lr": 0.1}}])
def test_a_run_of_something_else_is_refused(change):
    (name,) = change
    with pytest.raises(FedeveError, match=f"{name} must be a .*; give an instance"):
        short_run(**change)


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
