"""Whole runs with our kernels give the reference engine's numbers. Without a GPU Triton interprets them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from walking import assert_close, in_rows, play, some_run

from fedeve import FederatedData, LocalWork, Run, Scaffold, all_methods, simulate
from fedeve.engines.lanes import Lanes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", ["lenet5", "cnn", "resnet18"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("tf32", 3e-2)])
def test_kernels_give_the_reference_numbers(model: str, precision: str, tolerance: float) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (120, 3, 16, 16), dtype=np.uint8), np.arange(120) % 5
    data = FederatedData.from_arrays(x, y, np.array_split(np.arange(120), 6), x_test=x, y_test=y)
    # At this rate ResNet-18 amplifies rounding: float32 and float64 end 3e-8 apart after one round of the reference and
    # 4e-3 after five.
    rounds = 1 if model == "resnet18" else 5
    run = some_run(data=data, model=model, cohort=3, rounds=rounds, dropout=0.0, dtype="float32")
    ours = simulate(run, engine="lanes", device="cuda", precision=precision)
    exact = simulate(run, engine="reference", device="cpu")
    assert (ours.params.cpu() - exact.params).norm() / exact.params.norm() < tolerance


def by_hand(*runs: Run, width: int | None = None) -> list[torch.Tensor]:
    """The parameters that our kernels end at; without a GPU Triton interprets them."""
    pytest.importorskip("triton", reason="hand-batched layers need Triton")
    from fedeve.engines.batched import Batched

    class ByHand(Lanes):
        def _pool(self, number: int, width: int) -> Any:
            pool: Any = super()._pool(number, width)
            pool.by_hand, pool.layers = True, Batched("ieee", pool.at_work)
            return pool

    target = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [params.cpu() for params in play(ByHand(list(runs), target, width=width, batched=True))]


def test_whole_runs_with_our_kernels_are_the_reference() -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (8, 12, 12), dtype=np.uint8), np.arange(8) % 3
    data = FederatedData.from_arrays(x, y, np.array_split(np.arange(8), 4), x_test=x, y_test=y)
    changes = {"data": data, "model": "lenet5", "cohort": 2, "rounds": 2, "dropout": 0.0, "dtype": "float32"}
    run = some_run(method=Scaffold(), local=LocalWork(lr=0.05, batch=2), **changes)
    reference = simulate(run, engine="reference", device="cpu")
    assert (by_hand(run)[0] - reference.params).norm() / reference.params.norm() < 1e-6


class Odd(nn.Module):
    """A parameter that is one number, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.idle = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, 3))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_odd_parameters_walk_in_lanes(momentum: float) -> None:
    torch.manual_seed(0)
    run = some_run(model=Odd(), dtype="float32", local=LocalWork(lr=0.05, batch=8, momentum=momentum))
    reference = simulate(run, engine="reference", device="cpu")
    assert_close(in_rows(run), reference, 1e-5)
    assert (by_hand(run)[0] - reference.params).norm() / reference.params.norm() < 1e-5


class Categories(nn.Module):
    """Rows as DIN sees them, stored as they are."""

    cardinalities = (5, 2, 7, 21, 3, 9)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.long()


@pytest.mark.parametrize("few", [128, 8])
def test_whole_runs_of_din_with_our_kernels_are_the_reference(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories padded by up to all of them; a batch's 24 items are few or many, and then lie in several blocks."""
    pytest.importorskip("triton", reason="hand-batched layers need Triton")
    from fedeve.engines import lookup

    monkeypatch.setattr(lookup, "_FEW", few)
    monkeypatch.setattr(lookup, "_SIDE", 8)
    history = 5
    rng = np.random.default_rng(0)
    counts = (*Categories.cardinalities, *[Categories.cardinalities[-1]] * history)
    x = np.stack([rng.integers(1, count, 16) for count in counts], axis=1)
    x[:, 6:][np.arange(history) < rng.integers(0, history + 1, (16, 1))] = 0
    y = np.arange(16) % 4 == 0
    clients = [np.arange(7), np.arange(7, 9), np.arange(9, 16)]
    data = FederatedData.from_arrays(
        x, y * 1, clients, x_test=x[:4], y_test=y[:4] * 1, task="ranking", gather=Categories()
    )
    work = LocalWork(lr=0.01, batch=4, optimizer="adam")
    changes = {"data": data, "model": "din", "cohort": 3, "rounds": 1, "dropout": 0.0, "dtype": "float32"}
    run = some_run(local=work, **changes)
    reference = simulate(run, engine="reference", device="cpu")
    assert (by_hand(run)[0] - reference.params).norm() / reference.params.norm() < 1e-5


@pytest.mark.parametrize("work", [{"lr": 0.05}, {"lr": 0.01, "optimizer": "adam"}], ids=str)
def test_fused_steps_in_shared_lanes_are_the_reference(work: dict[str, Any]) -> None:
    """Ragged clients of three methods: counts of steps differ, and a lane's next client is corrected otherwise."""
    changes = {"model": "linear", "rounds": 3, "dtype": "float32", "local": LocalWork(batch=8, epochs=2, **work)}
    runs = [some_run(method=all_methods()[name](), **changes) for name in ("scaffold", "fedprox", "fedavg")]
    for ours, run in zip(by_hand(*runs, width=4), runs, strict=True):
        reference = simulate(run, engine="reference", device="cpu")
        assert (ours - reference.params).norm() / reference.params.norm() < 1e-5
