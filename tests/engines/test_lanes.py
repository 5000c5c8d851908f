"""The lane engine gives the reference engine's numbers, whoever shares the pool and wherever it was stopped."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedeve import (
    FedAvg,
    FederatedData,
    FedEve,
    FedeveError,
    LocalWork,
    Record,
    Run,
    Scaffold,
    all_methods,
    datasets,
    simulate,
)
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import Interrupted, Progress

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "work", [{"epochs": 1}, {"epochs": 3}, {"optimizer": "adam", "lr": 0.01}, {"steps": 5}], ids=str
)
@pytest.mark.parametrize("name", all_methods())
def test_lanes_are_the_reference(name: str, work: dict[str, Any], device: str) -> None:
    changes = {"method": all_methods()[name](), "local": LocalWork(**({"lr": 0.05, "batch": 8} | work))}
    for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-4)):
        run = some_run(dtype=dtype, **changes)
        reference = simulate(run, engine="reference", device="cpu")
        assert_close(simulate(run, engine="lanes", device=device), reference, tolerance)


@pytest.mark.parametrize(
    "work",
    [{"momentum": 0.9, "weight_decay": 0.01}, {"clip": 0.1}, {"optimizer": "adam", "weight_decay": 0.1, "clip": 1.0}],
    ids=str,
)
def test_all_of_local_work_is_followed(work: dict[str, Any]) -> None:
    run = some_run(local=LocalWork(lr=0.05, batch=8, **work))
    assert_close(simulate(run, engine="lanes"), simulate(run, engine="reference"), 1e-9)


def test_plans_longer_than_a_window_are_brought_in_pieces() -> None:
    run = some_run(local=LocalWork(lr=0.01, batch=1, epochs=5), rounds=2)
    assert max(SIZES) * 5 > 128
    assert_close(simulate(run, engine="lanes"), simulate(run, engine="reference"), 1e-9)


def test_large_cohorts_are_summarised_in_parts() -> None:
    x, y = np.random.default_rng(0).normal(size=(300, 6)), np.arange(300) % 3
    data = FederatedData.from_arrays(x, y, [[row, row + 150] for row in range(150)], x_test=x, y_test=y)
    run = some_run(data=data, cohort=150, rounds=2)
    assert_close(simulate(run, engine="lanes"), simulate(run, engine="reference"), 1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_does_not_notice_who_shares_its_pool(device: str) -> None:
    mine = [some_run(method=FedEve(), dtype="float32"), some_run(method=Scaffold(), dtype="float32")]
    others = [
        some_run(method=cls(), seed=seed, dtype="float32", cohort=4 + seed, local=LocalWork(lr=0.02 * seed, batch=8))
        for seed in (1, 2, 3)
        for cls in all_methods().values()
    ]
    shared = [dataclasses.replace(run, model=mine[0].model) for run in (*mine, *others)]
    target = torch.device(device)
    together = play(Lanes(shared, target, width=16))
    for number in range(2):
        alone = play(Lanes([shared[number]], target, width=16))
        assert torch.equal(together[number], alone[0])


def play(engine: Lanes) -> list[torch.Tensor]:
    """Final parameters, with the engine's own hands."""
    from fedeve.engines.loop import Book, _play

    books = [Book(engine, number, None, resume=False, every=1e9) for number in range(len(engine.runs))]
    _play(engine, books, None)
    return [book.record.params for book in books]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_stopped_and_resumed_is_never_stopped_to_the_bit(tmp_path: Path, device: str, stop_at: int) -> None:
    run = some_run(method=Scaffold(), dtype="float32")

    def stop(progress: Progress) -> None:
        if progress.num_rounds == stop_at:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"engine": "lanes", "device": device}
    whole = simulate(run, out=tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        simulate(run, out=tmp_path / "parts", watch=stop, **options)
    resumed = simulate(run, out=tmp_path / "parts", resume=True, **options)
    assert torch.equal(whole.params, resumed.params) and whole.lines == resumed.lines


def test_a_run_is_not_resumed_by_another_engine(tmp_path: Path) -> None:
    simulate(some_run(), engine="lanes", out=tmp_path)
    before = (tmp_path / "record.jsonl").read_bytes()
    with pytest.raises(
        FedeveError, match="started with another engine: got 'reference'; resume it with engine='lanes'"
    ):
        simulate(some_run(), engine="reference", out=tmp_path, resume=True)
    assert (tmp_path / "record.jsonl").read_bytes() == before


def test_a_client_that_diverges_is_its_own_problem() -> None:
    """One client's inputs are infinite: it is left out and named, and the others' numbers are those without it."""
    x = DATA.x.copy()
    bad = 8
    x[DATA.rows(bad)] = np.inf
    poisoned = dataclasses.replace(DATA, x=x)
    run = some_run(data=poisoned, cohort=12, method=FedAvg(), dropout=0.0, rounds=3)
    ours, theirs = simulate(run, engine="lanes"), simulate(run, engine="reference")
    assert_close(ours, theirs, 1e-9)
    assert all(clients == [bad] for clients in ours.left_out.values()) and len(ours.left_out) == 3


@pytest.mark.parametrize("model", ["linear", "lenet5", "cnn"])
def test_named_models_walk_in_lanes(model: str) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (60, 14, 14), dtype=np.uint8), np.arange(60) % 5
    data = FederatedData.from_arrays(x, y, np.array_split(np.arange(60), 6), x_test=x, y_test=y)
    run = some_run(data=data, model=model, cohort=3, rounds=2, dropout=0.0)
    assert_close(simulate(run, engine="lanes"), simulate(run, engine="reference"), 1e-9)


def test_what_lanes_cannot_do_is_refused_before_the_first_round() -> None:
    with pytest.raises(FedeveError, match="lanes have no random layers yet: got Dropout at '1'"):
        simulate(some_run(model=nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))), engine="lanes")
    with pytest.raises(FedeveError, match="the model cannot read this data"):
        simulate(some_run(model=nn.Linear(5, 3)), engine="lanes")


def test_resnet18_walks_in_lanes() -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), dtype=np.uint8), np.arange(16) % 4
    data = FederatedData.from_arrays(x, y, np.array_split(np.arange(16), 4), x_test=x, y_test=y)
    run = some_run(data=data, model="resnet18", cohort=2, rounds=1, dropout=0.0, local=LocalWork(lr=0.1, batch=4))
    assert_close(simulate(run, engine="lanes"), simulate(run, engine="reference"), 1e-9)


@pytest.mark.skipif(not os.environ.get("FEDEVE_DATA"), reason="needs the real MovieLens-1M: set FEDEVE_DATA")
def test_din_and_its_gathered_features_walk_in_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path))
    data = datasets.load("movielens1m")
    data = dataclasses.replace(data, x_test=data.x_test[:1000], y_test=data.y_test[:1000])
    work = LocalWork(optimizer="adam", lr=0.01, batch=100)
    run = some_run(data=data, model="din", cohort=3, rounds=2, dropout=0.0, local=work)
    assert_close(simulate(run, engine="lanes"), simulate(run, engine="reference"), 1e-9)
