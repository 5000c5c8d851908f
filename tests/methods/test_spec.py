"""Server methods against their written specification, re-stated here as plain numpy loops in float64.

Nothing of `fedeve.methods` is used to compute an expected value: the oracles below are the specification's own lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedeve import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FederatedData,
    FedEve,
    FedEveAdam,
    FedeveError,
    FedEveParts,
    FedProx,
    FedYogi,
    Layout,
    LocalWork,
    Method,
    Run,
    Scaffold,
    Summary,
    datasets,
    simulate,
)
from fedeve.engines.reference import Reference
from fedeve.local import corrected, plan
from fedeve.memory import Memory
from fedeve.method import Vectors
from fedeve.methods import kalman

Vec = NDArray[np.float64]
Facts = dict[str, float]
EPS = float(np.finfo(np.float64).eps)
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# The specification, in numpy. A client's part is `corrected` and `finish`, the server's `start` and `step`.


def weighted_mean(updates: list[Vec], weights: list[float]) -> Vec:
    """`u = sum_k p_k u_k`, `p_k = n_k / sum n`."""
    u = np.zeros_like(updates[0])
    for update, weight in zip(updates, weights, strict=True):
        u += weight / sum(weights) * update
    return u


def plain_mean(vectors: list[Vec]) -> Vec:
    total = np.zeros_like(vectors[0])
    for vector in vectors:
        total += vector
    return total / len(vectors)


def squared_norm(vector: Vec) -> float:
    return sum(float(value) ** 2 for value in vector)


class Oracle:
    """What all methods share: the server sends its parameters, clients correct nothing and remember nothing."""

    def __init__(self, w: Vec, num_clients: int) -> None:
        self.w, self.d, self.num_clients = w.copy(), len(w), num_clients

    def start(self) -> Vec:
        return self.w.copy()

    def corrected(self, client: int, grad: Vec, w: Vec, start: Vec) -> Vec:
        return grad

    def finish(self, client: int, update: Vec, num_steps: int, lr: float) -> None:
        pass

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        raise NotImplementedError


class FedAvgOracle(Oracle):
    def __init__(self, w: Vec, num_clients: int, server_lr: float = 1.0) -> None:
        super().__init__(w, num_clients)
        self.server_lr = server_lr

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        self.w = self.w + self.server_lr * weighted_mean(updates, weights)
        return {}


class FedProxOracle(FedAvgOracle):
    def __init__(self, w: Vec, num_clients: int, server_lr: float = 1.0, mu: float = 1.0) -> None:
        super().__init__(w, num_clients, server_lr)
        self.mu = mu

    def corrected(self, client: int, grad: Vec, w: Vec, start: Vec) -> Vec:
        return grad + self.mu * (w - start)


class FedAvgMOracle(Oracle):
    def __init__(self, w: Vec, num_clients: int, server_lr: float = 1.0, beta: float = 0.9) -> None:
        super().__init__(w, num_clients)
        self.server_lr, self.beta, self.M = server_lr, beta, np.zeros_like(w)

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        self.M = self.beta * self.M + (1 - self.beta) * weighted_mean(updates, weights)
        self.w = self.w + self.server_lr * self.M
        return {}


class ScaffoldOracle(Oracle):
    """Option II. The released code puts the cohort's mean control variate in the place of c."""

    def __init__(self, w: Vec, num_clients: int, server_lr: float = 1.0, control: str = "paper") -> None:
        super().__init__(w, num_clients)
        self.server_lr, self.control = server_lr, control
        self.c = np.zeros_like(w)
        self.c_of = {client: np.zeros_like(w) for client in range(num_clients)}
        self.changes: list[Vec] = []
        self.controls: list[Vec] = []

    def corrected(self, client: int, grad: Vec, w: Vec, start: Vec) -> Vec:
        return grad + self.c - self.c_of[client]

    def finish(self, client: int, update: Vec, num_steps: int, lr: float) -> None:
        old = self.c_of[client]
        # A client without data took no step: nothing new is known of its gradient.
        new = old - self.c + (-update) / (num_steps * lr) if num_steps else old
        self.c_of[client] = new
        self.changes.append(new - old)
        self.controls.append(new)

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        self.w = self.w + self.server_lr * weighted_mean(updates, weights)
        if self.control == "paper":
            self.c = self.c + len(updates) / self.num_clients * plain_mean(self.changes)
        else:
            self.c = plain_mean(self.controls)
        self.changes, self.controls = [], []
        return {}


