"""The lane engine gives the reference engine's numbers, whoever shares the pool and wherever it was stopped."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from walking import DATA, SIZES, assert_close, in_rows, play, some_run

from fedeve import (
    FedAvg,
    FederatedData,
    FedEve,
    FedeveError,
    LocalWork,
    Run,
    Scaffold,
    all_methods,
    datasets,
    simulate,
)
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import Interrupted, Progress
from fedeve.engines.profile import Profile
from fedeve.engines.server import _finite

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


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
        if device == "cpu":
            assert_close(in_rows(run), reference, tolerance)


@pytest.mark.parametrize(
    "work",
    [{"momentum": 0.9, "weight_decay": 0.01}, {"clip": 0.1}, {"optimizer": "adam", "weight_decay": 0.1, "clip": 1.0}],
    ids=str,
)
def test_all_of_local_work_is_followed(work: dict[str, Any]) -> None:
    run = some_run(local=LocalWork(lr=0.05, batch=8, **work))
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


def test_plans_longer_than_a_window_are_brought_in_pieces() -> None:
    run = some_run(local=LocalWork(lr=0.01, batch=1, epochs=5), rounds=2)
    assert max(SIZES) * 5 > 128
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


@pytest.mark.parametrize("name", all_methods())
def test_a_cohort_of_empty_clients_is_a_round_in_which_nobody_moves(name: str) -> None:
    run = some_run(method=all_methods()[name](), cohort=1, rounds=24, dropout=0.0)
    assert any(not len(DATA.rows(client)) for number in range(24) for client in run.cohort_of(number))
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


@st.composite
def any_run(draw: st.DrawFn) -> Run:
    """A few clients of few examples, many of them empty or silent."""
    sizes = draw(st.lists(st.sampled_from([0, 0, 0, 1, 3, 8]), min_size=2, max_size=8).filter(any))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(sizes) + 5, 4)), rng.integers(0, 3, sum(sizes) + 5)
    clients = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    work = [{}, {"epochs": 2}, {"steps": 3}, {"optimizer": "adam"}, {"momentum": 0.9}, {"clip": 0.1}]
    empty = draw(st.sampled_from(["keep", "skip"]))
    return Run(
        method=all_methods()[draw(st.sampled_from(sorted(all_methods())))](),
        data=FederatedData.from_arrays(x, y, clients, x_test=x[-5:], y_test=y[-5:]),
        model="linear",
        dtype="float64",
        rounds=draw(st.integers(1, 5)),
        cohort=draw(st.integers(1, len(sizes) if empty == "keep" else sum(map(bool, sizes)))),
        empty=empty,
        dropout=draw(st.sampled_from([0.0, 0.4, 0.9])),
        dealing=draw(st.sampled_from(["own", "evenly", "dirichlet"])),
        local=LocalWork(lr=0.05, batch=draw(st.integers(1, 4)), **draw(st.sampled_from(work))),
        seed=draw(st.integers(0, 99)),
        eval_every=draw(st.integers(1, 3)),
    )


@settings(max_examples=100, deadline=None)
@given(any_run(), st.integers(1, 5))
def test_whatever_the_run_lanes_are_the_reference(run: Run, width: int) -> None:
    ours, theirs = in_rows(run, width), simulate(run, engine="reference")
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-9, atol=1e-12)
    assert ours.lost == theirs.lost and ours.left_out == theirs.left_out
    assert [line["answered"] for line in ours.lines] == [line["answered"] for line in theirs.lines]


def test_large_cohorts_are_summarised_in_parts() -> None:
    x, y = np.random.default_rng(0).normal(size=(300, 6)), np.arange(300) % 3
    data = FederatedData.from_arrays(x, y, [[row, row + 150] for row in range(150)], x_test=x, y_test=y)
    run = some_run(data=data, cohort=150, rounds=2)
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


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
    for batched, width in ((True, 16), (False, 3)) if device == "cpu" else ((True, 16),):
        together = play(Lanes(shared, target, width=width, batched=batched))
        for number in range(2):
            alone = play(Lanes([shared[number]], target, width=width, batched=batched))
            assert torch.equal(together[number], alone[0])


@pytest.mark.parametrize("batched", [True, False])
def test_examples_dealt_in_two_ways_share_a_pool(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each run's numbers are the reference's."""
    evenly = [part.tolist() for part in np.array_split(np.arange(len(DATA.y)), 7)]
    other = FederatedData.from_arrays(DATA.x.copy(), DATA.y, evenly, x_test=DATA.x_test, y_test=DATA.y_test)
    runs = [some_run(), some_run(method=Scaffold()), some_run(data=other), some_run(data=other, seed=5)]
    runs = [dataclasses.replace(run, model=runs[0].model) for run in runs]
    pools = []
    monkeypatch.setattr(Lanes, "_pool", lambda *args, of=Lanes._pool: pools.append(args) or of(*args))
    together = play(Lanes(runs, torch.device("cpu"), width=3, batched=batched))
    assert len(pools) == 1
    for run, params in zip(runs, together, strict=True):
        torch.testing.assert_close(params, simulate(run, engine="reference").params, rtol=1e-9, atol=1e-12)


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
    theirs = simulate(run, engine="reference")
    for ours in (simulate(run, engine="lanes"), in_rows(run)):
        assert_close(ours, theirs, 1e-9)
        assert all(clients == [bad] for clients in ours.left_out.values()) and len(ours.left_out) == 3


