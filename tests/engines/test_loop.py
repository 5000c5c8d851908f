"""The loop: a run that was stopped anywhere, and resumed, leaves what an uninterrupted one leaves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import assert_same_files, tensors

from fedeve import FedeveError, Record, Scaffold, all_methods, simulate
from fedeve.checkpoint import Checkpoint
from fedeve.engines.loop import Book, Deadline, Interrupted, Progress, make_engine
from fedeve.memory import Memory
from fedeve.store import CHECKPOINT, RECORD, Store


@pytest.mark.parametrize("name", all_methods())
@pytest.mark.parametrize("stop_at", [1, 4, 5])
def test_stopped_and_resumed_equals_never_stopped(small_run: Any, tmp_path: Path, name: str, stop_at: int) -> None:
    run = small_run(method=all_methods()[name]())

    def stop(progress: Progress) -> None:
        if progress.num_rounds == stop_at:
            raise KeyboardInterrupt

    whole = simulate(run, out=tmp_path / "whole")
    with pytest.raises(Interrupted, match=f"stopped after {stop_at} rounds; continue with: fedeve resume"):
        simulate(run, out=tmp_path / "parts", watch=stop)
    resumed = simulate(run, out=tmp_path / "parts", resume=True)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")
    assert torch.equal(whole.params, resumed.params)
    assert whole.lines == resumed.lines and whole.header == resumed.header


@pytest.mark.parametrize("checkpoint_at", [None, 1, 3])
def test_lines_beyond_the_checkpoint_are_written_again_not_twice(
    small_run: Any, tmp_path: Path, checkpoint_at: int | None
) -> None:
    """What a kill leaves when checkpoints are rare: a record that is ahead of its checkpoint, or has none at all."""
    run = small_run(method=all_methods()["scaffold"]())

    def stop(progress: Progress) -> None:
        if progress.num_rounds == checkpoint_at:
            raise KeyboardInterrupt

    simulate(run, out=tmp_path / "whole")
    if checkpoint_at is None:
        simulate(run, out=tmp_path / "parts")
        (tmp_path / "parts" / CHECKPOINT).unlink()
    else:
        with pytest.raises(Interrupted):
            simulate(run, out=tmp_path / "parts", watch=stop)
        early = (tmp_path / "parts" / CHECKPOINT).read_bytes()
        simulate(run, out=tmp_path / "parts", resume=True)
        (tmp_path / "parts" / CHECKPOINT).write_bytes(early)
    assert len(Record.read(tmp_path / "parts" / RECORD).lines) == 3
    simulate(run, out=tmp_path / "parts", resume=True)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("stop_at", [3, None])
@pytest.mark.parametrize("gone", [1, 2])
def test_a_record_that_lost_lines_is_refused_and_left_as_it_is(
    small_run: Any, tmp_path: Path, stop_at: int | None, gone: int
) -> None:
    """Going on would leave a record with a hole, and a finished run with other numbers."""
    run = small_run(eval_every=1)

    def stop(progress: Progress) -> None:
        if progress.num_rounds == stop_at:
            raise KeyboardInterrupt

    if stop_at is None:
        simulate(run, out=tmp_path)
    else:
        with pytest.raises(Interrupted):
            simulate(run, out=tmp_path, watch=stop)
    whole = (tmp_path / RECORD).read_text().splitlines(keepends=True)
    end = len(whole) - 1
    for kept, words in (
        (whole[:-gone], f"record.jsonl lacks lines .* rounds up to {end - gone} instead of {end}"),
        ([*whole[:-gone], whole[-gone][:20]], f"lacks lines .* rounds up to {end - gone} instead of {end}"),
        ([*whole[:1], *whole[2:]], "line 2 of .* is damaged"),
        ([*whole, whole[-1]], f"line {end + 2} of .* is damaged"),
        (['{"record": 1}\n'], "line 1 of .* is damaged"),
    ):
        (tmp_path / RECORD).write_text("".join(kept))
        with pytest.raises(FedeveError, match=words):
            simulate(run, out=tmp_path, resume=True)
        assert (tmp_path / RECORD).read_text() == "".join(kept)


def test_an_interrupt_inside_a_client_forgets_the_round_and_nothing_else(small_run: Any, tmp_path: Path) -> None:
    """Ctrl-C arrives in the middle of a round, when some clients of the cohort have trained."""
    run = small_run(method=all_methods()["scaffold"](), rounds=8)
    simulate(run, engine="reference", out=tmp_path / "whole")
    from fedeve.engines.reference import Reference

    train, calls = Reference.train, 0

    def interrupted_train(self: Reference, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5 * 3 + 3:
            raise KeyboardInterrupt
        return train(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted) as stopped:
        patch.setattr(Reference, "train", interrupted_train)
        simulate(run, engine="reference", out=tmp_path / "parts")
    assert stopped.value.num_rounds == 3
    simulate(run, out=tmp_path / "parts", resume=True)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def test_an_interrupt_while_memories_are_written_loses_none(small_run: Any, tmp_path: Path) -> None:
    """Ctrl-C arrives when the round is in the books but only the first client's memory is written."""
    run = small_run(method=all_methods()["scaffold"](), rounds=8)
    simulate(run, out=tmp_path / "whole")
    put, calls = Memory.put, 0

    def interrupted_put(self: Memory, vectors: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            put(self, dict(list(vectors.items())[:1]))
            raise KeyboardInterrupt
        put(self, vectors)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted) as stopped:
        patch.setattr(Memory, "put", interrupted_put)
        simulate(run, out=tmp_path / "parts", checkpoint_every=1e9)
    assert stopped.value.num_rounds == 3
    simulate(run, out=tmp_path / "parts", resume=True)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def test_a_folder_that_holds_a_run_is_not_overwritten(small_run: Any, tmp_path: Path) -> None:
    simulate(small_run(), out=tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    with pytest.raises(FedeveError, match="holds a run already"):
        simulate(small_run(), out=tmp_path)
    assert (tmp_path / RECORD).read_bytes() == before


@pytest.mark.parametrize("change", [{"seed": 8}, {"rounds": 7}, {"cohort": 4}, {"method": all_methods()["fedavg"]()}])
def test_another_run_cannot_be_resumed_here(small_run: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    simulate(small_run(), out=tmp_path)
    with pytest.raises(FedeveError, match="belongs to another run"):
        simulate(small_run(**change), out=tmp_path, resume=True)


def test_resuming_a_finished_run_changes_nothing(small_run: Any, tmp_path: Path) -> None:
    first = simulate(small_run(), out=tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    again = simulate(small_run(), out=tmp_path, resume=True)
    assert (tmp_path / RECORD).read_bytes() == before
    assert torch.equal(first.params, again.params) and first.lines == again.lines


def test_a_checkpoint_has_the_clients_vectors_until_the_run_is_finished(small_run: Any, tmp_path: Path) -> None:
    run, rows = small_run(method=all_methods()["scaffold"](), rounds=3), []

    def look(_: Progress) -> None:
        rows.append(len(tensors(tmp_path / "out", run.identity())["memory.clients"]))

    simulate(run, out=tmp_path / "out", checkpoint_every=0, watch=look)
    assert rows[0] > 0 and rows[1] > 0 and rows[2] == 0


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path, small_run: Any) -> None:
    store = Store(tmp_path, "x")
    with store.locked(), pytest.raises(FedeveError, match=f"in use: got process {os.getpid()}"):
        simulate(small_run(), out=tmp_path)
    simulate(small_run(), out=tmp_path)  # released


def test_several_runs_come_back_in_order_and_equal_single_ones(small_run: Any) -> None:
    runs = [small_run(seed=seed) for seed in (1, 2)]
    together = simulate(runs)
    for run, record in zip(runs, together, strict=True):
        assert record.lines == simulate(run).lines and record.header["seed"] == run.seed


ENGINES = pytest.mark.parametrize("engine", ["reference", "lanes"])


@ENGINES
def test_several_runs_have_a_folder_each_and_leave_what_single_ones_leave(
    small_run: Any, tmp_path: Path, engine: str
) -> None:
    runs = [small_run(seed=seed, method=all_methods()["scaffold"]()) for seed in (1, 2, 3)]
    folders = [tmp_path / str(number) for number in range(3)]
    simulate(runs, engine=engine, width=8, out=folders)
    for number, run in enumerate(runs):
        simulate(run, engine=engine, width=8, out=tmp_path / "alone" / str(number))
        assert_same_files(folders[number], tmp_path / "alone" / str(number))


@ENGINES
def test_a_deadline_leaves_every_run_checkpointed_and_auto_continues_or_begins(
    small_run: Any, tmp_path: Path, engine: str
) -> None:
    """The deadline comes while the first run is under way; by the reference engine the others have not begun."""
    runs = [small_run(seed=seed, method=all_methods()["scaffold"](), rounds=8) for seed in (1, 2, 3)]
    options: dict[str, Any] = {"engine": engine, "width": 8, "resume": "auto", "checkpoint_every": 1e9}
    whole, parts = ([tmp_path / kind / str(number) for number in range(3)] for kind in ("whole", "parts"))
    simulate(runs, out=whole, **options)
    sessions = 0
    while not all((part / RECORD).exists() and len(Record.read(part / RECORD).lines) == 4 for part in parts):
        seen: list[Progress] = []
        simulate(runs, out=parts, watch=seen.append, until=time.monotonic(), **options)
        assert len(seen) == 1  # a deadline that has passed stops after one turn, so that no session is in vain
        assert all((part / CHECKPOINT).exists() for part in parts)
        sessions += 1
    assert sessions == 3 * 8
    for ours, theirs in zip(parts, whole, strict=True):
        assert_same_files(ours, theirs)


def test_a_deadline_is_kept_with_its_checkpoints(small_run: Any, tmp_path: Path) -> None:
    run, until = small_run(rounds=100_000, eval_every=1000), time.monotonic() + 1.0
    record = simulate(run, out=tmp_path, until=until)
    assert time.monotonic() < until + 0.5  # before then, but a busy machine may have looked away
    found = Checkpoint.load(tmp_path / CHECKPOINT, identity=run.identity())
    assert 0 < found.values["num_rounds"] < 100_000
    assert torch.equal(found.tensors["state.params"], record.params)


@ENGINES
def test_what_raises_in_a_round_leaves_every_run_checkpointed(small_run: Any, tmp_path: Path, engine: str) -> None:
    runs, folders = [small_run(seed=seed) for seed in (1, 2)], [tmp_path / "0", tmp_path / "1"]

    def fail(progress: Progress) -> None:
        if progress.num_rounds == 3:
            raise ZeroDivisionError("three")

    with pytest.raises(ZeroDivisionError):
        simulate(runs, engine=engine, out=folders, watch=fail, checkpoint_every=1e9)
    assert all((folder / CHECKPOINT).exists() for folder in folders)


def test_a_run_that_breaks_while_its_memories_are_written_keeps_no_other_from_being_saved(
    small_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, folders = [small_run(method=Scaffold(), seed=s) for s in (1, 2)], [tmp_path / "0", tmp_path / "1"]
    make, put, made, calls = Memory.__init__, Memory.put, [], []

    def break_the_first(self: Memory, vectors: Any) -> None:
        calls.append(self)
        if len(calls) > 4 and self is made[0]:
            raise KeyError("control")
        put(self, vectors)

    # Listed in the order of the runs, whichever of them is ahead later.
    monkeypatch.setattr(
        Memory, "__init__", lambda self, *args, **named: made.append(self) or make(self, *args, **named)
    )
    monkeypatch.setattr(Memory, "put", break_the_first)
    with pytest.raises(KeyError, match="control"):
        simulate(runs, out=folders, checkpoint_every=1e9)
    assert [(folder / CHECKPOINT).exists() for folder in folders] == [False, True]


def test_folders_are_as_many_as_runs_and_all_different(small_run: Any, tmp_path: Path) -> None:
    runs = [small_run(seed=1), small_run(seed=2)]
    with pytest.raises(FedeveError, match="several runs cannot share one folder"):
        simulate(runs, out=tmp_path)  # type: ignore[call-overload]
    one, two, three = (tmp_path / name for name in "abc")
    for folders in ([one], [one, one], [one, two, three], [one, one, two]):
        with pytest.raises(FedeveError, match="2 runs need a folder each"):
            simulate(runs, out=folders)
    with pytest.raises(FedeveError, match="unknown resume"):
        simulate(small_run(), out=tmp_path, resume="perhaps")


@pytest.mark.parametrize("what", [3, None, [3], "runs"])
def test_what_is_no_run_is_refused(what: Any) -> None:
    with pytest.raises(FedeveError, match="simulate plays a Run, or a list of them"):
        simulate(what)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_threads_and_lanes_are_counted_from_one(small_run: Any, number: Any) -> None:
    for name in ("threads", "width"):
        with pytest.raises(FedeveError, match=f"{name} must be a whole number from 1 on"):
            simulate(small_run(), **{name: number})


def test_checkpoints_that_take_long_are_written_seldom(small_run: Any, tmp_path: Path) -> None:
    """Ten runs of which each takes a second to write: with one every 0.01 s, nothing else would be done."""
    runs = [small_run(seed=seed) for seed in range(10)]
    engine = make_engine("reference", runs, torch.device("cpu"))
    book = Book(engine, 0, Store(tmp_path, runs[0].identity()), resume=False, every=0.01)
    book.seconds_per_byte, book.saved_at = 1.0 / book.position.state.params.nbytes, time.monotonic() - 20
    assert not book._is_due()
    book.saved_at = time.monotonic() - 20 * 10 * (book.saving_takes + 0.1)
    assert book._is_due()


def test_what_clients_remember_counts_in_the_time_a_checkpoint_takes(small_run: Any, tmp_path: Path) -> None:
    """A budget must end early enough for it: SCAFFOLD's vectors are hundreds of times the model."""
    run = small_run(method=all_methods()["scaffold"]())
    engine = make_engine("reference", [run], torch.device("cpu"))
    book = Book(engine, 0, Store(tmp_path, run.identity()), resume=False, every=1e9)
    book.seconds_per_byte = 1e-3
    before = book.saving_takes
    book.memory.put({client: {"control": engine.starts[0]} for client in range(100)})
    assert book.saving_takes == pytest.approx(before + 100 * 1e-3 * engine.starts[0].nbytes)
    assert not Deadline(time.monotonic() + 2 * book.saving_takes, [book]).is_near()
    assert Deadline(time.monotonic() + book.saving_takes / 2, [book]).is_near()
    book.save()
    assert book.seconds_per_byte < 1e-3  # measured


def test_the_watcher_sees_every_round_and_every_evaluation(small_run: Any) -> None:
    seen: list[Progress] = []
    record = simulate(small_run(), watch=seen.append)
    assert [progress.num_rounds for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert [progress.line for progress in seen if progress.line] == record.lines


def test_an_unknown_engine_or_device_is_refused(small_run: Any) -> None:
    with pytest.raises(FedeveError, match="unknown engine"):
        simulate(small_run(), engine="lane")
    with pytest.raises(FedeveError, match="device cannot be used"):
        simulate(small_run(), device="cudda")


def test_what_a_simulation_sets_for_itself_is_given_back(small_run: Any) -> None:
    inside: list[tuple[int, bool, bool]] = []
    cudnn = torch.backends.cudnn

    def look(_: Progress) -> None:
        inside.append((torch.get_num_threads(), cudnn.allow_tf32, cudnn.deterministic))

    torch.set_num_threads(2)
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    try:
        simulate(small_run(rounds=1), watch=look)
        assert inside == [(1, False, True)]
        assert torch.get_num_threads() == 2
        assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == before
    finally:
        torch.set_num_threads(1)
