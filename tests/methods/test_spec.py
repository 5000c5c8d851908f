"""Server methods against their written specification: rounds of server and clients, corrections, whole runs by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from oracles import (
    CASES,
    CPU,
    Case,
    Facts,
    FedEveOracle,
    Oracle,
    Vec,
    assert_close,
    assert_same_facts,
    each_case,
    examples,
    softmax_gradient,
    summarised,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedeve import (
    FederatedData,
    FedProx,
    Layout,
    LocalWork,
    Run,
    Scaffold,
    datasets,
    simulate,
)
from fedeve.engines.reference import Reference
from fedeve.local import corrected, plan
from fedeve.memory import Memory
from fedeve.method import Vectors


@pytest.fixture(scope="module")
def digits() -> FederatedData:
    return datasets.load("digits", num_clients=30, alpha=0.5)


class Reply(NamedTuple):
    client: int
    update: Vec
    weight: float
    num_steps: int


def replies(rng: np.random.Generator, num_clients: int, dim: int) -> list[Reply]:
    """A random cohort's random work: any size, unequal weights (some zero), updates around a common direction."""
    size = int(rng.integers(1, num_clients + 1))
    cohort = rng.choice(num_clients, size=size, replace=False)
    weights = rng.integers(1, 200, size=size) * (rng.random(size) > 0.25)
    weights[rng.integers(size)] = rng.integers(1, 200)
    common, noise = rng.normal(size=dim), 10.0 ** rng.uniform(-3, 1.5)
    updates = 0.1 * (0.5 + common + noise * rng.normal(size=(size, dim)))
    if rng.random() < 0.3:
        updates[:, -1] = 0.0  # a parameter that nobody moved
    steps = rng.integers(1, 30, size=size)
    return [Reply(int(k), u, float(w), int(n)) for k, u, w, n in zip(cohort, updates, weights, steps, strict=True)]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["at-once", "one-by-one"])
@each_case
def test_a_method_follows_the_specification_for_fifty_rounds(case: Case, one_by_one: bool) -> None:
    num_clients, dim, lr = 9, 7, 0.05
    rng = np.random.default_rng(20240511)
    first = rng.normal(size=dim)
    method, oracle = case.method, case.oracle(first, num_clients)
    params = torch.from_numpy(first.copy())
    state = method.init(params, num_clients=num_clients)
    nothing: Vectors = {name: torch.zeros(dim, dtype=torch.float64) for name in method.remembers}
    memories = dict.fromkeys(range(num_clients), nothing)
    for _ in range(50):
        sent, start = method.send(state), oracle.start()
        assert_close(sent.params, start)
        cohort, extras = replies(rng, num_clients, dim), []
        for reply in cohort:
            grad, here = rng.normal(size=dim), start + rng.normal(size=dim)
            correction = method.correction(sent, memories[reply.client])
            actual = corrected(torch.from_numpy(grad), torch.from_numpy(here), sent.params, correction)
            assert_close(actual, oracle.corrected(reply.client, grad, here, start))
            update = torch.from_numpy(reply.update)
            extra, memories[reply.client] = method.finish(update, reply.num_steps, lr, sent, memories[reply.client])
            assert set(extra) == set(method.replies)
            assert set(memories[reply.client]) == set(method.remembers)
            extras.append(extra)
            oracle.finish(reply.client, reply.update, reply.num_steps, lr)
        weights = [reply.weight for reply in cohort]
        updates = [torch.from_numpy(reply.update) for reply in cohort]
        state, facts = method.step(state, summarised(updates, weights, extras, one_by_one=one_by_one))
        assert_same_facts(facts, oracle.step([reply.update for reply in cohort], weights))
        assert_close(state.params, oracle.w)
    assert np.array_equal(params.numpy(), first), "the caller's parameters were written to"


