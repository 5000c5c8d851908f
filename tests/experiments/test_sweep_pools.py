"""Which runs of a sweep share a pool of lanes, how wide it is, and how runs are shared out to processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sweeping import SWEEP, write

from fedeve import Correction, FedAvg, Scaffold
from fedeve.engines import seat
from fedeve.engines.blame import LostDeviceError, blame, culprit, is_lost
from fedeve.engines.lanes import Lanes
from fedeve.experiments import sweep as sweeps
from fedeve.experiments.manifest import read_manifest
from fedeve.experiments.sweep_folder import SweepFolder
from fedeve.experiments.sweep_play import Player
from fedeve.experiments.sweep_worker import Worker, order, shared_out, work


def test_widths_are_planned_once_for_the_batches_that_are_played(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    folder = SweepFolder(
        out, sweeps.read(write(tmp_path, SWEEP.replace("data.alpha = [1, 0.1]", "local.batch = [9, 20]")))
    )
    folder.open(engine="lanes")
    assert folder.widths == {}
    points, player = folder.sweep.points, Player(folder, print, device="cpu")
    kinds = {shares: [p for p in points if p.shares == shares] for shares in dict.fromkeys(p.shares for p in points)}
    (one, several), (alone, runs) = kinds, kinds.values()
    player.plan_widths([alone[:1], *([run] for run in alone[1:]), runs, runs[:1]])
    assert 1 <= folder.widths[one] <= 4 and folder.widths[one] < folder.widths[several] <= 16
    assert read_manifest(out)["widths"] == folder.widths
    before = dict(folder.widths)
    player.plan_widths([alone, *([run] for run in runs)])
    assert folder.widths == before


@pytest.mark.parametrize(
    ("kinds", "workers", "sizes"),
    [
        ([98, 84, 84, 84], 8, [49, 49, 42, 42, 42, 42, 42, 42]),  # a ninth batch would be played when others have ended
        ([300], 2, [100, 100, 100]),  # more than 128 runs do not share a pool
        ([90, 1, 1, 1], 8, [11] * 6 + [12] * 2 + [1] * 3),  # larger ones would not make every worker happy
        ([3, 2], 8, [1, 1, 1, 1, 1]),
        ([5], 1, [5]),
    ],
    ids=str,
)
def test_workers_get_batches_of_about_one_size(kinds: list[int], workers: int, sizes: list[int]) -> None:
    points: Any = [
        SimpleNamespace(shares=f"kind {kind}", seed=number % 3, name=f"{kind} {number}")
        for kind, count in enumerate(kinds)
        for number in range(count)
    ]
    found = shared_out(points, workers, "lanes")
    assert sorted(map(len, found)) == sorted(sizes)
    assert sorted(point.name for batch in found for point in batch) == sorted(point.name for point in points)
    assert all(len({point.shares for point in batch}) == 1 for batch in found)
    assert all(batch == sorted(batch, key=lambda point: point.seed) for batch in found)


def test_batches_that_are_played_at_once_have_some_of_every_column() -> None:
    """Twelve columns of seven methods, as Table 3 has: a column of long runs is not one worker's alone."""
    points: Any = [
        SimpleNamespace(shares="all", seed=1, column=column, name=f"{column} {row}")
        for column in range(12)
        for row in range(7)
    ]
    for workers in (2, 3, 4, 8):
        for batch in shared_out(points, workers, "lanes"):
            counts = [sum(point.column == column for point in batch) for column in range(12)]
            assert max(counts) <= -(-7 // workers) + 1, (workers, counts)


def test_runs_on_one_data_set_dealt_in_two_ways_are_played_in_one_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    monkeypatch.setattr(Lanes, "_pool", lambda *args, of=Lanes._pool: widths.append(args[2]) or of(*args))
    assert played(tmp_path) == (8, 0) and len(widths) == 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs were played together, time after time."""
    sizes: list[int] = []
    simulate = Player._simulate

    def counted(self: Player, points: Any, runs: Any, session: Any) -> None:
        sizes.append(len(runs))
        simulate(self, points, runs, session)

    monkeypatch.setattr(Player, "_simulate", counted)
    return sizes


def played(folder: Path) -> tuple[int, int]:
    """How many runs of the small sweep finished and failed."""
    (folder / "out").mkdir()
    sweep = SweepFolder(folder / "out", sweeps.read(write(folder), assignments=["rounds=3"]))
    sweep.open(engine="lanes")
    Player(sweep, lambda event: None, device="cpu").play(sweep.sweep.points)
    states = [sweep.status(point).state for point in sweep.sweep.points]
    return states.count("finished"), states.count("failed")


@pytest.mark.parametrize(("method", "name"), [(FedAvg, "step"), (FedAvg, "correction"), (Scaffold, "finish")])
def test_others_go_on_together_where_it_is_known_whose_fault_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[int], method: type[Any], name: str
) -> None:
    """Half of eight runs have a method that raises: in the server's step, or when clients are sent off or come back."""
    ours = getattr(method, name)

    def failing(self: Any, *args: Any, **named: Any) -> Any:
        if isinstance(self, method):
            raise ArithmeticError("the world ended")
        return ours(self, *args, **named)

    monkeypatch.setattr(method, name, failing)
    assert played(tmp_path) == (4, 4)
    assert pools == [8, 7, 6, 5, 4]


def test_so_they_do_where_a_later_part_of_a_cohort_cannot_be_sent_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[int]
) -> None:
    monkeypatch.setattr(seat, "CHUNK", 2)  # of cohorts of four
    calls: Counter[int] = Counter()

    def failing(self: Any, sent: Any, memory: Any) -> Correction:
        calls[id(sent.params)] += 1
        if isinstance(self, FedAvg) and calls[id(sent.params)] == 2:
            raise ArithmeticError("the world ended")
        return Correction()

    monkeypatch.setattr(FedAvg, "correction", failing)
    assert played(tmp_path) == (4, 4)
    assert pools == [8, 7, 6, 5, 4]


