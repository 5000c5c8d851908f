"""Definition 1 of the paper: period drift and client drift as estimators, for any model, data and cohort size.

period drift   E_S |mean_{k in S} grad F_k(w) - grad f(w)|^2
client drift   E_k |grad F_k(w_k*) - grad F_k(w_S*)|^2
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from ..errors import FedeveError, Words
from ..summary import Summary
from .cohorts import Estimate, Floats, check_size, choose, cohort_distance, drawn, factor
from .objectives import Objective, Optimum, minimise

Tell = Callable[[int], None]
_LARGEST = 2**31  # bytes of gradients held at once
_GROUPS = 10  # of clients, between which a standard error is taken where not all are seen
_COHORTS = 200  # client drift trains a model per cohort, so few are gone through unasked


def gradients(objective: Objective, params: Tensor, *, tell: Tell | None = None) -> Floats:
    """[N, D] every client's gradient."""
    count, dim = len(objective.weights), len(params)
    if 8 * count * dim > _LARGEST:
        raise FedeveError(
            "so many gradients do not fit into memory",
            got=Words(f"{count} of {dim} numbers"),
            do="use the average plain or definition, whose closed form needs two vectors",
        )
    out = np.empty((count, dim))
    for client in range(count):
        out[client] = objective.loss_and_gradient(client, params)[1].double().cpu().numpy()
        if tell is not None:
            tell(client + 1)
    return out


def period_drift(
    objective: Objective,
    params: Tensor | None = None,
    *,
    size: int,
    average: str = "definition",
    how: str = "auto",
    num_cohorts: int = 2000,
    max_clients: int | None = None,
    seed: int = 0,
    tell: Tell | None = None,
) -> Estimate:
    """The period drift at `params`, the objective's start unless given, of cohorts of `size`.

    The full gradient takes every client's gradient anyway, so the mean over all cohorts costs no more: it is exact,
    in one pass and O(D) memory. `max_clients` looks at so many clients instead, drawn uniformly, and extrapolates.
    """
    begun, count = time.monotonic(), len(objective.weights)
    where = objective.start if params is None else params
    check_size(size, count)
    if max_clients is not None and average == "examples":
        raise FedeveError(
            "a sample of clients is for averages with a closed form",
            got=average,
            do="use plain or definition, or leave max_clients out",
        )
    if choose(how, average=average, size=size, num_clients=count) != "closed form":
        stack = gradients(objective, where, tell=tell)
        found = cohort_distance(
            stack, size=size, average=average, weights=objective.weights, how=how, num_cohorts=num_cohorts, seed=seed
        )
        return dataclasses.replace(found, cost=count, seconds=time.monotonic() - begun)
    chosen, total = _some(count, max_clients, seed), objective.weights.sum()
    groups: list[Summary | None] = [None] * min(_GROUPS, len(chosen))
    for number, client in enumerate(chosen):
        grad = objective.loss_and_gradient(client, where)[1]
        # Cohorts count clients alike, the paper's f by examples; what this leaves is a plain mean over clients, too.
        share = 1 - count * objective.weights[client] / total if average == "definition" else 0.0
        one = Summary.of(torch.stack([grad, share * grad])[:, None], grad.new_ones(2, 1))
        mine = groups[number % len(groups)]
        groups[number % len(groups)] = one if mine is None else mine.merge(one)
        if tell is not None:
            tell(number + 1)
    value, error, bias = _from_groups([group for group in groups if group is not None], size=size, count=count)
    sampled = len(chosen) < count
    return Estimate(
        value,
        error if sampled else 0.0,
        "sampled" if sampled else "closed form",
        0,
        count,
        cost=len(chosen),
        seconds=time.monotonic() - begun,
        bias=None if sampled else bias,
    )


def _some(count: int, max_clients: int | None, seed: int) -> list[int]:
    if max_clients is None or max_clients >= count:
        return list(range(count))
    if max_clients < 2:
        raise FedeveError("a variance needs two clients", got=max_clients, do="set max_clients to 2 or more")
    return sorted(drawn(count, max_clients, number=1, seed=seed)[0].tolist())


def _from_groups(groups: list[Summary], *, size: int, count: int) -> tuple[float, float, float]:
    """The drift from the summaries seen of gradients and of their shares in the bias, [2, D]; its error, its bias.

    Of all clients both are exact. Of a sample they are unbiased, and the standard error is the jackknife's.
    """
    value, bias = _drift(Summary.merged(groups), size=size, count=count)
    if sum(int(group.count[0]) for group in groups) == count:
        return value, 0.0, bias
    others = [Summary.merged(groups[:place] + groups[place + 1 :]) for place in range(len(groups))]
    again = [_drift(some, size=size, count=count)[0] for some in others]
    return value, math.sqrt((len(groups) - 1) * float(np.var(again))), bias