class FedOptOracle(Oracle):
    """FedAdam, FedYogi and FedAdagrad differ in one line."""

    def __init__(
        self, w: Vec, num_clients: int, kind: str, server_lr: float, beta1: float, tau: float, beta2: float = math.nan
    ) -> None:
        super().__init__(w, num_clients)
        self.kind, self.server_lr, self.b1, self.b2, self.tau = kind, server_lr, beta1, beta2, tau
        self.m, self.s = np.zeros_like(w), np.zeros_like(w)

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        u = weighted_mean(updates, weights)
        for i in range(self.d):
            self.m[i] = self.b1 * self.m[i] + (1 - self.b1) * u[i]
            if self.kind == "adam":
                self.s[i] = self.b2 * self.s[i] + (1 - self.b2) * u[i] ** 2
            elif self.kind == "yogi":
                self.s[i] = self.s[i] - (1 - self.b2) * u[i] ** 2 * np.sign(self.s[i] - u[i] ** 2)
            else:
                self.s[i] = self.s[i] + u[i] ** 2
            self.w[i] = self.w[i] + self.server_lr * self.m[i] / (math.sqrt(self.s[i]) + self.tau)
        return {}


class FedEveOracle(Oracle):
    def __init__(self, w: Vec, num_clients: int, server_lr: float = 1.0, drift: str = "paper") -> None:
        super().__init__(w, num_clients)
        self.lr_g, self.drift, self.M, self.v = server_lr, drift, np.zeros_like(w), 0.0

    def start(self) -> Vec:
        return self.w + self.lr_g * self.M

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        S, d = len(updates), self.d  # noqa: N806
        u = weighted_mean(updates, weights)
        if self.drift == "paper":
            Q = squared_norm(self.M - u) / (S * d)  # noqa: N806
            middle = u
        else:
            Q = squared_norm(u) / (S * d)  # noqa: N806
            middle = plain_mean(updates)
        R = sum(squared_norm(u_k - middle) for u_k in updates) / (S**2 * d)  # noqa: N806
        v_hat = self.v + Q
        G = v_hat / (v_hat + R) if v_hat + R > 0 else 1.0  # noqa: N806
        self.M = self.M + G * (u - self.M)
        self.w = self.w + self.lr_g * self.M
        self.v = (1 - G) * v_hat
        return {"gain": G, "period_drift": Q, "client_drift": R}


class FedEveAdamOracle(FedEveOracle):
    """FedEve's filter; every step along M, also the look-ahead, is divided by the root of s plus tau."""

    def __init__(self, w: Vec, num_clients: int, server_lr: float, beta2: float, tau: float) -> None:
        super().__init__(w, num_clients)
        self.rate, self.b2, self.tau, self.s = server_lr, beta2, tau, np.zeros_like(w)

    def start(self) -> Vec:
        return self.w + self.rate * self.M / (np.sqrt(self.s) + self.tau)

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        before, u = self.w.copy(), weighted_mean(updates, weights)
        facts = super().step(updates, weights)
        self.s = self.b2 * self.s + (1 - self.b2) * u**2
        self.w = before
        self.w = self.start()
        return facts


class FedEveLayersOracle(Oracle):
    """A FedEve of its own for every block of parameters."""

    def __init__(self, w: Vec, num_clients: int, sizes: list[int], server_lr: float, drift: str) -> None:
        super().__init__(w, num_clients)
        self.cuts = list(np.cumsum(sizes)[:-1])
        self.blocks = [FedEveOracle(part, num_clients, server_lr, drift) for part in np.split(w, self.cuts)]

    def start(self) -> Vec:
        return np.concatenate([block.start() for block in self.blocks])

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        facts = [
            block.step([np.split(update, self.cuts)[i] for update in updates], weights)
            for i, block in enumerate(self.blocks)
        ]
        self.w = np.concatenate([block.w for block in self.blocks])
        return {name: sum(b.d * f[name] for b, f in zip(self.blocks, facts, strict=True)) / self.d for name in facts[0]}


class FedEveApartOracle(FedAvgMOracle):
    """A fixed gain: with the look-ahead, momentum that clients start from."""

    def __init__(self, w: Vec, num_clients: int, server_lr: float, gain: float, look_ahead: bool) -> None:
        super().__init__(w, num_clients, server_lr, 1 - gain)
        self.look_ahead = look_ahead

    def start(self) -> Vec:
        return self.w + self.server_lr * self.M * self.look_ahead


