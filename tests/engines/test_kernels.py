"""Whole runs with our kernels give the reference engine's numbers. Without a GPU Triton interprets them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from walking import assert_close, in_rows, play, some_run

from fedeve import Correction, FederatedData, LocalWork, Run, Scaffold, all_methods, simulate
from fedeve.engines.lanes import Lanes
from fedeve.engines.pool import Batch, OnDevice, Task
from fedeve.layout import Layout
from fedeve.models.norm import NormReLU
from fedeve.models.resnet import _Block


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

    class ByHand(Lanes):
        def _pool(self, number: int, width: int) -> Any:
            run, model, layout = self.runs[number], self.models[number].train(), self.layouts[number]
            rest = (run.local, run.data.task, width)
            return Batch(model, layout, self.data(run), *rest, precision="ieee", by_hand=True)

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


class Residual(nn.Module):
    """Convolutions of all sorts: with a padded input, wide ones, a strided and a short one, one that is read twice.

    The kernel of `odd` is also looked at by itself, so that its gradient has two sources, and that of `still` is first
    read where it has none: in the backward pass that is when its weights would already have been moved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), NormReLU(2, 16)
        self.block = _Block(16, 32, 2, groups=2)
        self.twice, self.odd = nn.Conv2d(32, 32, (1, 2), bias=False), nn.Conv2d(32, 16, (2, 1), bias=False)
        self.still, self.head = nn.Conv2d(32, 32, 1, bias=False), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.norm(self.stem(x)))
        x = self.still(nn.functional.conv2d(x, self.still.weight.detach()))
        x = self.odd(self.twice(self.twice(x)))
        return self.head(x.mean((-2, -1))) + self.odd.weight.square().sum()


@pytest.mark.parametrize(
    ("work", "piece", "tolerance"),
    [
        ({}, 2048, 3e-5),  # 1.1e-5 on an H200, whose sums have another order
        ({}, 32, 3e-5),
        pytest.param({"momentum": 0.5}, 2048, 3e-5, marks=pytest.mark.slow),
        # Adam makes whole steps of gradients that are rounding alone.
        pytest.param({"optimizer": "adam"}, 2048, 0.1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_wide_convolutions_walk_in_lanes_as_in_the_reference(
    work: dict[str, Any], piece: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their channels last, moved in the backward pass where that is right; lanes change from method to method."""
    pytest.importorskip("triton", reason="hand-batched layers need Triton")
    from fedeve.engines import channels

    monkeypatch.setattr(channels, "suits", lambda weight, precision: weight.shape[0] % channels.MULTIPLE == 0)
    monkeypatch.setattr(channels, "_PIECE", piece)
    x, y = np.random.default_rng(0).integers(0, 256, (5, 3, 6, 6), dtype=np.uint8), np.arange(5) % 3
    data = FederatedData.from_arrays(x, y, [np.arange(3), np.arange(3, 5)], x_test=x, y_test=y)
    torch.manual_seed(0)
    changes = {"data": data, "model": Residual(), "cohort": 2, "dropout": 0.0, "dtype": "float32", "eval_every": 9}
    local = LocalWork(lr=0.02, batch=2, **work)
    methods = {"fedprox": 1, "scaffold": 2}  # and rounds: control variates are zero in the first
    runs = [some_run(method=all_methods()[m](), rounds=n, local=local, **changes) for m, n in methods.items()]
    for ours, run in zip(by_hand(*runs, width=2), runs, strict=True):
        reference = simulate(run, engine="reference", device="cpu")
        start = Layout.of(run.build_model()).flatten(dict(run.build_model().named_parameters()))
        assert (ours - reference.params).norm() < tolerance * (reference.params - start).norm()


def test_plain_sgd_moves_those_kernels_at_once_that_are_read_once_and_have_one_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they are moved as everything else is, from gradients that are written: right, but for nothing."""
    pytest.importorskip("triton", reason="hand-batched layers need Triton")
    from fedeve.engines import channels
    from fedeve.engines.by_hand import ByHand

    monkeypatch.setattr(channels, "suits", lambda weight, precision: weight.shape[0] % channels.MULTIPLE == 0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = np.random.default_rng(0).integers(0, 256, (4, 3, 6, 6), dtype=np.uint8), np.arange(4) % 3
    model = Residual().to(device)
    layout, data = Layout.of(model), OnDevice(FederatedData.from_arrays(x, y, [range(4)]), torch.float32, device)
    pool = Batch(model, layout, data, LocalWork(batch=2), "classes", 1, precision="ieee", by_hand=True)
    start = layout.flatten(dict(model.named_parameters())).detach()
    pool.seat([Task(0, start, Correction(0.0, None), LocalWork(lr=0.02, batch=2), np.array([[0, 1], [2, 3]]))])
    assert pool.advance().done == [0]
    assert isinstance(pool.vectors, ByHand) and pool.vectors.descent is not None
    begins = dict(zip(np.cumsum([0, *layout.sizes]).tolist(), layout.names, strict=False))
    moved = {begins[first] for first in pool.vectors.descent.moved}
    assert moved == {"block.conv1.weight", "block.conv2.weight", "block.shortcut.0.weight"}
