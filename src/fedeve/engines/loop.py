"""The loop around an engine: it keeps the record, writes checkpoints and resumes. `simulate` is its front door.

Order matters here. A line is appended before the position moves on, and a position holds everything a checkpoint
needs, so a kill or Ctrl-C at any moment leaves files from which the same numbers follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from ..errors import FedeveError, unknown
from ..memory import Memory
from ..record import Record, header
from ..run import Run, choose_device
from ..store import Position, Store, recorded_header
from .blame import blame
from .lanes import Lanes, has_random_layers
from .profile import Profile
from .reference import References
from .turn import Turn

ENGINES = ("auto", "reference", "lanes")
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round: how far a run is, its newest facts and its last evaluation."""

    run: Run
    num_rounds: int
    facts: dict[str, float] | None
    """None where the round was lost."""
    line: dict[str, Any] | None
    """The line just added to the record, where this round was evaluated."""
    number: int = 0
    """Which of the runs given to `simulate`."""
    occupancy: float = 1.0
    """The share of the lanes' steps that moved a client, so far."""


Watcher = Callable[[Progress], None]
Folder = str | Path


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after checkpoints were written."""

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
    width: int | None = ...,
    precision: str = ...,
    profile: Profile | None = ...,
    out: Folder | None = ...,
    resume: bool | str = ...,
    checkpoint_every: float = ...,
    until: float | None = ...,
    watch: Watcher | None = ...,
) -> Record: ...
@overload
def simulate(
    run: Sequence[Run],
    *,
    engine: str = ...,
    device: str = ...,
    threads: int = ...,
    width: int | None = ...,
    precision: str = ...,
    profile: Profile | None = ...,
    out: Sequence[Folder] | None = ...,
    resume: bool | str = ...,
    checkpoint_every: float = ...,
    until: float | None = ...,
    watch: Watcher | None = ...,
) -> list[Record]: ...
def simulate(
    run: Run | Sequence[Run],
    *,
    engine: str = "auto",
    device: str = "auto",
    threads: int = 1,
    width: int | None = None,
    precision: str = "float32",
    profile: Profile | None = None,
    out: Folder | Sequence[Folder] | None = None,
    resume: bool | str = False,
    checkpoint_every: float = 10.0,
    until: float | None = None,
    watch: Watcher | None = None,
) -> Record | list[Record]:
    """Play a run, or several, to the end and return what happened.

    With `out`, a folder for each run, the record and a checkpoint every `checkpoint_every` seconds go there, and
    `resume=True` continues what lies there; `resume="auto"` begins those runs of which nothing lies there. `until`, a
    moment of `time.monotonic()`, stops before then with every unfinished run checkpointed; its record is then shorter.
    `watch` is called after every round.

    `engine="auto"` is the lane engine, or the reference where a model has random layers. `width` is the number of
    lanes, clients that train at the same time: rows of a batch on a GPU, processes on a CPU. Unless set it is chosen
    from the cohorts, the model and the free memory; on a GPU a run's last bits depend on it, and on nobody who shares
    the lanes.
    `precision="tf32"` is faster on a GPU and keeps ten bits of the factors of every product; `"bf16"` is faster still
    for convolutions with many channels and keeps seven, and what is between layers. `profile` is filled with where the
    time went. One CPU thread is the default because small models gain nothing from more, and because the
    order of sums, so the last bits, may depend on their number.
    """
    if resume not in (True, False, "auto"):
        raise unknown("resume", resume, ("auto", "True", "False"))
    for name, number in (("threads", threads), ("width", 1 if width is None else width)):
        if not isinstance(number, int) or number < 1:
            raise FedeveError(f"{name} must be a whole number from 1 on", got=number, do="leave it out, or write 1")
    target = choose_device(device)
    choose_engine(engine)
    some = [run] if isinstance(run, Run) else run
    if not isinstance(some, Sequence) or not all(isinstance(each, Run) for each in some):
        raise FedeveError("simulate plays a Run, or a list of them", got=run, do="write simulate(Run(...))")
    runs = list(some)
    folders = _folders(out, runs, is_single=isinstance(run, Run))
    with _steady(threads, precision), ExitStack() as stack:
        stores = [
            None if folder is None else Store(folder, each.identity())
            for folder, each in zip(folders, runs, strict=True)
        ]
        books: list[Book] = []
        for store in filter(None, stores):
            stack.enter_context(store.locked())
        begun = [store for store in stores if store is not None and resume and store.is_begun]
        if begun and engine == "auto":
            engine = recorded_header(begun[0].out)["engine"]
        player = make_engine(engine, runs, target, width=width, precision=precision, profile=profile)
        for number, kept in enumerate(stores):
            with blame(number):
                books.append(Book(player, number, kept, resume=resume, every=checkpoint_every))
        _play(player, books, watch, until=until)
    return books[0].record if isinstance(run, Run) else [book.record for book in books]


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that nobody knows, or that the device does not have."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if precision != "float32" and device.type != "cuda":
        raise FedeveError("only a GPU has this precision", got=precision, do="use precision='float32' or device='cuda'")


def make_engine(
    name: str,
    runs: list[Run],
    device: torch.device,
    *,
    width: int | None = None,
    precision: str = "float32",
    profile: Profile | None = None,
) -> Engine:
    """The engine of this name, ready to play these runs."""
    check_precision(precision, device)
    random = any(has_random_layers(run.model) for run in runs if isinstance(run.model, nn.Module))
    if name == "reference" or (name == "auto" and random):
        return References(runs, device, precision=precision, profile=profile)
    return Lanes(runs, device, width=width, precision=precision, profile=profile)


def choose_engine(name: str) -> str:
    """What `auto` stands for, where no model has random layers."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return "lanes" if name == "auto" else name


