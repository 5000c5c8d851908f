"""The loop around an engine: it keeps the record, writes checkpoints and resumes. `simulate` is its front door.

Order matters here. A line is appended before the position moves on, and a position holds everything a checkpoint
needs, so a kill or Ctrl-C at any moment leaves files from which the same numbers follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from ..errors import FedeveError, unknown
from ..memory import Memory
from ..record import Record, header
from ..run import Run, choose_device
from ..store import Position, Store
from .lanes import Lanes
from .reference import References
from .turn import Turn

ENGINES = ("auto", "reference", "lanes")


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
    runs = [run] if isinstance(run, Run) else list(run)
    with _steady(threads):
        make: Callable[[list[Run], torch.device], Engine] = Lanes if engine == "lanes" else References
        stores = [None if out is None else Store(Path(out), each.identity()) for each in runs]
        with ExitStack() as stack:
            for store in filter(None, stores):
                stack.enter_context(store.locked())
            player = make(runs, target)
            books = [Book(player, n, store, resume=resume, every=checkpoint_every) for n, store in enumerate(stores)]
            _play(player, books, watch)
    return books[0].record if isinstance(run, Run) else [book.record for book in books]


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


class Engine(Protocol):
    """Plays runs: where their models start, what a round does, how good a model is."""

    runs: list[Run]
    name: str
    starts: list[Tensor]

    def play(self, positions: list[Position], memories: list[Memory]) -> Iterator[tuple[int, Turn]]:
        """The rounds that are left, of any run in any order; the caller keeps a turn before it asks for the next."""
        ...

    def evaluate(self, number: int, params: Tensor) -> dict[str, float]:
        """The metrics of a run's task on its whole test set."""
        ...


class Book:
    """One run's bookkeeping: its record, where it stands, what its clients remember, and its folder if it has one."""

    def __init__(self, engine: Engine, number: int, store: Store | None, *, resume: bool, every: float) -> None:
        self.engine, self.number, self.run, self.store = engine, number, engine.runs[number], store
        self.every, self.saved_at = every, time.monotonic()
        start = engine.starts[number]
        self.memory = Memory(self.run.method.remembers, like=start)
        self.position = Position(0, self.run.server.init(start, num_clients=self.run.data.num_clients))
        if store is not None and resume:
            self.position, self.record = store.restore(self.position, self.memory)
            _refuse_other_engine(self.record, engine.name)
        else:
            self.record = Record(header(self.run, num_params=len(start), device=start.device, engine=engine.name))
            if store is not None:
                store.create(self.record.header)
        self.record.params = self.position.state.params

    def keep(self, turn: Turn) -> Progress:
        """Write down what a round did. The line comes first, then the position moves, then memories."""
        pending, line = (*self.position.pending, _note(turn)), None
        if self.run.is_evaluated(turn.num_rounds):
            metrics = self.engine.evaluate(self.number, turn.state.params)
            line, pending = _line(turn.num_rounds, metrics, pending), ()
            self.record.lines.append(line)
            if self.store is not None:
                self.store.file.append(line)
        self.position = Position(turn.num_rounds, turn.state, pending, turn.writes)
        self.memory.put(turn.writes)
        self.record.params = turn.state.params
        due = time.monotonic() - self.saved_at >= self.every or turn.num_rounds == self.run.rounds
        if self.store is not None and due:
            self.save()
        return Progress(self.run, turn.num_rounds, turn.facts, line)

    def save(self) -> None:
        """Write a checkpoint of the position."""
        if self.store is not None:
            self.memory.put(self.position.writes)  # they may be half done; doing them again changes nothing
            self.store.save(self.position, self.memory)
            self.saved_at = time.monotonic()


def _play(engine: Engine, books: list[Book], watch: Watcher | None) -> None:
    """Play the rounds that are left of every run and keep their books."""
    try:
        for number, turn in engine.play([book.position for book in books], [book.memory for book in books]):
            progress = books[number].keep(turn)
            if watch is not None:
                watch(progress)
    except KeyboardInterrupt:
        kept = [book for book in books if book.store is not None]
        for book in kept:
            book.save()
        if not kept or kept[0].store is None:
            raise
        raise Interrupted(kept[0].position.num_rounds, kept[0].store.out) from None


def _refuse_other_engine(record: Record, name: str) -> None:
    """Two engines agree but for the last bits, so a run that changed its engine would not be the one it says it is."""
    begun = record.header["engine"]
    if begun != name:
        raise FedeveError("this run was started with another engine", got=name, do=f"resume it with engine={begun!r}")


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
