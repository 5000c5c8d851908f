"""Lanes as many as are of use: fewer make a sweep wait, more stand idle."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from walking import DATA, assert_close, in_rows, some_run

from fedeve import FedAvg, FederatedData, LocalWork, Run, Scaffold, simulate
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import Book, _play
from fedeve.engines.pool import Batch, OnDevice, bytes_per_lane
from fedeve.engines.profile import Profile
from fedeve.engines.width import useful
from fedeve.layout import Layout

MODEL = nn.Linear(2, 2)


@cache
def clients(*sizes: int) -> FederatedData:
    x, y = np.ones((sum(sizes), 2), dtype=np.float32), np.zeros(sum(sizes), dtype=np.int64)
    each = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return FederatedData.from_arrays(x, y, each, x_test=x[:4], y_test=y[:4])


def runs(sizes: list[int], count: int, **changes: Any) -> list[Run]:
    """So many runs, by seed, on clients of these sizes."""
    defaults: dict[str, Any] = {"method": FedAvg(), "data": clients(*sizes), "model": MODEL, "rounds": 12, "cohort": 10}
    defaults |= {"local": LocalWork(batch=10), "eval_every": 12}
    return [Run(**(defaults | {"seed": seed} | changes)) for seed in range(count)]


def played(some: list[Run], width: int) -> Profile:
    engine = Lanes(some, torch.device("cpu"), width=width, batched=True, profile=Profile())
    _play(engine, [Book(engine, n, None, resume=False, every=1e9) for n in range(len(some))], None)
    return engine.profile


def test_equal_clients_fill_as_many_lanes_as_there_are_clients_at_a_time() -> None:
    assert useful(runs([40] * 30, 1)) == 10
    assert useful(runs([40] * 30, 6)) == 60
    assert useful(runs([40] * 30, 6, local=LocalWork(steps=7))) == 60


def test_a_run_that_lasts_longer_leaves_lanes_to_the_others() -> None:
    short, long = runs([40] * 30, 1), runs([40] * 30, 1, local=LocalWork(batch=10, epochs=9))
    assert useful(short + long) == 12  # ten for the long one; in the time of its nine epochs the short one needs 10 / 9
    assert useful(runs([40] * 30, 1, rounds=1) + runs([40] * 30, 1, rounds=100)) == 11


def test_clients_without_data_are_no_reason_for_none() -> None:
    assert useful(runs([5] + [0] * 30, 2, empty="keep", cohort=1)) in (1, 2)
    assert useful(runs([5] + [0] * 5000, 2, empty="keep", cohort=1, rounds=1)) == 2


@pytest.mark.parametrize("epochs", [(1, 1, 1), (1, 3, 5)], ids=str)
def test_the_lanes_of_use_take_no_more_steps_than_one_for_every_client_and_are_full(
    epochs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batch, "_step", lambda self: None)  # who sits where does not depend on it
    sizes = [int(size) for size in np.random.default_rng(2).pareto(1.5, 60).clip(0.5, 10) * 20]
    some = [run for number in epochs for run in runs(sizes, 4, local=LocalWork(batch=10, epochs=number), rounds=30)]
    width = useful(some)
    assert width < 40
    planned, widest = played(some, width), played(some, 120)
    assert planned.client_steps == widest.client_steps
    assert planned.lane_steps / width < 1.1 * widest.lane_steps / 120
    assert planned.occupancy > 0.8 and widest.occupancy < 0.3


def test_the_largest_clients_of_a_cohort_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seated: list[int] = []
    seat = Batch.seat

    def noted(self: Batch, tasks: Any) -> None:
        seated.extend(len(task.plan) for task in tasks)
        seat(self, tasks)

    monkeypatch.setattr(Batch, "seat", noted)
    played(runs([10, 70, 30, 50, 20, 60], 1, cohort=6, rounds=1), width=2)
    assert seated == [7, 6, 5, 3, 2, 1]


def test_the_width_follows_cohorts_memory_and_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(**options: Any) -> int:
        runs = [some_run(cohort=cohort, local=work, dropout=0.0) for cohort in (6, 5)]
        return Lanes(runs, torch.device("cpu"), batched=True, **options)._planned([0, 1])

    work = LocalWork(steps=4, batch=8)
    assert planned() == 10  # of eleven clients a round one or two have no data
    assert planned(width=3) == 3
    monkeypatch.setattr("fedeve.engines.lanes.free_on", lambda _: 1e5)
    assert 1 <= planned() < 10


def test_a_lane_of_a_larger_batch_takes_more_memory() -> None:
    run = some_run()
    model, data = run.build_model(), OnDevice(DATA, torch.float64, torch.device("cpu"))
    layout = Layout.of(model)
    small, large = (bytes_per_lane(model, layout, data, LocalWork(batch=batch)) for batch in (8, 16))
    assert 10 * 8 * layout.num_params < small < large


def test_lack_of_memory_is_not_taken_for_a_model_that_does_not_fit() -> None:
    class Hungry(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        simulate(some_run(model=Hungry(6, 3)))


def test_lack_of_memory_halves_the_width_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step of a pool of more than two lanes finds no memory: the rounds under way are done again."""
    step, steps = Batch._step, []

    def scarce(self: Batch) -> None:
        steps.append(self.width)
        if self.width > 2 and steps.count(self.width) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self)

    monkeypatch.setattr(Batch, "_step", scarce)
    run = some_run(method=Scaffold())
    with pytest.warns(UserWarning, match="out of memory; going on with [34] lanes|going on with [12] lanes"):
        ours = in_rows(run, width=6)
    assert set(steps) == {6, 3, 1}
    assert_close(ours, simulate(run, engine="reference"), 1e-9)