def test_a_pool_is_split_where_nobody_knows_whose_fault_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[int]
) -> None:
    ours = Lanes._play

    def failing(self: Lanes, at: Any, *rest: Any) -> Any:
        if any(isinstance(self.runs[number].method, FedAvg) and self.runs[number].seed == 2 for number in at):
            raise ArithmeticError("the world ended")
        yield from ours(self, at, *rest)

    monkeypatch.setattr(Lanes, "_play", failing)
    assert played(tmp_path) == (6, 2)
    assert pools[0] == 8 and set(pools[1:3]) == {4} and pools.count(1) >= 2


def test_the_innermost_run_is_blamed_and_for_a_full_disk_or_memory_nobody() -> None:
    with pytest.raises(ArithmeticError) as raised, blame(1), blame(2):
        raise ArithmeticError
    assert culprit(raised.value) == 2
    for error in (MemoryError(), torch.OutOfMemoryError()):
        with pytest.raises(type(error)), blame(1):
            raise error
        assert culprit(error) is None


def test_a_gpu_that_is_lost_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's device without memory answers as such a GPU does: nothing, with an error."""
    nowhere = torch.device("meta")
    assert is_lost(nowhere) and not is_lost(torch.device("cpu"))

    def failing(self: FedAvg, *args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")

    monkeypatch.setattr(FedAvg, "step", failing)
    monkeypatch.setattr("fedeve.experiments.sweep_play.choose_device", lambda name: nowhere)
    with pytest.raises(
        LostDeviceError, match="RuntimeError: CUDA error: an illegal memory access was encountered; give the"
    ):
        played(tmp_path)
    folder = SweepFolder(tmp_path / "out", sweeps.read(write(tmp_path), assignments=["rounds=3"]))
    player, points = Player(folder, print, device="cpu"), folder.sweep.points
    folder.open(engine="lanes")
    with pytest.raises(SystemExit) as ended:  # so another process takes this one's place
        Worker(order(player), print).play(work(player, points))
    assert ended.value.code == 1 and "the GPU answers nothing any more" in capsys.readouterr().err
    assert {folder.status(point).state for point in points} <= {"waiting", "begun"}
