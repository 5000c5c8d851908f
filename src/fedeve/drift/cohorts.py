"""How far a cohort's mean is from the population's: in closed form, over all cohorts, or over cohorts drawn.

The vectors may be gradients, which makes it the period drift, or label distributions, which makes it the law of the
paper's appendix. Legend: N clients, S of them in a cohort, v_k the vector of client k, n_k its weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import seeds
from ..errors import FedeveError, Words, unknown

Floats = NDArray[np.float64]
AVERAGES = ("definition", "plain", "examples")
"""Who counts how much. `definition`: clients alike in a cohort, by examples in the population, as the paper's
Definition 1 is written. `plain`: alike in both. `examples`: by examples in both, as FedAvg averages."""
HOWS = ("auto", "closed form", "enumeration", "sampled")
ENUMERABLE = 200_000  # cohorts that are gone through one by one unless asked otherwise
_CHUNK = 4_000_000  # numbers held at once


@dataclass(frozen=True)
class Estimate:
    """A value with what is needed to judge it."""

    value: float
    error: float
    """Its standard error; 0 where it is exact."""
    how: str
    """In closed form, by enumeration of all cohorts, or sampled."""
    num_cohorts: int
    """Cohorts enumerated or drawn; 0 for a closed form, which needs none."""
    num_clients: int
    """The population, N: clients with data."""
    cost: int = 0
    """Clients' full gradients computed."""
    seconds: float = 0.0
    bias: float | None = None
    """What of it does not change from cohort to cohort, `|E_S mean - v|^2`; where it is known, as in a closed form."""

    @property
    def exact(self) -> bool:
        return self.how != "sampled"

    def __str__(self) -> str:
        drawn = f", {self.num_cohorts:,} cohorts" if self.num_cohorts else ""
        spread = "" if self.exact else f" ± {self.error:.2g}"
        return f"{self.value:.4g}{spread} ({self.how}{drawn})"


def factor(num_clients: int, size: int) -> float:
    """`(N - S) / (S (N - 1))`: what is left of a variance in the mean of S of N drawn without replacement.

    Equal to `(1/S) (1 - S/N) N/(N-1)`; 1 for a cohort of one, 0 for a cohort of all.

    >>> factor(100, 10), factor(8, 1), factor(8, 8), factor(1, 1)
    (0.09090909090909091, 1.0, 0.0, 0.0)
    """
    check_size(size, num_clients)
    return 0.0 if size == num_clients else (num_clients - size) / (size * (num_clients - 1))