class FedDynOracle(Oracle):
    """Acar et al. 2021."""

    def __init__(self, w: Vec, num_clients: int, alpha: float = 0.01) -> None:
        super().__init__(w, num_clients)
        self.alpha, self.h = alpha, np.zeros_like(w)
        self.g_of = {client: np.zeros_like(w) for client in range(num_clients)}

    def corrected(self, client: int, grad: Vec, w: Vec, start: Vec) -> Vec:
        return grad - self.g_of[client] + self.alpha * (w - start)

    def finish(self, client: int, update: Vec, num_steps: int, lr: float) -> None:
        self.g_of[client] = self.g_of[client] - self.alpha * update

    def step(self, updates: list[Vec], weights: list[float]) -> Facts:
        u = plain_mean(updates)
        self.h = self.h - self.alpha * (len(updates) / self.num_clients) * u
        self.w = self.w + u - self.h / self.alpha
        return {}


class Case(NamedTuple):
    """A method of the library, and the oracle it has to follow."""

    method: Method
    oracle: Callable[[Vec, int], Oracle]


# The oracles' values are written out: the library's defaults are part of what is checked.
CASES: dict[str, Case] = {
    "fedavg": Case(FedAvg(), lambda w, n: FedAvgOracle(w, n, 1.0)),
    "fedavg-tuned": Case(FedAvg(server_lr=0.7), lambda w, n: FedAvgOracle(w, n, 0.7)),
    "fedavgm": Case(FedAvgM(), lambda w, n: FedAvgMOracle(w, n, 1.0, 0.9)),
    "fedavgm-tuned": Case(FedAvgM(server_lr=1.6, beta=0.35), lambda w, n: FedAvgMOracle(w, n, 1.6, 0.35)),
    "fedprox": Case(FedProx(), lambda w, n: FedProxOracle(w, n, 1.0, 1.0)),
    "fedprox-tuned": Case(FedProx(server_lr=0.4, mu=0.01), lambda w, n: FedProxOracle(w, n, 0.4, 0.01)),
    "scaffold": Case(Scaffold(), lambda w, n: ScaffoldOracle(w, n, 1.0, "paper")),
    "scaffold-tuned": Case(Scaffold(server_lr=0.3), lambda w, n: ScaffoldOracle(w, n, 0.3, "paper")),
    "scaffold-released": Case(Scaffold(control="released"), lambda w, n: ScaffoldOracle(w, n, 1.0, "released")),
    "scaffold-released-tuned": Case(
        Scaffold(control="released", server_lr=1.3), lambda w, n: ScaffoldOracle(w, n, 1.3, "released")
    ),
    "fedadam": Case(FedAdam(), lambda w, n: FedOptOracle(w, n, "adam", 1e-3, 0.9, 1e-4, 0.99)),
    "fedadam-tuned": Case(
        FedAdam(server_lr=0.05, beta1=0.5, beta2=0.8, tau=3e-2),
        lambda w, n: FedOptOracle(w, n, "adam", 0.05, 0.5, 3e-2, 0.8),
    ),
    "fedyogi": Case(
        FedYogi(server_lr=1e-3, beta1=0.9, beta2=0.99, tau=1e-4),
        lambda w, n: FedOptOracle(w, n, "yogi", 1e-3, 0.9, 1e-4, 0.99),
    ),
    "fedyogi-tuned": Case(
        FedYogi(server_lr=0.2, beta1=0.3, beta2=0.6, tau=1e-2),
        lambda w, n: FedOptOracle(w, n, "yogi", 0.2, 0.3, 1e-2, 0.6),
    ),
    "fedadagrad": Case(
        FedAdagrad(server_lr=0.01, tau=1e-4), lambda w, n: FedOptOracle(w, n, "adagrad", 0.01, 0.0, 1e-4)
    ),
    "fedadagrad-tuned": Case(
        FedAdagrad(server_lr=0.3, beta1=0.6, tau=1e-2), lambda w, n: FedOptOracle(w, n, "adagrad", 0.3, 0.6, 1e-2)
    ),
    "fedeve": Case(FedEve(), lambda w, n: FedEveOracle(w, n, 1.0, "paper")),
    "fedeve-tuned": Case(FedEve(server_lr=0.6), lambda w, n: FedEveOracle(w, n, 0.6, "paper")),
    "fedeve-released": Case(FedEve(drift="released"), lambda w, n: FedEveOracle(w, n, 1.0, "released")),
    "fedeve-released-tuned": Case(
        FedEve(drift="released", server_lr=1.4), lambda w, n: FedEveOracle(w, n, 1.4, "released")
    ),
    "fedeveadam": Case(FedEveAdam(), lambda w, n: FedEveAdamOracle(w, n, 1e-3, 0.99, 1e-4)),
    "fedeveadam-tuned": Case(
        FedEveAdam(server_lr=0.05, beta2=0.8, tau=3e-2), lambda w, n: FedEveAdamOracle(w, n, 0.05, 0.8, 3e-2)
    ),
    "fedeveparts": Case(FedEveParts(), lambda w, n: FedEveOracle(w, n, 1.0, "paper")),
    "fedeveparts-gain-tuned": Case(
        FedEveParts(server_lr=1.2, gain=0.4), lambda w, n: FedEveApartOracle(w, n, 1.2, 0.4, True)
    ),
    "fedeveparts-apart-tuned": Case(
        FedEveParts(server_lr=1.2, gain=0.4, look_ahead=False), lambda w, n: FedEveApartOracle(w, n, 1.2, 0.4, False)
    ),
    "fedeveparts-layers-tuned": Case(
        FedEveParts(server_lr=0.6, layers="3,1,3"), lambda w, n: FedEveLayersOracle(w, n, [3, 1, 3], 0.6, "paper")
    ),
    "fedeveparts-layers-released-tuned": Case(
        FedEveParts(layers="2,5", drift="released"), lambda w, n: FedEveLayersOracle(w, n, [2, 5], 1.0, "released")
    ),
    "feddyn": Case(FedDyn(), lambda w, n: FedDynOracle(w, n, 0.01)),
    "feddyn-tuned": Case(FedDyn(alpha=0.7), lambda w, n: FedDynOracle(w, n, 0.7)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# One of each, variants included.
METHODS = {name: case.method for name, case in CASES.items() if not name.endswith("-tuned")}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def assert_close(actual: Tensor | Vec, expected: Vec, *, rel: float = 1e-9) -> None:
    """Equal to `rel` of the largest entry."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rel * float(np.abs(expected).max(initial=0)))


def assert_same_facts(actual: dict[str, Tensor], expected: Facts) -> None:
    for name, value in expected.items():
        assert float(actual[name]) == pytest.approx(value, rel=1e-9, abs=1e-300), name


def summarised(updates: list[Tensor], weights: list[float], extras: Sequence[Vectors], *, one_by_one: bool) -> Summary:
    names = list(extras[0])
    if one_by_one:
        replies = zip(updates, weights, extras, strict=True)
        return Summary.merged(
            Summary.of(u[None], torch.tensor([w], dtype=torch.float64), {n: e[n][None] for n in names})
            for u, w, e in replies
        )
    stacked = {name: torch.stack([extra[name] for extra in extras]) for name in names}
    return Summary.of(torch.stack(updates), torch.tensor(weights, dtype=torch.float64), stacked)


# ---------------------------------------------------------------------------------------------------------------------
# 1. Fifty rounds of every method, server and clients.


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


# ---------------------------------------------------------------------------------------------------------------------
# 2. and 3. What a client's correction means.


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


def softmax_gradient(w: Vec, x: Vec, y: NDArray[np.int64]) -> Vec:
    """The gradient of the mean cross-entropy of a linear model, in the order weight [classes, inputs], bias."""
    inputs = x.shape[1]
    classes = len(w) // (inputs + 1)
    weight, bias = w[: classes * inputs].reshape(classes, inputs), w[classes * inputs :]
    logits = x @ weight.T + bias
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    grad_weight, grad_bias = shares.T @ x / len(y), shares.mean(0)
    return np.concatenate([grad_weight.reshape(-1), grad_bias])


@pytest.fixture(scope="module")
def digits() -> FederatedData:
    return datasets.load("digits", num_clients=30, alpha=0.5)


def examples(data: FederatedData, client: int) -> tuple[Vec, NDArray[np.int64]]:
    rows = data.order[data.offsets[client] : data.offsets[client + 1]]
    return data.x[rows].reshape(len(rows), 64).astype(np.float64) / 16, data.y[rows]


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


# ---------------------------------------------------------------------------------------------------------------------
# 4. FedEve's facts.


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def warm(method: FedEve, seed: int, dim: int = 5) -> tuple[Any, FedEveOracle]:
    """A state after three random rounds, so that momentum and variance are not zero, and its oracle."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=dim)
    state, oracle = method.init(torch.from_numpy(first.copy())), FedEveOracle(first, 1, method.server_lr, method.drift)
    for _ in range(3):
        updates = 1 + rng.normal(size=(4, dim))
        state, _ = method.step(state, Summary.of(torch.from_numpy(updates), double(1, 2, 3, 4)))
        oracle.step(list(updates), [1.0, 2.0, 3.0, 4.0])
    assert oracle.v > 0.01
    assert np.abs(oracle.M).min() > 0.01
    return state, oracle


def test_without_client_drift_the_gain_goes_to_one_and_the_observation_is_added() -> None:
    state, oracle = warm(FedEve(), seed=0)
    rng = np.random.default_rng(1)
    u, noise = rng.normal(size=5), rng.normal(size=(6, 5))
    noise -= noise.mean(0)
    gaps, distances = [], []
    for size in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 0.0):
        new, facts = FedEve().step(state, Summary.of(torch.from_numpy(u + size * noise), torch.ones(6)))
        gaps.append(1 - float(facts["gain"]))
        distances.append(float(np.abs(new.params.numpy() - (oracle.w + u)).max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1e-2
    assert gaps[-2] < 1e-7
    assert gaps[-1] < 1e-15
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-14


def test_with_endless_client_drift_the_gain_goes_to_zero_and_only_momentum_moves() -> None:
    state, oracle = warm(FedEve(), seed=2)
    u, apart = np.linspace(-1, 1, 5), np.array([1.0, -2.0, 3.0, -4.0, 5.0])
    gains, distances = [], []
    for size in (1.0, 1e2, 1e4, 1e6):
        updates = np.stack([u + size * apart, u - size * apart])
        new, facts = FedEve().step(state, Summary.of(torch.from_numpy(updates), torch.ones(2)))
        gains.append(float(facts["gain"]))
        distances.append(float(np.abs(new.params.numpy() - (oracle.w + oracle.M)).max()))
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1e-11
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-10


def test_known_observation_noise_adds_to_the_client_drift_and_lowers_the_gain() -> None:
    state, _ = warm(FedEve(), seed=3)
    updates = np.random.default_rng(4).normal(size=(6, 5))
    summary = Summary.of(torch.from_numpy(updates), torch.ones(6))
    _, plain = FedEve().step(state, summary)
    gains = [float(plain["gain"])]
    for noise in (1e-3, 1.0, 1e3, 1e9):
        new, facts = FedEve(observation_noise=noise).step(state, summary)
        prior = float(state.variance + plain["period_drift"])
        assert facts["client_drift"] == plain["client_drift"]  # what was measured stays what was measured
        assert float(facts["gain"]) == pytest.approx(prior / (prior + float(plain["client_drift"]) + noise), rel=1e-12)
        assert float(facts["variance"]) <= min(prior, float(plain["client_drift"]) + noise)
        gains.append(float(facts["gain"]))
    assert gains == sorted(gains, reverse=True)
    np.testing.assert_allclose(new.momentum, state.momentum, atol=1e-6)  # without trust only momentum is left


variances = st.floats(min_value=1e-140, max_value=1e140) | st.just(0.0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(v_hat=variances, noise=variances)
def test_the_posterior_variance_is_at_most_the_smaller_of_prior_and_noise(v_hat: float, noise: float) -> None:
    _, variance, gain = kalman.update(double(1.0, -2.0), double(v_hat)[0], double(3.0, 5.0), double(noise)[0])
    slack = 4 * EPS * v_hat  # (1 - G) v_hat knows 1 - G to the last digit of G only
    assert 0 <= float(gain) <= 1
    assert 0 <= float(variance) <= min(v_hat, noise) + slack
    exact = v_hat / (1 + v_hat / noise) if noise else 0.0  # v_hat R / (v_hat + R)
    assert abs(float(variance) - exact) <= slack


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    v=variances,
    drift=variances,
    noise=variances,
    prediction=st.floats(-1e6, 1e6, allow_subnormal=False),
    observation=st.floats(-1e6, 1e6, allow_subnormal=False),
)
def test_the_kalman_functions_are_the_specification_line_by_line(
    v: float, drift: float, noise: float, prediction: float, observation: float
) -> None:
    v_hat = kalman.predict(double(v)[0], double(drift)[0])
    assert float(v_hat) == v + drift
    mean, variance, gain = kalman.update(double(prediction), v_hat, double(observation), double(noise)[0])
    expected = (v + drift) / (v + drift + noise) if v + drift + noise > 0 else 1.0
    assert float(gain) == pytest.approx(expected, rel=4 * EPS, abs=0)
    assert float(variance) == pytest.approx((1 - expected) * (v + drift), rel=1e-12, abs=4 * EPS * (v + drift))
    fused = prediction + expected * (observation - prediction)
    assert float(mean[0]) == pytest.approx(fused, rel=1e-12, abs=1e-14 * max(abs(prediction), abs(observation)))


@pytest.mark.parametrize("drift", ["paper", "released"])
@pytest.mark.parametrize("weight", [1.0, 37.0])
def test_a_cohort_of_one_has_no_client_drift(drift: str, weight: float) -> None:
    state, oracle = warm(FedEve(drift=drift), seed=4)
    update = np.random.default_rng(4).normal(size=5)
    new, facts = FedEve(drift=drift).step(state, Summary.of(torch.from_numpy(update)[None], double(weight)))
    assert float(facts["client_drift"]) == 0.0
    assert float(facts["gain"]) == 1.0
    assert_close(new.params, oracle.w + update, rel=1e-14)


@pytest.mark.parametrize("drift", ["paper", "released"])
def test_equal_updates_are_averaged_whatever_the_weights(drift: str) -> None:
    method, u = FedEve(drift=drift), np.array([0.5, -1.25, 2.0])
    state = method.init(torch.zeros(3, dtype=torch.float64))
    for done in range(1, 6):
        state, facts = method.step(state, Summary.of(torch.from_numpy(np.stack([u] * 4)), double(3, 0, 7, 1)))
        assert float(facts["client_drift"]) == 0.0
        assert float(facts["gain"]) == 1.0
        assert_close(state.params, done * u, rel=1e-14)
        assert_close(method.send(state).params, (done + 1) * u, rel=1e-14)


@pytest.mark.parametrize("drift", ["paper", "released"])
def test_zero_updates_have_gain_one_and_move_nothing(drift: str) -> None:
    method, first = FedEve(drift=drift), np.array([1.0, -2.0, 3.0])
    state = method.init(torch.from_numpy(first.copy()))
    for _ in range(3):
        state, facts = method.step(state, Summary.of(torch.zeros(4, 3, dtype=torch.float64), double(1, 2, 0, 4)))
        assert_same_facts(facts, {"gain": 1.0, "period_drift": 0.0, "client_drift": 0.0})
        assert np.array_equal(state.params.numpy(), first)
        assert np.array_equal(method.send(state).params.numpy(), first)


def test_zero_updates_stop_a_model_under_way() -> None:
    state, oracle = warm(FedEve(), seed=6)
    new, facts = FedEve().step(state, Summary.of(torch.zeros(4, 5, dtype=torch.float64), torch.ones(4)))
    assert float(facts["gain"]) == 1.0
    assert_close(new.params, oracle.w, rel=1e-14)
    assert_close(FedEve().send(new).params, oracle.w, rel=1e-14)


def groupings(rng: np.random.Generator, size: int) -> Iterator[list[NDArray[np.int64]]]:
    """Clients in random orders, cut at random places."""
    for _ in range(8):
        cuts = np.sort(rng.choice(np.arange(1, size), size=int(rng.integers(0, size)), replace=False))
        yield [part for part in np.split(rng.permutation(size), cuts) if len(part)]


@pytest.mark.parametrize("drift", ["paper", "released"])
@pytest.mark.parametrize("offset", [0.0, 1e4], ids=["centred", "mean-dominates"])
def test_order_and_grouping_of_clients_change_nothing_but_rounding(drift: str, offset: float) -> None:
    rng = np.random.default_rng(8)
    method = FedEve(drift=drift)
    state, _ = warm(method, seed=8)
    updates = torch.from_numpy(offset + rng.normal(size=(10, 5)))
    weights = torch.from_numpy(rng.integers(0, 50, size=10).astype(np.float64))
    expected, expected_facts = method.step(state, Summary.of(updates, weights))
    for parts in groupings(rng, 10):
        pieces = [Summary.of(updates[part], weights[part]) for part in map(torch.from_numpy, parts)]
        actual, facts = method.step(state, Summary.merged(pieces))
        assert_close(actual.params, expected.params.numpy(), rel=1e-14)
        for name, value in expected_facts.items():
            assert float(facts[name]) == pytest.approx(float(value), rel=1e-11), name


@each_method
def test_float32_parameters_stay_float32_while_scalars_are_float64(method: Method) -> None:
    rng = np.random.default_rng(9)
    state = method.init(torch.from_numpy(rng.normal(size=6)).float(), num_clients=5)
    memory: Vectors = {name: torch.zeros(6) for name in method.remembers}
    for _ in range(3):
        sent = method.send(state)
        assert sent.params.dtype == torch.float32
        update = torch.from_numpy(rng.normal(size=6)).float()
        extras, memory = method.finish(update, 4, 0.1, sent, memory)
        other = torch.from_numpy(rng.normal(size=6)).float()
        state, facts = method.step(
            state, summarised([update, other], [1.0, 3.0], [extras, dict(extras)], one_by_one=False)
        )
        for name, value in state._asdict().items():
            assert value.dtype == (torch.float32 if value.ndim else torch.float64), name
        assert all(value.dtype == torch.float64 for value in facts.values())
        assert all(value.dtype == torch.float32 for value in memory.values())


# ---------------------------------------------------------------------------------------------------------------------
# 5. What does not fit is refused.


@pytest.mark.parametrize(
    ("updates", "weights"),
    [
        (torch.zeros(3, 4), torch.ones(2)),
        (torch.zeros(3, 4), torch.ones(1)),
        (torch.zeros(3, 4), torch.ones(3, 1)),
        (torch.zeros(3, 4), torch.ones(3, 4)),
        (torch.zeros(3, 4), torch.tensor(1.0)),
        (torch.zeros(4), torch.ones(4)),
        (torch.zeros(0, 4), torch.ones(0)),
        (torch.zeros(2, 4), torch.tensor([1.0, -1.0])),
        (torch.zeros(2, 4), torch.tensor([1.0, math.nan])),
        (torch.zeros(2, 4), torch.tensor([1.0, math.inf])),
    ],
    ids=["few", "one", "column", "per-entry", "scalar", "vector", "nobody", "negative", "nan", "infinite"],
)
def test_updates_and_weights_that_do_not_fit_are_refused(updates: Tensor, weights: Tensor) -> None:
    with pytest.raises(FedeveError):
        Summary.of(updates, weights)


def test_extras_of_another_shape_are_refused() -> None:
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(3, 4), torch.ones(3), {"control": torch.zeros(3, 5)})
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(3, 4), torch.ones(3), {"control": torch.zeros(2, 4)})


def test_summaries_of_different_models_are_not_merged() -> None:
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(3, 4), torch.ones(3)).merge(Summary.of(torch.zeros(3, 1), torch.ones(3)))
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(1, 4), torch.ones(1)).merge(
            Summary.of(torch.zeros(1, 4), torch.ones(1), {"control": torch.zeros(1, 4)})
        )