def _folders(out: Folder | Sequence[Folder] | None, runs: list[Run], *, is_single: bool) -> list[Path | None]:
    if out is None:
        return [None] * len(runs)
    if isinstance(out, (str, Path)):
        if is_single:
            return [Path(out)]
        raise FedeveError("several runs cannot share one folder", got=str(out), do="give a list with a folder each")
    if not len({Path(folder).resolve() for folder in out}) == len(out) == len(runs):
        raise FedeveError(f"{len(runs)} runs need a folder each", got=list(map(str, out)), do="give as many folders")
    return [Path(folder) for folder in out]


@contextmanager
def _steady(threads: int, precision: str = "float32") -> Iterator[None]:
    """Arithmetic that repeats itself: so many threads, the products asked for and deterministic convolutions."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = torch.get_num_threads(), cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    products = matmul.allow_tf32
    torch.set_num_threads(threads)
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = precision != "float32", True, False
    matmul.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before[1:]
        matmul.allow_tf32 = products


class Engine(Protocol):
    """Plays runs: where their models start, and what a round does."""

    runs: list[Run]
    name: str
    precision: str
    starts: list[Tensor]
    profile: Profile

    def play(self, positions: list[Position], memories: list[Memory]) -> Iterator[tuple[int, Turn]]:
        """The rounds that are left, of any run in any order; the caller keeps a turn before it asks for the next."""
        ...

    def evaluate(self, number: int, params: Tensor) -> dict[str, Any]:
        """The metrics of a run's task on its whole test set, which `play` gives where they are due."""
        ...


