"""The lab: at which size figures are made, and the runs behind them, each kept in a folder and resumed from there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from .. import methods
from ..data import datasets
from ..data.federated import FederatedData
from ..engines.loop import Progress, Watcher, simulate
from ..errors import FedeveError, unknown
from ..local import LocalWork
from ..record import RECORD, Record
from ..run import Run
from ..seeds import SEEDS
from .conditions import CONDITIONS

_TOGETHER = 64  # runs that are played at a time: each has its own state on the device, and files of its own


@dataclass(frozen=True, kw_only=True)
class Size:
    """On what, and how much of it, figures are made."""

    data: str
    data_options: dict[str, Any] = field(default_factory=dict)
    num_clients: int
    natural: bool
    """Whether the data set has clients of its own, which are then shown beside the Dirichlet partitions."""
    model: str
    rounds: int
    cohort: int
    lr: float
    eval_every: int
    last: int
    """Rounds at the end over which accuracies are averaged."""
    seeds: tuple[int, ...] = (192,)
    alphas: tuple[float, ...] = (1.0, 0.1, 0.01)
    epochs: tuple[int, ...] = (1, 3, 5)
    trace_rounds: int
    """Rounds over which gradients are traced."""
    trace_clients: int
    """Clients of the federation in which they are traced: few, since every round needs the full gradient."""
    trace_examples: int | None = None
    """Examples each of them has at most there."""
    trace_params: int = 200
    """Parameters tested for normality."""
    num_cohorts: int = 2000
    """Cohorts drawn for a Monte-Carlo mean."""


SIZES = {
    "tiny": Size(
        data="digits", num_clients=40, natural=False, model="linear", rounds=6, cohort=5, lr=0.1, eval_every=2, last=4,
        alphas=(1.0, 0.01), epochs=(1, 2), trace_rounds=40, trace_clients=20, trace_params=20, num_cohorts=200,
    ),
    "quick": Size(
        data="mnist", num_clients=1000, natural=True, model="lenet5", rounds=40, cohort=10, lr=0.05, eval_every=4,
        last=12, trace_rounds=100, trace_clients=100, trace_examples=20,
    ),
    "paper": Size(
        data="femnist", num_clients=3400, natural=True, model="lenet5", rounds=1500, cohort=10, lr=0.01, eval_every=10,
        last=100, seeds=SEEDS, trace_rounds=1500, trace_clients=300, trace_examples=50,
    ),
}  # fmt: skip
"""`tiny` takes seconds and shows that everything works, `quick` some minutes, `paper` is the paper's setting."""


def size(name: str, **changes: Any) -> Size:
    """A size by name, with some of its values replaced where they are not None."""
    if name not in SIZES:
        raise unknown("size", name, SIZES)
    given = {key: value for key, value in changes.items() if value is not None}
    chosen = dataclasses.replace(SIZES[name], **given)
    if "data" in given:
        about = datasets.all_datasets().get(given["data"])
        if about is None:
            raise unknown("data set", given["data"], datasets.all_datasets())
        natural = given["data"] in ("glyphs", "femnist", "mnist", "movielens1m")
        chosen = dataclasses.replace(chosen, natural=natural, data_options={})
    return chosen


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for a while: small models gain nothing from two, and two collapse beside a busy process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):  # numpy's as well
            yield
    finally:
        torch.set_num_threads(before)


Watching = Callable[[str], AbstractContextManager[Watcher | None]]


class Clock:
    """Says how a long computation goes on: at most one line every few seconds."""

    def __init__(self, label: str, total: int, tell: Callable[[str], None], every: float = 2.0) -> None:
        self.label, self.total, self.tell, self.every = label, total, tell, every
        self.begun = self.told = time.monotonic()
        self.done = 0

    def __call__(self, done: int | None = None) -> None:
        """So much is done, or one more."""
        self.done = self.done + 1 if done is None else done
        now = time.monotonic()
        if now - self.told >= self.every:
            self.told = now
            left = (self.total - self.done) * (now - self.begun) / max(self.done, 1)
            self.tell(f"{self.label}  {self.done}/{self.total}  {left:.0f} s left")


