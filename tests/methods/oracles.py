"""The specification of every server method, re-stated as plain numpy loops in float64, and what tests do with it.

Nothing of `fedeve.methods` is used to compute an expected value. A client's part is `corrected` and `finish`, the
server's `start` and `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedeve import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FederatedData,
    FedEve,
    FedEveAdam,
    FedEveParts,
    FedEveProx,
    FedProx,
    FedYogi,
    Method,
    Scaffold,
    Summary,
)
from fedeve.method import Vectors

Vec = NDArray[np.float64]
Facts = dict[str, float]
EPS = float(np.finfo(np.float64).eps)
CPU = torch.device("cpu")


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


class FedEveProxOracle(FedEveOracle):
    """FedEve's server; clients are held near the prediction, where they start."""

    def __init__(self, w: Vec, num_clients: int, server_lr: float, mu: float) -> None:
        super().__init__(w, num_clients, server_lr)
        self.mu = mu

    def corrected(self, client: int, grad: Vec, w: Vec, start: Vec) -> Vec:
        return grad + self.mu * (w - (self.w + self.lr_g * self.M))


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
    "fedeveprox": Case(FedEveProx(), lambda w, n: FedEveProxOracle(w, n, 1.0, 0.01)),
    "fedeveprox-tuned": Case(FedEveProx(server_lr=1.3, mu=0.8), lambda w, n: FedEveProxOracle(w, n, 1.3, 0.8)),
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


def examples(data: FederatedData, client: int) -> tuple[Vec, NDArray[np.int64]]:
    rows = data.order[data.offsets[client] : data.offsets[client + 1]]
    return data.x[rows].reshape(len(rows), 64).astype(np.float64) / 16, data.y[rows]
