"""The contract: what every method in the folder must fulfil, found by the scan and tested for free."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch
from contract import (
    DIM,
    assert_same_state,
    every_class,
    every_device,
    every_dtype,
    every_method,
    lane_of,
    made_up_summary,
    normal,
    quadratics,
    replies,
)

import fedeve.methods
from fedeve import (
    FedeveError,
    LocalWork,
    Method,
    Summary,
    all_methods,
    local,
)
from fedeve.checkpoint import Checkpoint
from fedeve.memory import Memory
from fedeve.settings import describe

# Found and documented.


@every_class
def test_a_method_is_found_under_its_class_name_in_lower_case(cls):
    name = cls.__name__.lower()
    assert all_methods()[name] is cls
    assert cls().name == name


def test_every_public_method_of_the_folder_is_found_under_a_name_of_its_own():
    classes = []
    for info in pkgutil.iter_modules(fedeve.methods.__path__):
        module = importlib.import_module(f"fedeve.methods.{info.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            mine = issubclass(value, Method) and value.__module__ == module.__name__
            if mine and not inspect.isabstract(value) and not name.startswith("_"):
                classes.append(value)
    assert len({cls.__name__.lower() for cls in classes}) == len(classes)
    assert set(classes) == set(all_methods().values())


@every_class
@pytest.mark.parametrize("heading", ["Equations", "What differs from the paper", "Cost", "Reference"])
def test_a_method_is_documented(cls, heading):
    assert heading in (cls.__dict__["__doc__"] or "")


@every_class
def test_every_hyper_parameter_has_a_help_text(cls):
    assert set(describe(cls)) == {field.name for field in dataclasses.fields(cls)}
    assert all(help.strip() for _, help in describe(cls).values())


@every_class
def test_every_field_of_the_state_is_documented(cls):
    state = cls().init(torch.zeros(DIM))
    assert all(f"`{name}`" in type(state).__doc__ for name in state._fields)


@every_method
def test_hyper_parameters_out_of_range_are_refused_at_construction(method):
    for field in dataclasses.fields(method):
        with pytest.raises(FedeveError, match=field.name):
            dataclasses.replace(method, **{field.name: float("nan") if is_number(field) else "no such choice"})


def is_number(field: dataclasses.Field) -> bool:
    return field.type in ("float", float)


# Lanes.


def three_values(method: Method, field: dataclasses.Field) -> list[float]:
    """Three different allowed values of a hyper-parameter, its default first."""
    default, values = field.default, []
    for value in (default, default / 2, 0.3, 0.7, 1.5):
        try:
            dataclasses.replace(method, **{field.name: value})
        except FedeveError:
            continue
        if value not in values:
            values.append(value)
    return values[:3]


def play_made_up(method: Method, params: torch.Tensor, *lanes: int):
    """Three server steps on made-up replies [*lanes, S, D]; the states, facts and starts."""
    state, out = method.init(params, num_clients=20), []
    for round in range(3):
        shape = (*lanes, 4, DIM)
        weights = normal(*shape[:-1], seed=50 + round).abs()
        extras = replies(method, *shape, seed=90 + round)
        state, facts = method.step(state, Summary.of(normal(*shape, seed=10 + round), weights, extras))
        out.append((state, facts, method.send(state)))
    return out


def play_lane(method: Method, params: torch.Tensor, lane: int, num_lanes: int):
    """The same replies as `play_made_up`, but of one lane only."""
    state, out = method.init(params, num_clients=20), []
    for round in range(3):
        shape = (num_lanes, 4, DIM)
        weights = normal(*shape[:-1], seed=50 + round).abs()[lane]
        extras = {name: value[lane] for name, value in replies(method, *shape, seed=90 + round).items()}
        state, facts = method.step(state, Summary.of(normal(*shape, seed=10 + round)[lane], weights, extras))
        out.append((state, facts, method.send(state)))
    return out


def assert_lanes_agree(stacked: Method, singles: list[Method]) -> None:
    num_lanes = len(singles)
    params = normal(num_lanes, DIM, seed=3)
    together = play_made_up(stacked, params, num_lanes)
    for index, single in enumerate(singles):
        alone = play_lane(single, params[index], index, num_lanes)
        for (state, facts, sent), (state_1, facts_1, sent_1) in zip(together, alone, strict=True):
            assert_same_state(lane_of(state, index), state_1, rtol=1e-12, atol=1e-14)
            assert facts.keys() == facts_1.keys()
            for name in facts:
                assert facts[name].shape == (num_lanes,)
                torch.testing.assert_close(facts[name][index], facts_1[name], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(sent.params[index], sent_1.params, rtol=1e-12, atol=1e-14)
            for name in sent.extras:
                torch.testing.assert_close(sent.extras[name][index], sent_1.extras[name], rtol=1e-12, atol=1e-14)


@every_method
def test_lanes_stacked_are_the_runs_one_by_one(method):
    assert_lanes_agree(method, [method] * 3)


@every_method
def test_hyper_parameters_stack_as_lanes_on_the_server(method):
    for field in dataclasses.fields(method):
        if not is_number(field):
            continue
        values = three_values(method, field)
        assert len(values) == 3
        stacked = dataclasses.replace(method, **{field.name: torch.tensor(values, dtype=torch.float64)})
        assert_lanes_agree(stacked, [dataclasses.replace(method, **{field.name: value}) for value in values])


@every_method
def test_hyper_parameters_stack_as_lanes_on_the_client(method):
    fields = [field for field in dataclasses.fields(method) if is_number(field)]
    values = {field.name: three_values(method, field) for field in fields}
    stacked = dataclasses.replace(method, **{n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()})
    together = walk_client(stacked, slice(None))
    for index in range(3):
        single = dataclasses.replace(method, **{name: value[index] for name, value in values.items()})
        alone = walk_client(single, index)
        assert together.keys() == alone.keys()
        for name in alone:
            torch.testing.assert_close(together[name][index], alone[name], rtol=1e-12, atol=1e-14)


def walk_client(method: Method, lanes: int | slice) -> dict[str, torch.Tensor]:
    """A client's local work and finish in these of three lanes, at a different number of steps told to each."""
    work, num_steps = LocalWork(lr=0.1), torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64)[lanes]
    state = method.init(normal(3, DIM, seed=4)[lanes], num_clients=20)
    summary = Summary.of(
        normal(3, 4, DIM, seed=5)[lanes],
        normal(3, 4, seed=6).abs()[lanes],
        {name: value[lanes] for name, value in replies(method, 3, 4, DIM, seed=7).items()},
    )
    state, _ = method.step(state, summary)
    sent = method.send(state)
    memory = {name: normal(3, DIM, seed=8)[lanes] for name in method.remembers}
    correction, walk = method.correction(sent, memory), local.begin(work, sent.params)
    for step in range(4):
        grad = normal(3, DIM, seed=20 + step)[lanes]
        walk = local.advance(work, walk, grad, start=sent.params, correction=correction)
    update = walk.params - sent.params
    extras, remember = method.finish(update, num_steps, work.lr, sent, memory)
    assert set(extras) == set(method.replies)
    assert set(remember) == set(method.remembers)
    return {
        "params": walk.params,
        **{f"extras.{n}": v for n, v in extras.items()},
        **{f"memory.{n}": v for n, v in remember.items()},
    }