@dataclass
class Lab:
    """Where figures are made: a size, a folder, and how to say what is going on."""

    size: Size
    out: Path
    root: str | None = None
    engine: str = "auto"
    device: str = "auto"
    precision: str = "float32"
    tell: Callable[[str], None] = lambda line: None
    watching: Watching = lambda label: nullcontext()
    _loaded: dict[str, FederatedData] = field(default_factory=dict)

    def data(self, **options: Any) -> FederatedData:
        """The size's data set with these options; what was loaded is kept."""
        chosen = self.size.data_options | options | ({"root": self.root} if self.root else {})
        if chosen.get("partition", "natural") != "natural":
            chosen.setdefault("num_clients", self.size.num_clients)
        key = repr(sorted(chosen.items()))
        if key not in self._loaded:
            self._loaded[key] = datasets.load(self.size.data, **chosen)
        return self._loaded[key]

    def partitions(self) -> dict[str, dict[str, Any]]:
        """Options of the partitions that are compared, by title: by natural clients where there are, and Dirichlet."""
        natural: dict[str, dict[str, Any]] = {"natural": {"partition": "natural"}} if self.size.natural else {}
        return natural | {f"alpha {a:g}": {"partition": "dirichlet", "alpha": a} for a in self.size.alphas}

    def run(self, data: FederatedData, method: str, **options: Any) -> Run:
        """A run of this size on some data."""
        size, epochs = self.size, options.pop("epochs", 1)
        # Empty clients are kept, as in the paper: then a round has as many examples on average whatever alpha is.
        defaults: dict[str, Any] = {
            "model": size.model, "rounds": size.rounds, "cohort": size.cohort, "eval_every": size.eval_every,
            "empty": "keep", "seed": size.seeds[0],
        }  # fmt: skip
        local = LocalWork(lr=size.lr, batch=20, epochs=epochs)
        return Run(method=methods.create(method), data=data, local=local, **(defaults | options))

    def play(self, cells: Sequence[Cell]) -> dict[str, Record]:
        """The records of cells, by name: from their folders if they are there, gone on with if they are unfinished,
        else from the start. Those that are left share lanes, however their data are dealt."""
        runs = {cell.name: cell.build(self.data(**cell.data)) for cell in cells}
        found = {name: record for name, run in runs.items() if (record := self._finished(name, run)) is not None}
        left = [cell for cell in cells if cell.name not in found]
        if not left:
            return found
        with self._watched(left, [runs[cell.name] for cell in left]) as watch:
            played = simulate(
                [runs[cell.name] for cell in left], out=[self._folder(cell.name) for cell in left], resume="auto",
                engine=self.engine, device=self.device, precision=self.precision, checkpoint_every=30.0, watch=watch,
            )  # fmt: skip
        return found | {cell.name: record for cell, record in zip(left, played, strict=True)}

    def _folder(self, name: str) -> Path:
        return self.out / "runs" / name

    def _finished(self, name: str, run: Run) -> Record | None:
        """The record that lies in a run's folder, if it reaches the end."""
        path = self._folder(name) / RECORD
        if not path.exists():
            return None
        record = Record.read(path)
        if record.header["identity"] != run.identity():
            raise FedeveError(
                f"{path.parent} holds a run of another size or version",
                got=record.header["identity"],
                do="choose another folder with --out, or remove this one",
            )
        return record if record.lines and record.lines[-1]["round"] == run.rounds else None

    @contextmanager
    def _watched(self, cells: list[Cell], runs: list[Run]) -> Iterator[Watcher | None]:
        """One run round by round; several by how much of them is done."""
        if len(cells) == 1:
            with self.watching(cells[0].label) as watch:
                yield watch
            return
        clock = Clock(f"rounds of {len(runs)} runs", sum(run.rounds for run in runs), self.tell)
        seen: set[int] = set()

        def count(progress: Progress) -> None:
            if progress.number not in seen:
                seen.add(progress.number)
                clock.total -= progress.num_rounds - 1  # which an earlier session played
            clock()

        yield count


@dataclass(frozen=True)
class Cell:
    """One run of a grid: its folder's name, what it shows, on which data, and how it is built."""

    name: str
    label: str
    keys: dict[str, Any]
    data: dict[str, Any]
    """Options of the data set."""
    build: Callable[[FederatedData], Run]


def condition_cells(lab: Lab) -> list[Cell]:
    """The grid of figure 2b: four conditions, by alpha, by epochs, by seed; iid does not depend on alpha."""
    cells = []
    for seed in lab.size.seeds:
        for epochs in lab.size.epochs:
            for name in CONDITIONS:
                for alpha in lab.size.alphas if name != "iid" else lab.size.alphas[:1]:
                    cells.append(_condition_cell(lab, name, alpha=alpha, epochs=epochs, seed=seed))
    return cells


def _condition_cell(lab: Lab, name: str, *, alpha: float, epochs: int, seed: int) -> Cell:
    condition = CONDITIONS[name]

    def build(data: FederatedData) -> Run:
        return lab.run(data, "fedavg", epochs=epochs, seed=seed, **condition.run_options(alpha))

    shown = "" if name == "iid" else f" alpha {alpha:g}"
    folder = f"fedavg-{name}{shown.replace(' alpha ', '-')}-e{epochs}-s{seed}"
    keys = {"condition": name, "alpha": None if name == "iid" else alpha, "epochs": epochs, "seed": seed}
    label = f"{condition.title}{shown} E {epochs} seed {seed}"
    return Cell(folder, label, keys, condition.data_options(alpha), build)


def gain_cells(lab: Lab) -> list[Cell]:
    """The grid of the gain's boxes: FedEve by partition, by epochs, by seed."""
    cells = []
    for seed in lab.size.seeds:
        for epochs in lab.size.epochs:
            for title, options in lab.partitions().items():
                build = _gain_build(lab, epochs=epochs, seed=seed)
                folder = f"fedeve-{title.replace('alpha ', '')}-e{epochs}-s{seed}"
                keys = {"partition": title, "epochs": epochs, "seed": seed}
                cells.append(Cell(folder, f"FedEve {title} E {epochs} seed {seed}", keys, options, build))
    return cells


def _gain_build(lab: Lab, *, epochs: int, seed: int) -> Callable[[FederatedData], Run]:
    return lambda data: lab.run(data, "fedeve", epochs=epochs, seed=seed)


def play_all(lab: Lab, cells: Sequence[Cell]) -> list[tuple[Cell, Record]]:
    """Every cell of a grid with its record; they are played together, up to so many at a time."""
    records: dict[str, Record] = {}
    for first in range(0, len(cells), _TOGETHER):
        records |= lab.play(cells[first : first + _TOGETHER])
    return [(cell, records[cell.name]) for cell in cells]