@pytest.mark.parametrize("dim", [1, 4, 6])
@each_method
def test_updates_of_another_model_are_refused(method: Method, dim: int) -> None:
    state = method.init(torch.zeros(5), num_clients=3)
    extras = {name: torch.zeros(2, dim) for name in method.replies}
    with pytest.raises(FedeveError):
        method.step(state, Summary.of(torch.zeros(2, dim), torch.ones(2), extras))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedEve(drift="published"),
        lambda: Scaffold(control="published"),
        lambda: FedAvg(server_lr=-1.0),
        lambda: FedAvg(server_lr=math.nan),
        lambda: FedAvgM(beta=1.5),
        lambda: FedProx(mu=-0.1),
        lambda: FedAdam(tau=-1e-4),
        lambda: FedAdam(beta2=1.1),
        lambda: FedDyn(alpha=0.0),
        lambda: FedEveParts(gain=0.0),
        lambda: FedEveParts(gain=1.5),
    ],
    ids=["drift", "control", "server_lr", "nan", "beta", "mu", "tau", "beta2", "alpha", "no-gain", "gain"],
)
def test_hyper_parameters_out_of_range_are_refused(make: Callable[[], Method]) -> None:
    with pytest.raises(FedeveError):
        make()


# ---------------------------------------------------------------------------------------------------------------------
# 6. Whole runs, derived again by hand.


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