def test_fedeve_measures_interesting_gains_in_these_rounds() -> None:
    rng = np.random.default_rng(20240511)
    oracle = FedEveOracle(rng.normal(size=7), 9)
    gains = []
    for _ in range(50):
        cohort = replies(rng, 9, 7)
        gains.append(oracle.step([r.update for r in cohort], [r.weight for r in cohort])["gain"])
    assert min(gains) < 0.2
    assert max(gains) == 1.0
    assert sum(0.2 < gain < 0.9 for gain in gains) >= 10


@pytest.mark.parametrize("control", ["paper", "released"])
def test_a_scaffold_client_without_steps_keeps_its_control_variate(control: str) -> None:
    method = Scaffold(control=control)
    rng = np.random.default_rng(3)
    state = method.init(torch.zeros(4, dtype=torch.float64), num_clients=5)
    update, old = torch.from_numpy(rng.normal(size=4)), {"control": torch.from_numpy(rng.normal(size=4))}
    extras, _ = method.finish(update, 3, 0.1, method.send(state), old)
    state, _ = method.step(state, summarised([update], [2.0], [extras], one_by_one=False))
    extras, new = method.finish(torch.zeros(4, dtype=torch.float64), 0, 0.1, method.send(state), old)
    assert torch.equal(new["control"], old["control"])
    assert torch.isfinite(extras["control"]).all()


@pytest.mark.parametrize("mu", [0.01, 1.0, 7.5])
def test_fedprox_corrects_to_the_gradient_of_the_proximal_loss(mu: float) -> None:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    layout = Layout.of(model)
    x, y = random(11, 6), torch.randint(3, (11,), generator=generator)
    start = random(layout.num_params)
    here = (start + 0.3 * random(layout.num_params)).requires_grad_()
    loss = cross_entropy(torch.func.functional_call(model, layout.unflatten(here), (x,)), y)
    (grad,) = torch.autograd.grad(loss, here, retain_graph=True)
    (expected,) = torch.autograd.grad(loss + mu / 2 * ((here - start) ** 2).sum(), here)
    method = FedProx(mu=mu)
    sent = method.send(method.init(start))
    actual = corrected(grad, here.detach(), sent.params, method.correction(sent, {}))
    assert_close(actual, expected.numpy(), rel=1e-13)


@pytest.mark.parametrize("control", ["paper", "released"])
def test_one_full_batch_scaffold_step_leaves_the_full_gradient_as_control_variate(
    digits: FederatedData, control: str
) -> None:
    work = LocalWork(lr=0.2, batch=int(digits.sizes.max()), epochs=1)
    method = Scaffold(control=control, server_lr=0.8)
    run = Run(method=method, data=digits, model="linear", rounds=4, cohort=20, local=work, seed=11, dtype="float64")
    learner = Reference(run, CPU)
    memory = Memory(method.remembers, like=learner.start)
    state = method.init(learner.start, num_clients=digits.num_clients)
    seen: set[int] = set()
    for turn in learner.play(state, memory, 0):
        start = method.send(state).params.numpy()
        assert len(turn.writes) == 20
        for client, remembered in turn.writes.items():
            assert_close(remembered["control"], softmax_gradient(start, *examples(digits, client)))
        memory.put(turn.writes)
        state = turn.state
        seen |= set(turn.writes)
    assert len(seen) < 4 * 20, "no client came twice"


def train_by_hand(run: Run, oracle: Oracle, client: int, round: int) -> tuple[Vec, int]:
    """One client's local work on softmax regression: its update and its steps."""
    work = run.local
    x, y = examples(run.data, client)
    start = oracle.start()
    w, num_steps = start.copy(), 0
    buffer, first, second = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for batch in plan(work, len(y), seed=run.seed, round=round, client=client):
        rows = [int(row) for row in batch if row >= 0]
        grad = oracle.corrected(client, softmax_gradient(w, x[rows], y[rows]), w, start)
        num_steps += 1
        if work.optimizer == "adam":  # Kingma & Ba 2015, with their constants
            first = 0.9 * first + 0.1 * grad
            second = 0.999 * second + 0.001 * grad**2
            w = w - work.lr * (first / (1 - 0.9**num_steps)) / (np.sqrt(second / (1 - 0.999**num_steps)) + 1e-8)
        else:
            buffer = work.momentum * buffer + grad
            w = w - work.lr * buffer
    return w - start, num_steps


