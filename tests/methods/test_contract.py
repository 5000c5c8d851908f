"""The contract: what every method in the folder must fulfil, found by the scan and tested for free."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch

import fedeve.methods
from fedeve import (
    FedAvg,
    FederatedData,
    FedEve,
    FedeveError,
    FedEveParts,
    LocalWork,
    Method,
    Run,
    Scaffold,
    Sent,
    Summary,
    all_methods,
    local,
    seeds,
    simulate,
)
from fedeve.checkpoint import Checkpoint
from fedeve.memory import Memory
from fedeve.settings import describe

METHODS = {name: cls() for name, cls in all_methods().items()}
METHODS |= {"fedeve-released": FedEve(drift="released"), "scaffold-released": Scaffold(control="released")}
METHODS |= {"fedeveparts-apart": FedEveParts(look_ahead=False, gain=0.3)}
WITH_NEUTRAL = [cls for cls in all_methods().values() if cls.neutral is not None]

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
every_class = pytest.mark.parametrize("cls", all_methods().values(), ids=all_methods().keys())
every_device = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

DIM = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Vectors this small are slower on several threads, and far slower where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def replies(method: Method, *shape: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Made-up extras [..., S, D] for a method whose clients send some."""
    return {name: normal(*shape, seed=seed + 1000 + i, dtype=dtype) for i, name in enumerate(method.replies)}