def test_a_cohort_of_nobody_but_those_who_diverge_is_a_lost_round() -> None:
    everybody = dataclasses.replace(DATA, x=np.full_like(DATA.x, np.inf))
    run = some_run(data=everybody, rounds=2, dropout=0.0)
    theirs = simulate(run, engine="reference")
    for ours in (simulate(run, engine="lanes"), in_rows(run)):
        assert ours.lost == theirs.lost == [1, 2] and ours.left_out == theirs.left_out
        assert torch.equal(ours.params, theirs.params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(poison: float, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for column in (0, 40, 99):
        updates, control = torch.full((4, 100), largest, dtype=dtype), torch.full((4, 100), -largest, dtype=dtype)
        updates[1, column], control[2, column] = poison, poison
        assert _finite(updates, control).tolist() == [True, False, False, True]


@pytest.mark.parametrize("cohort", [1, 12])
def test_clients_without_data_are_left_out_like_others_once_the_model_is_not_finite(cohort: int) -> None:
    """What they send back is what they got."""
    run = some_run(method=FedAvg(server_lr=1e45), cohort=cohort, dropout=0.0, dtype="float32", rounds=8)
    theirs = simulate(run, engine="reference")
    empty = {client for client in range(12) if not SIZES[client]}
    assert not theirs.params.isfinite().all() and empty & {c for some in theirs.left_out.values() for c in some}
    for ours in (simulate(run, engine="lanes"), in_rows(run)):
        assert ours.left_out == theirs.left_out and ours.lost == theirs.lost
        assert [line["answered"] for line in ours.lines] == [line["answered"] for line in theirs.lines]


@pytest.mark.parametrize("model", ["linear", "lenet5", "cnn"])
def test_named_models_walk_in_lanes(model: str) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (60, 14, 14), dtype=np.uint8), np.arange(60) % 5
    data = FederatedData.from_arrays(x, y, np.array_split(np.arange(60), 6), x_test=x, y_test=y)
    run = some_run(data=data, model=model, cohort=3, rounds=2, dropout=0.0)
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


def test_what_lanes_cannot_do_is_refused_before_the_first_round() -> None:
    with pytest.raises(FedeveError, match="lanes have no random layers yet: got Dropout at '1'"):
        simulate(some_run(model=nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))), engine="lanes")
    with pytest.raises(FedeveError, match="the model cannot read this data"):
        simulate(some_run(model=nn.Linear(5, 3)), engine="lanes")


def test_resnet18_walks_in_lanes() -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), dtype=np.uint8), np.arange(16) % 4
    data = FederatedData.from_arrays(x, y, np.array_split(np.arange(16), 4), x_test=x, y_test=y)
    run = some_run(data=data, model="resnet18", cohort=2, rounds=1, dropout=0.0, local=LocalWork(lr=0.1, batch=4))
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


