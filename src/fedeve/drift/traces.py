"""Traces: both drifts of a model's gradients, round after round, while it trains or at a point where it stands.

In a round, period drift is the cohort's gradient minus the full one, client drift one client's minus the cohort's,
and SGD's noise the gradient of an iid batch with as many examples as the cohort has, minus the full one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import seeds
from ..data.federated import FederatedData
from ..engines.reference import Reference
from ..errors import FedeveError
from ..memory import Memory
from ..run import Run
from .objectives import ModelObjective

Vectors = NDArray[np.float32]
Tell = Callable[[int], None]
_LARGEST = 2**31  # bytes of gradients held at once


@dataclass(frozen=True)
class Trace:
    """Vectors over T rounds, each [T, D]: what is asked of them later decides what they are good for."""

    full: Vectors
    """The full gradient of every round."""
    period: Vectors
    """Cohort's gradient minus the full one."""
    client: Vectors
    """One client's gradient minus its cohort's."""
    batch: Vectors
    """An iid batch's gradient minus the full one."""

    def pick(self, number: int, *, seed: int = 0) -> NDArray[np.int64]:
        """So many parameters drawn among those whose gradient is not always zero."""
        alive = np.flatnonzero(np.abs(self.period).max(0) > 0)
        if not len(alive):
            raise FedeveError("no parameter's gradient ever moves", got=0, do="trace more clients or another model")
        return np.sort(seeds.generator(seed, "traced").choice(alive, size=min(number, len(alive)), replace=False))


def some_clients(data: FederatedData, number: int, *, examples: int | None = None, seed: int = 0) -> FederatedData:
    """The federation of so many of its clients with data, drawn uniformly, and of so many of their examples at most."""
    rng, present = seeds.generator(seed, "some clients"), data.with_data
    chosen = np.sort(rng.choice(present, size=min(number, len(present)), replace=False))
    parts = [rng.permutation(data.rows(client))[:examples] for client in chosen.tolist()]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return dataclasses.replace(data, order=np.concatenate(parts), offsets=offsets)


def trace_training(run: Run, *, device: str = "cpu", tell: Tell | None = None) -> Trace:
    """The traces of a run's rounds, each at the parameters the round begins with; the run is played meanwhile."""
    run = dataclasses.replace(run, watch_drift=False, eval_every=run.rounds)  # nobody asks for its metrics
    objective = ModelObjective(
        run.data, run.model, model_options=dict(run.model_options), seed=run.seed, dtype=run.dtype, device=device
    )
    _refuse_large(4 * run.rounds, len(objective.start))
    player = Reference(run, objective.device)
    memory = Memory(run.method.remembers, like=player.start)
    turns = player.play(run.method.init(player.start, num_clients=run.data.num_clients), memory, 0)
    place = {int(client): number for number, client in enumerate(objective.clients)}
    out, params = _Rows(run.rounds, len(player.start)), player.start
    for round in range(run.rounds):
        cohort = [place[client] for client in run.cohort_of(round).tolist() if client in place]
        if cohort:
            grads = torch.stack([objective.loss_and_gradient(client, params)[1] for client in cohort])
            num_examples = int(objective.weights[cohort].sum())
            full = _full(objective, params, cohort, grads)
            out.put(round, full, grads, _batch(objective, params, num_examples, run.seed, round))
        turn = next(turns)
        memory.put(turn.writes)
        params = turn.state.params
        if tell is not None:
            tell(round + 1)
    return out.trace()


def _full(objective: ModelObjective, params: Tensor, cohort: list[int], grads: Tensor) -> Tensor:
    """The gradient over all rows; the cohort's part of it is known already."""
    weights = torch.as_tensor(objective.weights[cohort], dtype=grads.dtype, device=grads.device)
    rest = np.setdiff1d(np.arange(len(objective.weights)), cohort)
    rows = [objective.data.rows(int(client)) for client in objective.clients[rest].tolist()]
    total, count = weights @ grads, float(objective.weights[rest].sum())
    if rows:
        total = total + count * objective.on_rows(np.concatenate(rows), params)[1]
    return total / float(objective.weights.sum())


def trace_standing(
    objective: ModelObjective,
    params: Tensor | None = None,
    *,
    rounds: int,
    cohort: int,
    seed: int = 0,
    tell: Tell | None = None,
) -> Trace:
    """The traces of cohorts at one point: every client's gradient is computed once, so cohorts cost nothing."""
    where = objective.start if params is None else params
    _refuse_large(len(objective.weights) + 4 * rounds, len(where))
    grads = torch.stack([objective.loss_and_gradient(k, where)[1] for k in range(len(objective.weights))])
    shares = torch.as_tensor(objective.weights / objective.weights.sum(), dtype=grads.dtype, device=grads.device)
    full, out = shares @ grads, _Rows(rounds, len(where))
    for round in range(rounds):
        chosen = seeds.cohort(len(grads), cohort, seed=seed, round=round)
        num_examples = int(objective.weights[chosen].sum())
        out.put(round, full, grads[chosen], _batch(objective, where, num_examples, seed, round))
        if tell is not None:
            tell(round + 1)
    return out.trace()


def _batch(objective: ModelObjective, params: Tensor, num_examples: int, seed: int, round: int) -> Tensor:
    """The gradient of as many rows as a cohort has, drawn from all clients' together without replacement."""
    rng = seeds.generator(seed, round, "iid batch")
    rows = rng.choice(objective.data.order, size=min(num_examples, len(objective.data.order)), replace=False)
    return objective.on_rows(rows, params)[1]


class _Rows:
    """Collects the vectors of rounds; a round in which nobody had data leaves none."""

    def __init__(self, rounds: int, dim: int) -> None:
        self.arrays = [np.zeros((rounds, dim), dtype=np.float32) for _ in range(4)]
        self.kept: list[int] = []

    def put(self, round: int, full: Tensor, grads: Tensor, batch: Tensor) -> None:
        mean = grads.mean(0)
        vectors = (full, mean - full, grads[0] - mean, batch - full)
        for array, vector in zip(self.arrays, vectors, strict=True):
            array[round] = vector.cpu().numpy()
        self.kept.append(round)

    def trace(self) -> Trace:
        if not self.kept:
            raise FedeveError("nobody had data in any round", got=0, do="trace more rounds or larger cohorts")
        return Trace(*(array[self.kept] for array in self.arrays))


def _refuse_large(count: int, dim: int) -> None:
    if 4 * count * dim > 4 * _LARGEST:
        raise FedeveError(
            "so many gradients do not fit into memory",
            got=f"{count} of {dim} numbers",
            do="trace fewer rounds or a smaller model",
        )