def halving(num_clients: int, size: int) -> int:
    """The smallest cohort whose `factor` is at most half of that of `size`: about `2 S N / (N + S)`, not 2 S.

    >>> halving(1_000_000, 10), halving(20, 10), halving(20, 20)
    (20, 14, 20)
    """
    check_size(size, num_clients)
    return -(-2 * size * num_clients // (num_clients + size))


def check_size(size: int, num_clients: int) -> None:
    """Raise unless a cohort of `size` can be drawn from so many clients."""
    if num_clients < 1:
        raise FedeveError("nobody has data", got=num_clients, do="give a federation with at least one example")
    if not 1 <= size <= num_clients:
        raise FedeveError(
            "such a cohort cannot be drawn",
            got=size,
            do=f"set the cohort to 1 to {num_clients}, the number of clients with data",
        )


def cohort_distance(
    vectors: Floats,
    *,
    size: int,
    average: str = "plain",
    weights: NDArray[Any] | None = None,
    how: str = "auto",
    num_cohorts: int = 2000,
    seed: int = 0,
) -> Estimate:
    """`E_S |mean_{k in S} v_k - v|^2` for vectors [N, D], over uniform cohorts of `size` without replacement.

    >>> cohort_distance(np.array([[0.0], [2.0], [4.0]]), size=2).value
    0.6666666666666666
    """
    vectors = np.asarray(vectors, dtype=np.float64)
    count = len(vectors)
    check_size(size, count)
    chosen = choose(how, average=average, size=size, num_clients=count)
    within, overall = shares(average, weights, count)
    target = overall @ vectors / overall.sum()
    if chosen == "closed form":
        middle = vectors.mean(0)
        variance = float(np.square(vectors - middle).sum(1).mean())
        bias = float(np.square(middle - target).sum())
        return Estimate(variance * factor(count, size) + bias, 0.0, chosen, 0, count, bias=bias)
    if chosen == "enumeration":
        cohorts = _all(count, size)
    else:
        if num_cohorts < 2:
            raise FedeveError("a standard error needs cohorts", got=num_cohorts, do="draw 2 or more")
        cohorts = _drawn(count, size, num_cohorts, seed)
    squared = _lengths(vectors - target)
    distances = np.concatenate([squared(within[part], part) for part in cohorts])
    error = 0.0 if chosen == "enumeration" else float(distances.std(ddof=1) / math.sqrt(len(distances)))
    return Estimate(float(distances.mean()), error, chosen, len(distances), count)


def choose(how: str, *, average: str, size: int, num_clients: int) -> str:
    """How the mean over cohorts is taken, where `auto` leaves it open."""
    if how not in HOWS:
        raise unknown("way to measure", how, HOWS)
    if average not in AVERAGES:
        raise unknown("average", average, AVERAGES)
    cohorts = math.comb(num_clients, size)
    if how == "auto":
        return "closed form" if average != "examples" else "enumeration" if cohorts <= ENUMERABLE else "sampled"
    if how == "closed form" and average == "examples":
        raise FedeveError(
            "means weighted by examples have no closed form", got=how, do="use enumeration or sampled, or average plain"
        )
    if how == "enumeration" and cohorts > 100 * ENUMERABLE:
        raise FedeveError("there are too many cohorts to go through", got=Words(f"{cohorts:.2g}"), do="use sampled")
    return how


def shares(average: str, weights: NDArray[Any] | None, count: int) -> tuple[Floats, Floats]:
    """How much each client counts [N] within a cohort, and in the population."""
    alike = np.ones(count)
    if average == "plain":
        return alike, alike
    if weights is None:
        raise FedeveError(
            f"the average {average!r} needs weights", got=None, do="give the number of examples of each client"
        )
    by_examples = np.asarray(weights, dtype=np.float64)
    if by_examples.shape != (count,) or not (by_examples > 0).all():
        found = Words(f"{by_examples.shape} values from {by_examples.min(initial=0):g} on")
        raise FedeveError("weights must be positive, one per client", got=found, do="leave clients without data out")
    return (by_examples if average == "examples" else alike), by_examples


def _all(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    cohorts = itertools.combinations(range(count), size)
    while some := list(itertools.islice(cohorts, max(_CHUNK // (size * size), 1))):
        yield np.array(some, dtype=np.int64)


def drawn(count: int, size: int, *, number: int, seed: int) -> NDArray[np.int64]:
    """[number, size] cohorts of clients, as a run of this seed would draw them."""
    return np.stack([seeds.cohort(count, size, seed=seed, round=round) for round in range(number)])


def _drawn(count: int, size: int, number: int, seed: int) -> Iterator[NDArray[np.int64]]:
    cohorts, step = drawn(count, size, number=number, seed=seed), max(_CHUNK // (size * size), 1)
    for start in range(0, number, step):
        yield cohorts[start : start + step]


def _lengths(centred: Floats) -> Callable[[Floats, NDArray[np.int64]], Floats]:
    """The function from weights [C, S] and cohorts [C, S] to the squared lengths [C] of their weighted means."""
    if centred.shape[1] > len(centred):
        # Lengths follow from inner products, and those are far fewer than the numbers in long vectors.
        inner = centred @ centred.T

        def from_products(weight: Floats, cohorts: NDArray[np.int64]) -> Floats:
            share = weight / weight.sum(1, keepdims=True)
            products = inner[cohorts[:, :, None], cohorts[:, None, :]]
            return np.asarray((share * (products @ share[:, :, None])[:, :, 0]).sum(1))

        return from_products

    def directly(weight: Floats, cohorts: NDArray[np.int64]) -> Floats:
        share, out = weight / weight.sum(1, keepdims=True), np.empty(len(cohorts))
        step = max(_CHUNK // (cohorts.shape[1] * max(centred.shape[1], 1)), 1)
        for start in range(0, len(cohorts), step):
            part = slice(start, start + step)
            mean = (share[part][:, None, :] @ centred[cohorts[part]])[:, 0]
            out[part] = np.square(mean).sum(1)
        return out

    return directly
