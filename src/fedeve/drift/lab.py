"""The lab: at which size figures are made, where, and how the runs behind them are set up and played."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from ..data import datasets
from ..data.federated import FederatedData
from ..errors import unknown
from ..experiments import config as configs
from ..experiments.config import Table
from ..experiments.sweep import Sweep
from ..run import Run
from ..seeds import SEEDS


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


def _alone(grid: Sweep, out: Path) -> None:
    from ..experiments.sweep_commands import Options, play

    play(grid, out, Options(no_calibration=True))


@dataclass
class Lab:
    """Where figures are made: a size, a folder, and how to say what is going on."""

    size: Size
    out: Path
    root: str | None = None
    device: str = "auto"
    """Where gradients are traced."""
    tell: Callable[[str], None] = lambda line: None
    play: Callable[[Sweep, Path], None] = _alone
    """Plays what is left of a grid of runs into its folder, or raises."""
    _loaded: dict[str, FederatedData] = field(default_factory=dict)

    def data(self, **options: Any) -> FederatedData:
        """The size's data set with these options; what was loaded is kept."""
        chosen = self._chosen(options)
        key = repr(sorted(chosen.items()))
        if key not in self._loaded:
            self._loaded[key] = datasets.load(self.size.data, **chosen)
        return self._loaded[key]

    def _chosen(self, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen = self.size.data_options | {**options} | ({"root": self.root} if self.root else {})
        if chosen.get("partition", "natural") != "natural":
            chosen.setdefault("num_clients", self.size.num_clients)
        return chosen

    def partitions(self) -> dict[str, dict[str, Any]]:
        """Options of the partitions that are compared, by title: by natural clients where there are, and Dirichlet."""
        natural: dict[str, dict[str, Any]] = {"natural": {"partition": "natural"}} if self.size.natural else {}
        return natural | {f"alpha {a:g}": {"partition": "dirichlet", "alpha": a} for a in self.size.alphas}

    def table(self, method: str, data: Mapping[str, Any], *, epochs: int = 1, **options: Any) -> Table:
        """The configuration of a run of this size, on the data set with these options."""
        size = self.size
        # Empty clients are kept, as in the paper: then a round has as many examples on average whatever alpha is.
        defaults: Table = {
            "model": size.model, "rounds": size.rounds, "cohort": size.cohort, "eval_every": size.eval_every,
            "empty": "keep", "seed": size.seeds[0],
        }  # fmt: skip
        tables = {"method": method, "local": {"lr": size.lr, "batch": 20, "epochs": epochs}}
        return defaults | options | tables | {"data": {"name": size.data, **self._chosen(data)}}

    def run(self, data: FederatedData, method: str, **options: Any) -> Run:
        """A run of this size on some data."""
        return configs.check(self.table(method, {}, **options)).build(data)