@pytest.mark.skipif(not os.environ.get("FEDEVE_DATA"), reason="needs the real MovieLens-1M: set FEDEVE_DATA")
def test_din_and_its_gathered_features_walk_in_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path))
    data = datasets.load("movielens1m")
    data = dataclasses.replace(data, x_test=data.x_test[:1000], y_test=data.y_test[:1000])
    work = LocalWork(optimizer="adam", lr=0.01, batch=100)
    run = some_run(data=data, model="din", cohort=3, rounds=2, dropout=0.0, local=work)
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes"), reference, 1e-9)
    assert_close(in_rows(run), reference, 1e-9)


def test_on_a_cpu_the_number_of_processes_changes_nothing() -> None:
    run = some_run(method=Scaffold(), dtype="float32")
    records = [simulate(run, engine="lanes", width=width) for width in (1, 2, 5)]
    assert all(torch.equal(record.params, records[0].params) for record in records)
    assert all(record.lines == records[0].lines for record in records)


def test_auto_is_lanes_unless_a_layer_is_random() -> None:
    assert simulate(some_run(rounds=1)).header["engine"] == "lanes"
    random = some_run(model=nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), rounds=1)
    assert simulate(random).header["engine"] == "reference"


def test_a_run_is_continued_by_the_engine_it_was_begun_with_unless_told(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        simulate(some_run(), engine="reference", out=tmp_path, watch=stop)
    assert simulate(some_run(), out=tmp_path, resume=True).header["engine"] == "reference"


def test_a_worker_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedeve.engines import workers

    born: list[int] = []
    fork = os.fork

    def remember() -> int:
        child = fork()
        if child:
            born.append(child)
        return child

    def kill(progress: Progress) -> None:
        if progress.num_rounds == 2:
            os.kill(born[0], 9)

    monkeypatch.setattr(workers.os, "fork", remember)
    with pytest.raises(FedeveError, match="a worker process ended in mid-work: got the process of lane 0; look for a"):
        simulate(some_run(rounds=20), engine="lanes", width=2, watch=kill)
    with pytest.raises(ProcessLookupError):
        os.kill(born[1], 0)


def test_an_error_in_a_worker_reaches_its_master() -> None:
    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise ValueError("nothing works")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="ValueError: nothing works"):
        simulate(some_run(model=Broken(6, 3)), engine="lanes", width=2)


def test_profiles_say_where_the_time_went() -> None:
    profile = Profile()
    engine = Lanes([some_run(dropout=0.0)], torch.device("cpu"), width=4, batched=True, profile=profile)
    play(engine)
    about = profile.describe()
    sizes = [SIZES[client] for round in range(5) for client in engine.runs[0].cohort_of(round)]
    assert about["client_steps"] == sum(-(-size // 8) for size in sizes)
    assert 0 < about["occupancy"] <= 1 and profile.lane_steps % 4 == 0
    assert all(about["stages"][name] > 0 for name in ("training", "server", "evaluation"))
    assert sum(about["stages"].values()) <= about["seconds"]
    assert f"{about['client_steps']:,} client-steps" in profile.lines()[0]


def test_models_of_few_channels_are_told_by_all_their_convolutions() -> None:
    pytest.importorskip("triton", reason="hand-batched layers need Triton")
    from fedeve.engines.lanes import _has_few_channels
    from fedeve.models import create

    found = {name: _has_few_channels(create(name, (28, 28), 62)) for name in ("lenet5", "cnn", "linear")}
    assert found == {"lenet5": True, "cnn": False, "linear": False}


def test_where_a_gpu_was_used_before_a_cpu_s_lanes_are_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes forked from such a one could take no gradients; the numbers are the same."""
    run = some_run(rounds=2)
    apart = simulate(run, engine="lanes", device="cpu", width=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "fork", None)
    assert torch.equal(simulate(run, engine="lanes", device="cpu", width=2).params, apart.params)


def test_a_precision_that_only_a_gpu_has_is_refused_elsewhere() -> None:
    with pytest.raises(FedeveError, match="only a GPU has this precision: got 'tf32'"):
        simulate(some_run(), device="cpu", precision="tf32")
    with pytest.raises(FedeveError, match="unknown precision"):
        simulate(some_run(), device="cpu", precision="half")