# Order and grouping.


@every_method
@pytest.mark.parametrize("seed", range(5))
def test_order_and_grouping_of_replies_do_not_matter(method, seed):
    num_clients = 9
    updates, weights = normal(num_clients, DIM, seed=seed), normal(num_clients, seed=seed + 1).abs()
    extras = replies(method, num_clients, DIM, seed=seed)
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(num_clients))
    cuts = np.sort(rng.choice(np.arange(1, num_clients), size=3, replace=False)).tolist()
    groups = torch.tensor_split(order, cuts)
    parts = [Summary.of(updates[g], weights[g], {n: v[g] for n, v in extras.items()}) for g in groups]
    first, rest = parts[0].merge(parts[1]), parts[2].merge(parts[3])
    state = after_one_step(method)
    at_once, facts = method.step(state, Summary.of(updates, weights, extras))
    grouped, facts_grouped = method.step(state, rest.merge(first))
    assert_same_state(at_once, grouped, rtol=1e-9, atol=1e-12)
    for name in facts:
        torch.testing.assert_close(facts[name], facts_grouped[name], rtol=1e-9, atol=1e-12)


def after_one_step(method: Method, *, dtype: torch.dtype = torch.float64, device: str = "cpu"):
    """A state in which nothing is at its start any more."""
    state = method.init(normal(DIM, seed=11, dtype=dtype).to(device), num_clients=20)
    return method.step(state, to_device(made_up_summary(method, 3, seed=12, dtype=dtype), device))[0]


def to_device(summary: Summary, device: str) -> Summary:
    fields = {f.name: getattr(summary, f.name) for f in dataclasses.fields(summary) if f.name != "extras"}
    moved = {name: tensor.to(device) for name, tensor in fields.items()}
    return Summary(**moved, extras={name: tensor.to(device) for name, tensor in summary.extras.items()})


# Purity, dtype, device, cohort of one.


@every_method
def test_a_step_changes_neither_the_state_nor_the_summary_it_was_given(method):
    state, summary = after_one_step(method), made_up_summary(method, 4, seed=13)
    old_state, old_summary = type(state)(*(tensor.clone() for tensor in state)), to_device(clone(summary), "cpu")
    first, facts = method.step(state, summary)
    again, facts_again = method.step(state, summary)
    assert_same_state(state, old_state)
    assert_same_state(first, again)
    assert facts == facts_again
    for field in ("count", "weight", "mean", "center", "scatter"):
        assert torch.equal(getattr(summary, field), getattr(old_summary, field))
    assert all(torch.equal(summary.extras[name], old_summary.extras[name]) for name in method.replies)


