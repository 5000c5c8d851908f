"""Short runs of the reference engine on small blobs, and its turns one by one."""

from __future__ import annotations

import numpy as np
import torch

from fedeve import (
    FedAvg,
    FederatedData,
    LocalWork,
    Record,
    Run,
)
from fedeve import simulate as simulate_anywhere
from fedeve.engines.reference import Reference
from fedeve.memory import Memory

CPU = torch.device("cpu")
SIZES = [5, 9, 1, 30, 12, 7]


def simulate(run: Run, **options) -> Record:
    return simulate_anywhere(run, **{"engine": "reference", "device": "cpu", **options})


def blobs(sizes: list[int] = SIZES, *, seed: int = 0, num_test: int = 50) -> FederatedData:
    """Three linearly separable classes in four dimensions, dealt to clients of these sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes) + num_test, 4))
    y = (x @ rng.normal(size=(4, 3))).argmax(-1)
    clients = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    train, test = slice(0, sum(sizes)), slice(sum(sizes), None)
    return FederatedData.from_arrays(x[train], y[train], clients, x_test=x[test], y_test=y[test], num_classes=3)


def short_run(**changes) -> Run:
    options = {
        "method": FedAvg(), "data": blobs(), "model": "linear", "rounds": 4, "cohort": 3, "dtype": "float64", "seed": 1,
        "local": LocalWork(lr=0.2, batch=4),
    }  # fmt: skip
    return Run(**(options | changes))


def turns_of(run: Run, num_rounds: int | None = None):
    """The engine's turns, with what clients remember put back as its caller must."""
    learner = Reference(run, CPU)
    memory = Memory(run.method.remembers, like=learner.start)
    state, turns = run.method.init(learner.start, num_clients=run.data.num_clients), []
    for turn in learner.play(state, memory, 0):
        memory.put(turn.writes)
        turns.append(turn)
        if len(turns) == num_rounds:
            break
    return turns


def logits_of(params: torch.Tensor, x: np.ndarray) -> torch.Tensor:
    weight, bias = params[:12].reshape(3, 4), params[12:]
    return torch.from_numpy(x) @ weight.T + bias