def _drift(seen: Summary, *, size: int, count: int) -> tuple[float, float]:
    """The drift and its bias, as far as these clients tell."""
    number = int(seen.count[0])
    lone = 0.0 if count == 1 else math.nan  # one client of many says nothing of their variance
    variance, noise = (seen.scatter / (number - 1)).tolist() if number > 1 else (lone, lone)
    # Both variances are unbiased for N/(N-1) sigma^2, and by chance a sample's mean is longer than the population's.
    bias = float(seen.mean[1].square().sum()) - (1 - number / count) * noise / number
    return factor(count, size) * (count - 1) / count * variance + bias, bias


def gradient_variance(objective: Objective, params: Tensor | None = None) -> float:
    """`sigma^2 = mean_k |grad F_k - mean grad|^2`, which the variance lemma multiplies with `cohorts.factor`."""
    where = objective.start if params is None else params
    one = (
        Summary.of(objective.loss_and_gradient(client, where)[1][None], torch.ones(1, device=where.device))
        for client in range(len(objective.weights))
    )
    return float(reduce(Summary.merge, one).scatter) / len(objective.weights)


@dataclass(frozen=True)
class ClientDrift(Estimate):
    """A client drift, and how near to their optima the trainings came that it rests on."""

    tolerance: float = 0.0
    """A training ends where its gradient is this share of what it was."""
    num_optima: int = 0
    num_reached: int = 0
    """Trainings that got there; the others stopped at `max_steps`, and the value is that of where they stopped."""


def client_drift(
    objective: Objective,
    *,
    size: int,
    average: str = "plain",
    tolerance: float = 1e-3,
    max_steps: int = 500,
    num_cohorts: int | None = None,
    start: Tensor | None = None,
    seed: int = 0,
    tell: Tell | None = None,
) -> ClientDrift:
    """The client drift of cohorts of `size`: gradients at the cohort's optimum and at each client's own, compared.

    Every optimum is trained from `start`, the objective's start unless given. All cohorts are gone through where
    there are at most 200 and `num_cohorts` is not given, else that many (20 unless given) are drawn.
    """
    begun, count = time.monotonic(), len(objective.weights)
    check_size(size, count)
    if average not in ("plain", "examples"):
        raise FedeveError("unknown average for client drift", got=average, do="use plain or examples")
    for name, given in (("max_steps", max_steps), ("num_cohorts", 1 if num_cohorts is None else num_cohorts)):
        if given < 1:
            raise FedeveError(f"{name} must be at least 1", got=given, do="write 1 or more, or leave it out")
    exact = num_cohorts is None and math.comb(count, size) <= _COHORTS
    cohorts: Sequence[Sequence[int]] = (
        list(itertools.combinations(range(count), size))
        if exact
        else drawn(count, size, number=20 if num_cohorts is None else num_cohorts, seed=seed).tolist()
    )
    solver = _Solver(objective, objective.start if start is None else start, tolerance, max_steps)
    values = []
    for number, cohort in enumerate(cohorts, start=1):
        shares = [1.0] * size if average == "plain" else [float(objective.weights[k]) for k in cohort]
        joint = solver.optimum(cohort, shares)
        values.append(float(np.mean([solver.gap(client, joint.params) for client in cohort])))
        if tell is not None:
            tell(number)
    error = 0.0 if exact else float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return ClientDrift(
        value=float(np.mean(values)),
        error=error,
        how="enumeration" if exact else "sampled",
        num_cohorts=len(values),
        num_clients=count,
        cost=solver.cost,
        seconds=time.monotonic() - begun,
        tolerance=tolerance,
        num_optima=len(solver.found),
        num_reached=sum(optimum.reached for optimum in solver.found.values()),
    )


class _Solver:
    """Optima of clients and cohorts, each found once."""

    def __init__(self, objective: Objective, start: Tensor, tolerance: float, max_steps: int) -> None:
        self.objective, self.start, self.tolerance, self.max_steps = objective, start, tolerance, max_steps
        self.found: dict[tuple[int, ...], Optimum] = {}
        self.slopes: dict[int, Tensor] = {}
        self.cost = 0

    def optimum(self, clients: Sequence[int], shares: Sequence[float]) -> Optimum:
        order = sorted(range(len(clients)), key=lambda place: clients[place])
        key = tuple(clients[place] for place in order)
        if key not in self.found:
            weights = [shares[place] for place in order]
            options = {"tolerance": self.tolerance, "max_steps": self.max_steps}
            self.found[key] = minimise(self.objective, key, weights, start=self.start, **options)  # type: ignore[arg-type]
            self.cost += self.found[key].num_gradients
        return self.found[key]

    def gap(self, client: int, params: Tensor) -> float:
        """`|grad F_k(w_k*) - grad F_k(w_S*)|^2`."""
        if client not in self.slopes:
            best = self.optimum((client,), (1.0,)).params
            self.slopes[client] = self.objective.loss_and_gradient(client, best)[1]
            self.cost += 1
        self.cost += 1
        there = self.objective.loss_and_gradient(client, params)[1]
        return float((self.slopes[client] - there).double().square().sum())