def run_by_hand(run: Run, make_oracle: Callable[[Vec, int], Oracle]) -> tuple[Vec, list[Facts]]:
    """The final parameters of a run and its facts, without the library's methods, engines or gradients."""
    first = np.concatenate([param.detach().numpy().reshape(-1) for param in run.build_model().parameters()])
    oracle, facts = make_oracle(first, run.data.num_clients), []
    for round in range(run.rounds):
        updates, weights = [], []
        for client in run.cohort_of(round).tolist():
            update, num_steps = train_by_hand(run, oracle, client, round)
            oracle.finish(client, update, num_steps, run.local.lr)
            updates.append(update)
            weights.append(float(run.data.offsets[client + 1] - run.data.offsets[client]))
        assert sum(weights) > 0
        facts.append(oracle.step(updates, weights))
    return oracle.w, facts


SGD = LocalWork(lr=0.1, batch=20, epochs=2)
ADAM = LocalWork(lr=0.01, batch=10, epochs=1, optimizer="adam")
RUNS = {
    "fedeve": ("fedeve", SGD),
    "fedeve-tuned": ("fedeve-tuned", SGD),
    "fedeve-released": ("fedeve-released", SGD),
    "fedeve-adam": ("fedeve", ADAM),
    "fedavg-adam": ("fedavg", ADAM),
    "fedavg-momentum": ("fedavg-tuned", LocalWork(lr=0.05, batch=16, steps=5, momentum=0.9)),
    "fedprox": ("fedprox", SGD),
    "scaffold": ("scaffold", SGD),
    "scaffold-tuned": ("scaffold-tuned", SGD),
    "scaffold-released": ("scaffold-released", SGD),
    "feddyn": ("feddyn-tuned", SGD),
    "fedeveadam": ("fedeveadam", SGD),
    "fedeveprox": ("fedeveprox-tuned", SGD),
    "fedeveprox-adam": ("fedeveprox", ADAM),
    "fedeveparts": ("fedeveparts-apart-tuned", SGD),
}


@pytest.mark.parametrize(("name", "work"), RUNS.values(), ids=RUNS.keys())
def test_a_whole_run_equals_one_derived_by_hand(digits: FederatedData, name: str, work: LocalWork) -> None:
    case = CASES[name]
    run = Run(method=case.method, data=digits, model="linear", rounds=5, cohort=8, local=work, seed=7, dtype="float64")
    record = simulate(run, engine="reference", device="cpu")
    params, facts = run_by_hand(run, case.oracle)
    assert record.params.dtype == torch.float64
    assert_close(record.params, params)
    for fact in facts[0]:
        np.testing.assert_allclose(record.facts(fact), [each[fact] for each in facts], rtol=1e-9)
    assert len(np.unique(np.concatenate([run.cohort_of(round) for round in range(5)]))) < 5 * 8


@pytest.mark.parametrize("name", ["fedeve", "fedavg", "scaffold", "scaffold-released", "feddyn-tuned"])
def test_empty_clients_that_are_kept_return_their_start_with_weight_zero(name: str) -> None:
    data = datasets.load("digits", num_clients=30, alpha=0.01)
    case = CASES[name]
    run = Run(
        method=case.method, data=data, model="linear", rounds=5, cohort=10, local=SGD, seed=1, empty="keep",
        dtype="float64",
    )  # fmt: skip
    drawn = np.concatenate([run.cohort_of(round) for round in range(5)])
    assert (data.sizes[drawn] == 0).sum() >= 10
    record = simulate(run, engine="reference", device="cpu")
    params, facts = run_by_hand(run, case.oracle)
    assert_close(record.params, params)
    for fact in facts[0]:
        np.testing.assert_allclose(record.facts(fact), [each[fact] for each in facts], rtol=1e-9)
