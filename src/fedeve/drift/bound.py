"""The convergence bound on a quadratic, where everything in it is known: what it promises beside what happens.

The paper's theorem, for M <- M + G (g - M), w <- w - M / L, with g the mean gradient of a cohort at w:
    (1/T) sum_t E |grad f(w_t)|^2  <=  2 L (f(w_0) - f*) / T  +  G^2 (sigma^2 / S) (1 - S/N)
The last term is what stays for ever. Here it is computed exactly, from the covariance the recursion settles at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import linalg

from .. import seeds
from ..errors import FedeveError
from ..methods.fedeve import FedEve
from ..summary import Summary
from .cohorts import Floats, check_size, factor


@dataclass(frozen=True)
class Bowl:
    """`F_k(w) = (w - a_k)' A (w - a_k) / 2`, one curvature for all: sigma^2 is then the same everywhere."""

    centres: Floats
    """[N, d]"""
    curvature: Floats
    """[d, d], symmetric and positive."""

    @classmethod
    def random(cls, *, num_clients: int = 100, dim: int = 8, condition: float = 10.0, seed: int = 0) -> Bowl:
        """A bowl whose curvatures reach from 1 to `condition`, along its axes."""
        rng = seeds.generator(seed, "bowl")
        return cls(rng.normal(size=(num_clients, dim)), np.diag(np.geomspace(1.0, condition, dim)))

    @property
    def smoothness(self) -> float:
        """L, the largest curvature."""
        return float(np.linalg.eigvalsh(self.curvature)[-1])

    @property
    def noise(self) -> Floats:
        """[d, d] covariance of the clients' gradients around their mean; its trace is sigma^2."""
        away = (self.centres - self.centres.mean(0)) @ self.curvature
        return np.asarray(away.T @ away / len(away))

    @property
    def sigma_squared(self) -> float:
        return float(np.trace(self.noise))

    def gap(self, start: Floats) -> float:
        """`f(start) - f*`."""
        away = start - self.centres.mean(0)
        return float(away @ self.curvature @ away / 2)


def bound_error(bowl: Bowl, *, gain: float, size: int) -> float:
    """The bound's last term, `G^2 (sigma^2 / S) (1 - S/N)`, as the paper prints it."""
    count = len(bowl.centres)
    check_size(size, count)
    return gain**2 * bowl.sigma_squared / size * (1 - size / count)


def exact_error(bowl: Bowl, *, gain: float, size: int) -> float:
    """`lim E |grad f(w_t)|^2`, exactly: the covariance P of (w - w*, M) solves `P = B P B' + C Sigma C'`."""
    step, spread, grad = _system(bowl, gain=gain, size=size)
    settled = linalg.solve_discrete_lyapunov(step, spread)
    return float(np.trace(grad @ settled @ grad.T))


def exact_average(bowl: Bowl, *, gain: float, size: int, rounds: int, start: Floats) -> float:
    """The theorem's left side, `(1/T) sum_t E |grad f(w_t)|^2`, exactly."""
    step, spread, grad = _system(bowl, gain=gain, size=size)
    mean = np.concatenate([start - bowl.centres.mean(0), np.zeros(len(start))])
    second, total = np.outer(mean, mean), 0.0
    for _ in range(rounds):
        total += float(np.trace(grad @ second @ grad.T))
        second = step @ second @ step.T + spread
    return total / rounds


def bound(bowl: Bowl, *, gain: float, size: int, rounds: int, start: Floats) -> float:
    """The theorem's right side, with the constants of its proof."""
    return 2 * bowl.smoothness * bowl.gap(start) / rounds + bound_error(bowl, gain=gain, size=size)


def simulated_error(bowl: Bowl, *, gain: float, size: int, rounds: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The same floor by playing rounds with real cohorts: the mean of the later half and its standard error."""
    middle, count, dim = bowl.centres.mean(0), *bowl.centres.shape
    params, momentum, seen = middle.copy(), np.zeros(dim), np.empty(rounds)
    for round in range(rounds):
        seen[round] = float(np.square(bowl.curvature @ (params - middle)).sum())
        cohort = seeds.cohort(count, size, seed=seed, round=round)
        observed = bowl.curvature @ (params - bowl.centres[cohort].mean(0))
        momentum = momentum + gain * (observed - momentum)
        params = params - momentum / bowl.smoothness
    return _batch_means(seen[rounds // 2 :])


def fedeve_error(
    bowl: Bowl, *, size: int, rate: float = 0.25, rounds: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """FedEve itself, one local step at `rate / L`: its median gain, and the floor with its standard error.

    The theorem leaves out that FedEve's clients start at the look-ahead. With it, a gain of 1 and a step of 1/L, the
    steepest direction is unstable (its error grows by 1.6 a round), so the rate here is smaller.
    """
    middle, count = bowl.centres.mean(0), len(bowl.centres)
    method = FedEve()
    state, seen, gains = method.init(torch.from_numpy(middle.copy())), np.empty(rounds), np.empty(rounds)
    for round in range(rounds):
        seen[round] = float(np.square(bowl.curvature @ (state.params.numpy() - middle)).sum())
        cohort = seeds.cohort(count, size, seed=seed, round=round)
        away = method.send(state).params.numpy() - bowl.centres[cohort]
        updates = torch.from_numpy(-rate * away @ bowl.curvature / bowl.smoothness)
        state, facts = method.step(state, Summary.of(updates, torch.ones(size)))
        gains[round] = float(facts["gain"])
    return float(np.median(gains[rounds // 2 :])), *_batch_means(seen[rounds // 2 :])


def _batch_means(values: Floats) -> tuple[float, float]:
    # Rounds follow on each other, so the error is taken between stretches long enough to be nearly independent.
    parts = np.array([part.mean() for part in np.array_split(values, 20)])
    return float(values.mean()), float(parts.std(ddof=1) / np.sqrt(len(parts)))


def _system(bowl: Bowl, *, gain: float, size: int) -> tuple[Floats, Floats, Floats]:
    """B and C Sigma C' of the recursion of (w - w*, M), and the map from it to grad f."""
    if not 0 < gain <= 1:
        raise FedeveError("a gain lies above 0 and at most at 1", got=gain, do="write e.g. 0.5")
    check_size(size, len(bowl.centres))
    dim, smooth = len(bowl.curvature), bowl.smoothness
    one = np.eye(dim)
    step = np.block(
        [
            [one - gain / smooth * bowl.curvature, -(1 - gain) / smooth * one],
            [gain * bowl.curvature, (1 - gain) * one],
        ]
    )
    enters = np.concatenate([-gain / smooth * one, gain * one])
    spread = enters @ (factor(len(bowl.centres), size) * bowl.noise) @ enters.T
    return step, np.asarray(spread), np.concatenate([bowl.curvature, np.zeros((dim, dim))], axis=1)