def made_up_summary(method: Method, num_clients: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Summary:
    weights = torch.arange(1.0, num_clients + 1, dtype=torch.float64)
    extras = replies(method, num_clients, DIM, seed=seed, dtype=dtype)
    return Summary.of(normal(num_clients, DIM, seed=seed, dtype=dtype), weights, extras)


def assert_same_state(a, b, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert a._fields == b._fields
    for name in a._fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=rtol, atol=atol)


def lane_of(state, index: int):
    return type(state)(*(tensor[index] for tensor in state))


# A federation of quadratics, 0.5 |w - center_k|^2: gradients without a model, in numbers one can follow.


@dataclasses.dataclass(frozen=True)
class Quadratics:
    centers: torch.Tensor
    work: LocalWork
    cohort: int

    @property
    def optimum(self) -> torch.Tensor:
        return self.centers.mean(0)

    def play(self, method: Method, state, memory: Memory, rounds: range):
        """The states after each of these rounds; the memory is written."""
        states = []
        for round in rounds:
            sent, updates, extras, writes = method.send(state), [], [], {}
            for client in seeds.cohort(len(self.centers), self.cohort, seed=7, round=round).tolist():
                update, extra, writes[client] = self.train(method, client, sent, memory)
                updates.append(update)
                extras.append(extra)
            stacked = {name: torch.stack([extra[name] for extra in extras]) for name in method.replies}
            state, _ = method.step(state, Summary.of(torch.stack(updates), torch.ones(self.cohort), stacked))
            memory.put(writes)
            states.append(state)
        return states

    def train(self, method: Method, client: int, sent: Sent, memory: Memory):
        remembered = memory.get(client)
        correction = method.correction(sent, remembered)
        walk = local.begin(self.work, sent.params)
        for _ in range(self.work.steps):
            grad = walk.params - self.centers[client]
            walk = local.advance(self.work, walk, grad, start=sent.params, correction=correction)
        update = walk.params - sent.params
        return update, *method.finish(update, walk.num_steps, self.work.lr, sent, remembered)


def quadratics(*, scale: float, cohort: int, num_clients: int = 8) -> Quadratics:
    centers = scale * normal(num_clients, DIM, seed=1)
    return Quadratics(centers, LocalWork(lr=0.1, steps=3), cohort)


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


# Through the simulator.


def blobs(sizes: list[int], *, seed: int = 0, dim: int = 4, num_classes: int = 3) -> FederatedData:
    """Clients of these sizes, whose labels follow a linear rule that differs a little from client to client."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), dim))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    rules = rng.normal(size=(dim, num_classes)) + 0.5 * rng.normal(size=(len(sizes), dim, num_classes))
    y = np.einsum("nd,ndc->nc", x, rules[owners]).argmax(-1)
    clients = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return FederatedData.from_arrays(x, y, clients, num_classes=num_classes)


@pytest.mark.parametrize("cls", WITH_NEUTRAL, ids=[cls.__name__.lower() for cls in WITH_NEUTRAL])
def test_neutral_hyper_parameters_are_fedavg(cls):
    data, work = blobs([5, 9, 1, 30, 12, 7]), LocalWork(lr=0.3, batch=4, epochs=2)
    run = Run(method=FedAvg(), data=data, model="linear", rounds=6, cohort=3, dtype="float64", seed=3, local=work)
    fedavg = simulate(run, device="cpu")
    neutral = simulate(dataclasses.replace(run, method=cls(**cls.neutral)), device="cpu")
    torch.testing.assert_close(neutral.params, fedavg.params, rtol=0, atol=1e-9)


def test_every_other_method_differs_from_fedavg_at_its_defaults():
    run = Run(method=FedAvg(), data=blobs([5, 9, 1, 30]), model="linear", rounds=3, cohort=3, dtype="float64", seed=3)
    fedavg = simulate(run, device="cpu").params
    for name, method in METHODS.items():
        moved = (simulate(dataclasses.replace(run, method=method), device="cpu").params - fedavg).abs().max()
        assert (moved > 1e-6) == (name != "fedavg"), name


def plain_client(method: Method, data: FederatedData, run: Run, client: int, round: int, sent: Sent, memory: dict):
    """Local work written once more, with torch's optimiser and a line after `backward`."""
    weight, bias = sent.params.split([12, 3])
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    model.load_state_dict({"weight": weight.reshape(3, 4), "bias": bias})
    start = [param.detach().clone() for param in model.parameters()]
    correction = method.correction(sent, memory)
    shift = torch.zeros_like(sent.params) if correction.shift is None else correction.shift
    shifts = [part.reshape(param.shape) for part, param in zip(shift.split([12, 3]), start, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=run.local.lr)
    x, y = torch.from_numpy(data.x[data.rows(client)]), torch.from_numpy(data.y[data.rows(client)])
    batches = local.plan(run.local, len(y), seed=run.seed, round=round, client=client)
    for batch in batches:
        rows = batch[batch >= 0]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        for param, begun, moved in zip(model.parameters(), start, shifts, strict=True):
            param.grad += correction.prox * (param.detach() - begun) + moved
        optimizer.step()
    end = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    return end - sent.params, len(batches)


@every_method
def test_ragged_local_steps_through_the_simulator_are_the_clients_one_by_one(method):
    sizes = [1, 2, 3, 5, 8, 13, 21, 34, 55, 60]
    data, rounds = blobs(sizes), 3
    run = Run(
        method=method, data=data, model="linear", rounds=rounds, cohort=6, dtype="float64", seed=5,
        local=LocalWork(lr=0.2, batch=8),
    )  # fmt: skip
    record = simulate(run, device="cpu")
    linear = run.build_model()[1]
    params = torch.cat([linear.weight.detach().reshape(-1), linear.bias.detach()])
    state, memories = method.init(params, num_clients=len(sizes)), {}
    for round in range(rounds):
        sent, updates, extras, cohort = method.send(state), [], [], run.cohort_of(round).tolist()
        for client in cohort:
            memory = memories.get(client, {name: torch.zeros_like(params) for name in method.remembers})
            update, num_steps = plain_client(method, data, run, client, round, sent, memory)
            assert num_steps == -(-sizes[client] // 8)
            extra, memories[client] = method.finish(update, num_steps, run.local.lr, sent, memory)
            updates.append(update)
            extras.append(extra)
        weights = torch.tensor([sizes[client] for client in cohort])
        stacked = {name: torch.stack([extra[name] for extra in extras]) for name in method.replies}
        state, _ = method.step(state, Summary.of(torch.stack(updates), weights, stacked))
    torch.testing.assert_close(record.params, state.params, rtol=1e-9, atol=1e-11)
    assert record.lines[-1]["answered"] == [6] * rounds


@every_method
def test_a_cohort_of_one_client_learns_through_the_simulator(method):
    data = blobs([40, 3, 17])
    run = Run(method=method, data=data, model="linear", rounds=4, cohort=1, dtype="float64", seed=2)
    assert torch.isfinite(simulate(run, device="cpu").params).all()


# Convergence. Clients agree on the curvature, so the mean of their centres is where every method has to end.
# The scale is 0.01 because the adaptive servers move a parameter by about `server_lr` (1e-3 by default) a round: from
# two scales away they arrive in some 20 rounds. All others are linear in the scale and do not care.


@every_method
def test_converges_on_a_quadratic_when_all_clients_take_part(method):
    # Three steps at 0.1 take a client 27 % of its way, so plain averaging shrinks the distance by 0.73^200 = 1e-27.
    # What is asked, a factor of 50, leaves room for momentum that rings and for adaptive steps that shrink slowly.
    problem = quadratics(scale=0.01, cohort=8)
    start = problem.optimum + 0.02
    states = problem.play(method, method.init(start, num_clients=8), Memory(method.remembers, like=start), range(200))
    far = (start - problem.optimum).norm()
    for state in states[150:]:
        assert (state.params - problem.optimum).norm() < far / 50


@every_method
def test_converges_on_a_quadratic_on_average_when_half_the_clients_are_sampled(method):
    # The cohort's mean centre has standard deviation 0.01 sqrt((1/4)(1 - 4/8)(8/7)) = 0.0038 per number, a fifth of the
    # 0.02 at the start; over 200 rounds, correlated over about 10, the mean wobbles by a fifth / sqrt(20) = 4 % of it.
    problem = quadratics(scale=0.01, cohort=4)
    start = problem.optimum + 0.02
    states = problem.play(method, method.init(start, num_clients=8), Memory(method.remembers, like=start), range(400))
    far = (start - problem.optimum).norm()
    late = torch.stack([state.params for state in states[200:]]) - problem.optimum
    assert late.mean(0).norm() < far / 15
    assert late.norm(dim=-1).max() < far / 2
