"""What the tests of the lane engine share: a ragged federation, runs on it, and the pool of a GPU on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedeve import FederatedData, FedEve, LocalWork, Record, Run
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import Book, _play

__all__ = ["DATA", "SIZES", "assert_close", "in_rows", "play", "some_run"]

SIZES = [1, 7, 0, 40, 13, 20, 3, 0, 66, 21, 5, 31]


def ragged(seed: int = 0) -> FederatedData:
    """Clients of very different sizes, two of them empty."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(SIZES) + 40, 6)).astype(np.float64)
    y = (x @ rng.normal(size=(6, 3))).argmax(1)
    clients = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return FederatedData.from_arrays(x, y, clients, x_test=x[-40:], y_test=y[-40:])


DATA = ragged()


def some_run(**changes: Any) -> Run:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3))
    defaults: dict[str, Any] = {"method": FedEve(), "data": DATA, "model": model, "rounds": 5, "cohort": 6}
    defaults |= {"eval_every": 2, "seed": 3, "dtype": "float64", "empty": "keep", "dropout": 0.15}
    return Run(**(defaults | {"local": LocalWork(lr=0.05, batch=8)} | changes))


def assert_close(ours: Record, theirs: Record, tolerance: float) -> None:
    gap = (ours.params.cpu() - theirs.params.cpu()).norm() / theirs.params.norm()
    assert gap < tolerance
    assert [line["answered"] for line in ours.lines] == [line["answered"] for line in theirs.lines]
    assert ours.lost == theirs.lost and ours.left_out == theirs.left_out
    for metric in theirs.metrics:
        assert ours.metric(metric) == pytest.approx(theirs.metric(metric), rel=100 * tolerance)


def in_rows(run: Run, width: int | None = None) -> Record:
    """The pool of a GPU on a CPU: lanes are rows of one batch."""
    engine = Lanes([run], torch.device("cpu"), batched=True, width=width)
    book = Book(engine, 0, None, resume=False, every=1e9)
    _play(engine, [book], None)
    return book.record


def play(engine: Lanes) -> list[torch.Tensor]:
    """Final parameters, with the engine's own hands."""
    books = [Book(engine, number, None, resume=False, every=1e9) for number in range(len(engine.runs))]
    _play(engine, books, None)
    return [book.record.params for book in books]