class Book:
    """One run's bookkeeping: its record, where it stands, what its clients remember, and its folder if it has one."""

    def __init__(self, engine: Engine, number: int, store: Store | None, *, resume: bool | str, every: float) -> None:
        self.engine, self.number, self.run, self.store = engine, number, engine.runs[number], store
        self.every, self.saved_at, self.saved_rounds = every, time.monotonic(), -1
        start = engine.starts[number]
        self.seconds_per_byte = 7e-9  # a guess, until a checkpoint was written
        self.memory = Memory(self.run.method.remembers, like=start, most=self.run.data.num_clients)
        self.position = Position(0, self.run.server.init(start, num_clients=self.run.data.num_clients))
        if store is not None and (resume is True or (resume == "auto" and store.is_begun)):
            self.position, self.record = store.restore(self.position, self.memory)
            _refuse_other(self.record, engine=engine.name, precision=engine.precision)
            self.saved_rounds = self.position.num_rounds or -1
        else:
            made = {"engine": engine.name, "precision": engine.precision}
            self.record = Record(header(self.run, num_params=len(start), device=start.device, **made))
            if store is not None:
                store.create(self.record.header)
        self.record.params = self.position.state.params

    def keep(self, turn: Turn) -> Progress:
        """Write down what a round did. The line comes first, then the position moves, then memories."""
        pending, line = (*self.position.pending, _note(turn)), None
        if turn.metrics is not None:
            line, pending = _line(turn.num_rounds, turn.metrics, pending), ()
            self.record.lines.append(line)
            if self.store is not None:
                self.store.file.append(line)
        self.position = Position(turn.num_rounds, turn.state, pending, turn.writes)
        self.memory.put(turn.writes)
        self.record.params = turn.state.params
        if self._is_due() or turn.num_rounds == self.run.rounds:
            self.save()
        return Progress(self.run, turn.num_rounds, turn.facts, line, self.number, self.engine.profile.occupancy)

    @property
    def saving_takes(self) -> float:
        """Seconds that a checkpoint takes; what clients remember may be most of it."""
        return 0.02 + self.seconds_per_byte * self._size

    @property
    def _size(self) -> int:
        return sum(tensor.nbytes for tensor in self.position.state) + self.memory.nbytes

    def _is_due(self) -> bool:
        # The checkpoints of all runs together take at most a twentieth of the time, however large they are.
        seldom = 20 * self.saving_takes * len(self.engine.runs) if self.every else 0.0
        return time.monotonic() - self.saved_at >= max(self.every, seldom)

    def save(self) -> None:
        """Write a checkpoint of the position, unless it is written already."""
        if self.store is None or self.saved_rounds == self.position.num_rounds:
            return
        begun = time.monotonic()
        self.memory.put(self.position.writes)  # they may be half done; doing them again changes nothing
        if self.position.num_rounds == self.run.rounds:
            self.memory.clear()
        self.store.save(self.position, self.memory)
        self.saved_at, self.saved_rounds = time.monotonic(), self.position.num_rounds
        self.seconds_per_byte = (self.saved_at - begun) / self._size


class Deadline:
    """Tells when to stop so that the round under way and all checkpoints are done before the time is up."""

    def __init__(self, until: float | None, books: list[Book]) -> None:
        self.until, self.books = until, books
        self.last, self.longest = 0.0, 0.0

    def is_near(self) -> bool:
        """To be asked after every turn."""
        if self.until is None:
            return False
        now = time.monotonic()
        self.longest = max(self.longest, now - self.last) if self.last else 0.0  # the first turn is a special one
        self.last = now
        saving = sum(book.saving_takes for book in self.books if book.store is not None)
        return now + self.longest + saving >= self.until


def _play(engine: Engine, books: list[Book], watch: Watcher | None, *, until: float | None = None) -> None:
    """Play the rounds that are left of every run and keep their books."""
    deadline = Deadline(until, books)
    try:
        for number, turn in engine.play([book.position for book in books], [book.memory for book in books]):
            with blame(number):
                progress = books[number].keep(turn)
            if watch is not None:
                watch(progress)
            if deadline.is_near():
                break
    except KeyboardInterrupt:
        _save(books)
        kept = [book for book in books if book.store is not None]
        if len(kept) != 1 or kept[0].store is None:
            raise
        raise Interrupted(kept[0].position.num_rounds, kept[0].store.out) from None
    except Exception:
        for book in books:
            with suppress(Exception):  # whatever broke, be it the disk, keeps no other run from being saved
                book.save()
        raise
    _save(books)


def _save(books: list[Book]) -> None:
    for book in books:
        book.save()


def _refuse_other(record: Record, **given: str) -> None:
    """Engines agree but for the last bits, so a run that changed its engine would not be the one it says it is."""
    for what, value in given.items():
        begun = record.header.get(what, value)
        if begun != value:
            do = f"resume it with {what}={begun!r}"
            raise FedeveError(f"this run was started with another {what}", got=value, do=do)


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
