"""Labels: how differently clients' classes are mixed, H, and how far a cohort's mix is from the population's.

The law of the paper's appendix, with the factor for drawing without replacement: `E[D_S] = (H/S) (N-S)/(N-1)`, where
`D_S = mean_j (cohort's share of class j - population's)^2` and every client counts alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import seeds
from ..data.federated import FederatedData
from ..errors import FedeveError
from .cohorts import Estimate, Floats, check_size, cohort_distance, factor, halving

_BLOCK = 32_768  # clients whose labels are counted at once
_COUNTS = 2**23  # and numbers that are counted at once, where there are many classes


def counts(data: FederatedData, clients: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """[clients, M] how many examples of each class these clients, or all, have."""
    if clients is None:
        blocks = list(_blocks(data))
        return np.concatenate([block for _, block in blocks])
    return np.stack([np.bincount(data.y[data.rows(client)], minlength=data.num_classes) for client in clients.tolist()])


def _blocks(data: FederatedData) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Label counts of some clients after another, so that a million clients need no more memory than thousands."""
    classes = data.num_classes
    some = max(1, min(_BLOCK, _COUNTS // max(classes, 1)))
    for first in range(0, data.num_clients, some):
        last = min(first + some, data.num_clients)
        rows = data.order[data.offsets[first] : data.offsets[last]]
        owners = np.repeat(np.arange(last - first), np.diff(data.offsets[first : last + 1]))
        flat = np.bincount(owners * classes + data.y[rows], minlength=(last - first) * classes)
        yield first, flat.reshape(last - first, classes)


def shares(data: FederatedData) -> Floats:
    """[N, M] the label distribution p_k of every client that has data."""
    _refuse_empty(data)
    found = counts(data)[data.with_data]
    return np.asarray(found / found.sum(1, keepdims=True), dtype=np.float64)


def heterogeneity(mix: Floats) -> float:
    """`H = mean_k mean_j (p_kj - p_j)^2` of label distributions [N, M], p the plain mean over clients.

    >>> heterogeneity(np.array([[1.0, 0.0], [0.0, 1.0]])), heterogeneity(np.full((5, 4), 0.25))
    (0.25, 0.0)
    """
    return float(np.square(mix - mix.mean(0)).mean())


def expected_distance(heterogeneity: float, *, num_clients: int, size: int) -> float:
    """The law: `E[D_S] = (H/S) (N-S)/(N-1)`."""
    return heterogeneity * factor(num_clients, size)


def measured_distance(
    mix: Floats,
    *,
    size: int,
    average: str = "plain",
    weights: NDArray[Any] | None = None,
    how: str = "sampled",
    num_cohorts: int = 2000,
    seed: int = 0,
) -> Estimate:
    """`E[D_S]` of label distributions [N, M] over cohorts drawn or enumerated."""
    scaled = mix / np.sqrt(mix.shape[1])  # the mean over classes is a sum over M with 1/M
    return cohort_distance(
        scaled, size=size, average=average, weights=weights, how=how, num_cohorts=num_cohorts, seed=seed
    )


@dataclass(frozen=True)
class Picture:
    """A federation at a glance."""

    name: str
    num_clients: int
    num_empty: int
    num_examples: int
    num_classes: int
    sizes: dict[str, float]
    """Examples a client: min, quartiles, max; of clients with data."""
    classes: dict[str, float]
    """Classes a client: min, quartiles, max; and the share of clients with one class only."""
    heterogeneity: float
    """H."""
    by_chance: float
    """What H would be on average if examples were dealt at random to clients of these sizes."""
    cohort: int
    law: list[dict[str, float]]
    """By cohort size: the expected distance D_S, and its root, a class's typical error in a cohort's mix."""
    halving: int
    """The cohort that halves the expected distance of `cohort`."""
    pooled: dict[str, float]
    """D_S at `cohort` where clients count by their examples, as FedAvg averages: sampled, with its standard error."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(data: FederatedData, *, cohort: int = 10, num_cohorts: int = 1000, seed: int = 0) -> Picture:
    """Client sizes, label mix, H, and the expected period drift of labels by cohort size. Inputs are not read."""
    _refuse_empty(data)
    present = len(data.with_data)
    check_size(cohort, present)
    sizes = data.sizes[data.with_data]
    mean, total = np.zeros(data.num_classes), np.zeros(data.num_classes)
    for _, block in _blocks(data):
        some = block[block.sum(1) > 0]
        mean += (some / some.sum(1, keepdims=True)).sum(0) / present
        total += some.sum(0)
    square, kinds = 0.0, []
    for _, block in _blocks(data):
        some = block[block.sum(1) > 0]
        square += float(np.square(some / some.sum(1, keepdims=True) - mean).sum())
        kinds.append((some > 0).sum(1))
    population = total / total.sum()
    classes, spread = np.concatenate(kinds), float((population * (1 - population)).mean())
    found = square / (present * data.num_classes)
    return Picture(
        name=data.name,
        num_clients=data.num_clients,
        num_empty=data.num_clients - present,
        num_examples=int(sizes.sum()),
        num_classes=data.num_classes,
        sizes=_quartiles(sizes),
        classes=_quartiles(classes) | {"one": float((classes == 1).mean())},
        heterogeneity=found,
        by_chance=_by_chance(sizes, spread),
        cohort=cohort,
        law=[_law(found, present, size) for size in _ladder(present, cohort)],
        halving=halving(present, cohort),
        pooled=_pooled(data, population, cohort=cohort, num_cohorts=num_cohorts, seed=seed),
    )


def _by_chance(sizes: NDArray[np.int64], spread: float) -> float:
    # Dealt at random, shares p_k and p_l have covariance p (1-p) (T/n_k [k=l] - 1) / (T-1), T examples in all; what
    # is left of it around the plain mean over clients:
    total = int(sizes.sum())
    if total < 2:
        return 0.0
    return float(spread * total / (total - 1) * (1 / sizes).mean() * (1 - 1 / len(sizes)))


def _law(heterogeneity: float, num_clients: int, size: int) -> dict[str, float]:
    distance = expected_distance(heterogeneity, num_clients=num_clients, size=size)
    return {"cohort": size, "distance": distance, "typical": float(np.sqrt(distance))}


def _ladder(num_clients: int, cohort: int) -> list[int]:
    steps = {base * 10**power for power in range(9) for base in (1, 2, 5)} | {cohort, num_clients}
    return sorted(step for step in steps if step <= num_clients)


def _pooled(data: FederatedData, population: Floats, *, cohort: int, num_cohorts: int, seed: int) -> dict[str, float]:
    distances = np.empty(num_cohorts)
    for number in range(num_cohorts):
        clients = seeds.cohort(data.with_data, cohort, seed=seed, round=number)
        rows = np.concatenate([data.rows(client) for client in clients.tolist()])
        mix = np.bincount(data.y[rows], minlength=data.num_classes) / len(rows)
        distances[number] = np.square(mix - population).mean()
    error = float(distances.std(ddof=1) / np.sqrt(num_cohorts)) if num_cohorts > 1 else float("nan")
    return {"distance": float(distances.mean()), "error": error, "num_cohorts": num_cohorts}


def _quartiles(values: NDArray[Any]) -> dict[str, float]:
    names = ("min", "lower", "median", "upper", "max")
    return dict(zip(names, map(float, np.quantile(values, (0, 0.25, 0.5, 0.75, 1))), strict=True))


def _refuse_empty(data: FederatedData) -> None:
    if not len(data.with_data):
        raise FedeveError("nobody has data", got=data.num_clients, do="give a federation with at least one example")