def clone(summary: Summary) -> Summary:
    fields = {f.name: getattr(summary, f.name).clone() for f in dataclasses.fields(summary) if f.name != "extras"}
    return Summary(**fields, extras={name: tensor.clone() for name, tensor in summary.extras.items()})


@every_method
def test_what_a_client_does_changes_nothing_it_was_given(method):
    sent = method.send(after_one_step(method))
    memory = {name: normal(DIM, seed=14) for name in method.remembers}
    update = normal(DIM, seed=15)
    given = {"params": sent.params, "update": update, **sent.extras, **{f"my {n}": v for n, v in memory.items()}}
    before = {name: tensor.clone() for name, tensor in given.items()}
    local.advance(
        LocalWork(), local.begin(LocalWork(), sent.params), update, start=sent.params,
        correction=method.correction(sent, memory),
    )  # fmt: skip
    method.finish(update, 3, 0.1, sent, memory)
    assert all(torch.equal(given[name], before[name]) for name in given)


@every_method
@every_dtype
@every_device
def test_dtype_and_device_are_kept(method, dtype, device):
    start = method.init(normal(DIM, seed=11, dtype=dtype).to(device), num_clients=20)
    state, facts = method.step(
        after_one_step(method, dtype=dtype, device=device), to_device(made_up_summary(method, 3, seed=16), device)
    )
    for name in start._fields:
        before, after = getattr(start, name), getattr(state, name)
        assert after.dtype == before.dtype == (dtype if before.ndim else torch.float64), name
        assert after.device.type == before.device.type == device
        assert after.shape == before.shape
    assert all(fact.dtype == torch.float64 and fact.device.type == device and not fact.ndim for fact in facts.values())
    sent = method.send(state)
    memory = {name: torch.zeros(DIM, dtype=dtype, device=device) for name in method.remembers}
    walk = local.advance(
        LocalWork(), local.begin(LocalWork(), sent.params), sent.params, start=sent.params,
        correction=method.correction(sent, memory),
    )  # fmt: skip
    extras, remember = method.finish(walk.params - sent.params, 1, 0.01, sent, memory)
    for vector in (sent.params, walk.params, *sent.extras.values(), *extras.values(), *remember.values()):
        assert vector.dtype == dtype
        assert vector.device.type == device


@every_method
def test_updates_of_another_shape_are_refused(method):
    state = method.init(torch.zeros(DIM + 1))
    with pytest.raises(FedeveError, match="do not fit the model"):
        method.step(state, made_up_summary(method, 3, seed=17))


@every_method
def test_a_cohort_of_one_counts_whatever_its_weight_is(method):
    state, update = after_one_step(method), normal(1, DIM, seed=18)
    extras = replies(method, 1, DIM, seed=19)
    light, facts = method.step(state, Summary.of(update, torch.tensor([1.0]), extras))
    heavy, _ = method.step(state, Summary.of(update, torch.tensor([1e6]), extras))
    assert_same_state(light, heavy)
    assert all(torch.isfinite(tensor).all() for tensor in light)
    assert all(torch.isfinite(fact) for fact in facts.values())
    assert not torch.equal(light.params, state.params)


@every_method
def test_a_cohort_that_did_not_move_leaves_finite_numbers(method):
    extras = {name: torch.zeros(4, DIM) for name in method.replies}
    summary = Summary.of(torch.zeros(4, DIM), torch.ones(4), extras)
    params = normal(DIM, seed=21)
    state, facts = method.step(method.init(params, num_clients=20), summary)
    assert torch.equal(state.params, params)
    assert all(torch.isfinite(fact) for fact in facts.values())


# Save, load, continue.


@every_method
@every_dtype
def test_save_load_continue_is_never_stopped(method, dtype, tmp_path):
    problem = quadratics(scale=1.0, cohort=3)
    problem = dataclasses.replace(problem, centers=problem.centers.to(dtype))
    start = torch.ones(DIM, dtype=dtype)
    memory = Memory(method.remembers, like=start)
    whole = problem.play(method, method.init(start, num_clients=8), memory, range(6))[-1]

    other_memory = Memory(method.remembers, like=start)
    half = problem.play(method, method.init(start, num_clients=8), other_memory, range(3))[-1]
    tensors = {f"state.{n}": t for n, t in half._asdict().items()}
    tensors |= {f"memory.{n}": t for n, t in other_memory.tensors().items()}
    Checkpoint(tensors, {"num_rounds": 3}).save(tmp_path / "checkpoint", identity="contract")

    found = Checkpoint.load(tmp_path / "checkpoint", identity="contract")
    loaded = type(half)(*(found.tensors[f"state.{name}"] for name in half._fields))
    new_memory = Memory(method.remembers, like=start)
    new_memory.load({n.removeprefix("memory."): t for n, t in found.tensors.items() if n.startswith("memory.")})
    resumed = problem.play(method, loaded, new_memory, range(found.values["num_rounds"], 6))[-1]

    assert_same_state(resumed, whole)
    for client in range(8):
        for name in method.remembers:
            assert torch.equal(new_memory.get(client)[name], memory.get(client)[name])
