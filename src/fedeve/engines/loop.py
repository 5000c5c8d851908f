"""The loop around an engine: it keeps the record, writes checkpoints and resumes. `simulate` is its front door.

Order matters here. A line is appended before the position moves on, and a position holds everything a checkpoint
needs, so a kill or Ctrl-C at any moment leaves files from which the same numbers follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch

from ..errors import FedeveError, unknown
from ..memory import Memory
from ..record import Record, header
from ..run import Run, choose_device
from ..store import Position, Store
from .reference import Reference, Turn

ENGINES = ("auto", "reference")


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round: how far a run is, its newest facts and its last evaluation."""

    run: Run
    num_rounds: int
    facts: dict[str, float] | None
    """None where the round was lost."""
    line: dict[str, Any] | None
    """The line just added to the record, where this round was evaluated."""


Watcher = Callable[[Progress], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after a checkpoint was written."""

    def __init__(self, num_rounds: int, out: Path) -> None:
        self.num_rounds, self.out = num_rounds, out
        super().__init__(f"stopped after {num_rounds} rounds; continue with: fedeve resume {out}")


@overload
def simulate(
    run: Run,
    *,
    engine: str = ...,
    device: str = ...,
    threads: int = ...,
    out: str | Path | None = ...,
    resume: bool = ...,
    checkpoint_every: float = ...,
    watch: Watcher | None = ...,
) -> Record: ...
@overload
def simulate(
    run: Sequence[Run],
    *,
    engine: str = ...,
    device: str = ...,
    threads: int = ...,
    out: str | Path | None = ...,
    resume: bool = ...,
    checkpoint_every: float = ...,
    watch: Watcher | None = ...,
) -> list[Record]: ...
def simulate(
    run: Run | Sequence[Run],
    *,
    engine: str = "auto",
    device: str = "auto",
    threads: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: float = 10.0,
    watch: Watcher | None = None,
) -> Record | list[Record]:
    """Play a run, or several, to the end and return what happened.

    With `out`, a folder, the record and a checkpoint every `checkpoint_every` seconds go there, and `resume=True`
    continues what lies there. `watch` is called after every round. One CPU thread is the default because small models
    gain nothing from more, and because the order of sums, so the last bits, may depend on their number.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    target = choose_device(device)
    if not isinstance(run, Run) and out is not None:
        raise FedeveError("several runs cannot share one folder", got=str(out), do="simulate them one by one")
    with _steady(threads):
        if isinstance(run, Run):
            return _simulate(run, target, None if out is None else Path(out), resume, checkpoint_every, watch)
        return [_simulate(each, target, None, False, checkpoint_every, watch) for each in run]


@contextmanager
def _steady(threads: int) -> Iterator[None]:
    """Arithmetic that repeats itself: so many threads, true float32 and deterministic convolutions on a GPU."""
    cudnn = torch.backends.cudnn
    before = torch.get_num_threads(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    torch.set_num_threads(threads)
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before[1:]


def _simulate(
    run: Run, device: torch.device, out: Path | None, resume: bool, every: float, watch: Watcher | None
) -> Record:
    store = None if out is None else Store(out, run.identity())
    with nullcontext() if store is None else store.locked():
        learner = Reference(run, device)
        memory = Memory(run.method.remembers, like=learner.start)
        position = Position(0, run.method.init(learner.start, num_clients=run.data.num_clients))
        if store is not None and resume:
            position, record = store.restore(position, memory)
        else:
            record = Record(header(run, num_params=learner.layout.num_params, device=device, engine="reference"))
            if store is not None:
                store.create(record.header)
        record.params = _play(learner, position, memory, record, store, every, watch).state.params
    return record


def _play(
    learner: Reference,
    position: Position,
    memory: Memory,
    record: Record,
    store: Store | None,
    every: float,
    watch: Watcher | None,
) -> Position:
    """Play the rounds that are left, adding to the record; returns the last position."""
    run, saved_at = learner.run, time.monotonic()
    try:
        for turn in learner.play(position.state, memory, position.num_rounds):
            pending, line = (*position.pending, _note(turn)), None
            if run.is_evaluated(turn.num_rounds):
                line, pending = _line(turn.num_rounds, learner.evaluate(turn.state.params), pending), ()
                record.lines.append(line)
                if store is not None:
                    store.file.append(line)
            position = Position(turn.num_rounds, turn.state, pending, turn.writes)
            memory.put(position.writes)
            if store is not None and (time.monotonic() - saved_at >= every or turn.num_rounds == run.rounds):
                store.save(position, memory)
                saved_at = time.monotonic()
            if watch is not None:
                watch(Progress(run, turn.num_rounds, turn.facts, line))
    except KeyboardInterrupt:
        if store is None:
            raise
        memory.put(position.writes)  # they may be half done; doing them again changes nothing
        store.save(position, memory)
        raise Interrupted(position.num_rounds, store.out) from None
    return position


def _note(turn: Turn) -> dict[str, Any]:
    return {"round": turn.num_rounds, "facts": turn.facts, "answered": turn.answered, "left_out": turn.left_out}


def _line(num_rounds: int, metrics: dict[str, float], notes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """A record's line: the evaluation, and the facts of every round since the line before."""
    names = sorted({name for note in notes for name in note["facts"] or ()})
    line: dict[str, Any] = {"round": num_rounds, **metrics}
    line["facts"] = {name: [(note["facts"] or {}).get(name) for note in notes] for name in names}
    line["answered"] = [note["answered"] for note in notes]
    left_out = {str(note["round"]): note["left_out"] for note in notes if note["left_out"]}
    lost = [note["round"] for note in notes if note["facts"] is None]
    return line | ({"left_out": left_out} if left_out else {}) | ({"lost": lost} if lost else {})
