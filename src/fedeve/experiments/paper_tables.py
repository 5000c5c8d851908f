"""The paper's tables as sweeps, built from the presets: every method with the authors' values, the paper's seeds.

What the paper printed lies in `paper/printed.json`, with its source and what is known to be misprinted.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..data import cache
from ..data.datasets import all_datasets
from ..data.files import FileDataset
from ..errors import FedeveError, unknown
from . import config as configs
from .config import Table
from .manifest import Printed
from .sweep import Point, Sweep

SEEDS = (192, 225, 226, 230, 231)  # the released code's
SETS = {"femnist": "FEMNIST", "cifar100": "CIFAR-100", "movielens1m": "MovieLens-1M"}


@dataclass(frozen=True)
class Row:
    """A method under the name it has in our tables, and whose printed row stands beside it."""

    name: str
    printed: str
    method: Table
    by_default: bool = True

    def values(self, data: str) -> Table:
        """Its hyper-parameters on a data set: the authors' (they differ by data set)."""
        if self.method["name"] == "fedprox":
            return {**self.method, "mu": 0.01 if data == "movielens1m" else 1.0}
        if self.printed == "fedopt":
            return {**self.method, "tau": 3e-4 if data == "femnist" else 1e-4}
        return self.method


_ADAPTIVE = {"server_lr": 1e-3, "beta1": 0.9}
ROWS = (
    Row("FedAvg", "fedavg", {"name": "fedavg", "server_lr": 1.0}),
    Row("FedAvgM", "fedavgm", {"name": "fedavgm", "server_lr": 1.0, "beta": 0.9}),
    Row("FedProx", "fedprox", {"name": "fedprox", "server_lr": 1.0}),
    Row("SCAFFOLD", "scaffold", {"name": "scaffold", "server_lr": 1.0, "control": "paper"}),
    Row("SCAFFOLD (released)", "scaffold", {"name": "scaffold", "server_lr": 1.0, "control": "released"}),
    Row("FedOpt (FedAdam)", "fedopt", {"name": "fedadam", **_ADAPTIVE, "beta2": 0.99}),
    # Members of FedOpt that the paper does not print: only when asked for.
    Row("FedOpt (FedYogi)", "", {"name": "fedyogi", **_ADAPTIVE, "beta2": 0.99}, by_default=False),
    Row("FedOpt (FedAdagrad)", "", {"name": "fedadagrad"}, by_default=False),
    Row("FedEve", "fedeve", {"name": "fedeve", "server_lr": 1.0, "drift": "paper"}),
    Row("FedEve (released)", "fedeve", {"name": "fedeve", "server_lr": 1.0, "drift": "released"}),
)


@dataclass(frozen=True)
class Column:
    """A setting: its key in `printed.json`, its name in tables, its preset and what differs from it."""

    key: str
    epochs: int | None = None

    @property
    def data(self) -> str:
        return self.key.split("/")[0]

    @property
    def setting(self) -> str:
        """What follows the data set's name: `, Dirichlet 0.1, E = 3`."""
        parts = self.key.split("/")[1:]
        return "".join(f", {part.replace('dirichlet-', 'Dirichlet ').replace('E=', 'E = ')}" for part in parts)

    def config(self) -> Table:
        kind = "-".join(part for part in self.key.split("/") if not part.startswith("E="))
        table = configs.read(f"paper/{kind}")
        if self.epochs is not None:
            configs.put(table, ["local", "epochs"], self.epochs)
        return table


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper."""

    name: str
    title: str
    about: str
    columns: tuple[Column, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    methods: tuple[str, ...] = ()
    """Names of methods, where not all of them."""

    def rows(self) -> tuple[Row, ...]:
        return tuple(row for row in ROWS if not self.methods or row.method["name"] in self.methods)


_WAYS = ("natural", "dirichlet-1", "dirichlet-0.1", "dirichlet-0.01")
_EPOCHS = tuple(Column(f"femnist/{way}/E={epochs}", epochs) for way in _WAYS for epochs in (1, 3, 5))
TABLES = {
    table.name: table
    for table in (
        PaperTable(
            "table1",
            "Table 1: FEMNIST and CIFAR-100",
            "accuracy of every method by partition, LeNet-5 and ResNet-18",
            (*(Column(f"femnist/{way}") for way in _WAYS), *(Column(f"cifar100/{way}") for way in _WAYS[1:])),
        ),
        PaperTable(
            "table2",
            "Table 2: MovieLens-1M",
            "ranking by DIN, every user a client",
            (Column("movielens1m"),),
            ("auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10"),
        ),
        PaperTable(
            "table3",
            "Table 3: FEMNIST by local epochs",
            "accuracy of every method by partition and local epochs",
            _EPOCHS,
        ),
        PaperTable(
            "gain",
            "The Kalman gain by partition and local epochs",
            "FedEve's gain over the rounds, in both variants; the paper shows box plots",
            _EPOCHS,
            methods=("fedeve",),
        ),
    )
}


def build(
    table: PaperTable,
    *,
    seeds: int = len(SEEDS),
    methods: Sequence[str] = (),
    only: Sequence[str] = (),
    data: str | None = None,
    tiny: bool = False,
    root: str | None = None,
    assignments: Iterable[str] = (),
) -> Sweep:
    """A table as a sweep: some of its rows and columns, with a stand-in for FEMNIST or tiny on embedded data."""
    if tiny and data is not None:
        raise FedeveError("tiny has data of its own", got=data, do="leave out --tiny or --data")
    if data is not None and data not in all_datasets():
        raise unknown("data set", data, all_datasets())
    rows, columns = _chosen_rows(table, methods), _chosen_columns(table, only)
    standins = {"femnist": data} if data not in (None, "femnist") else {}
    points, names = [], {}
    for column in columns:
        base = column.config()
        label = SETS[column.data] + column.setting
        if tiny:
            base, label = _shrink(base, column), f"{_TINY[column.data]} in place of {label}"
        elif column.data in standins:
            base["data"] = _standin(base["data"], data or "")
            label = f"{data} in place of {label}"
        if root is not None and not tiny and issubclass(all_datasets()[base["data"]["name"]], FileDataset):
            base["data"]["root"] = root
        names[column.key] = label
        base = configs.override(base, assignments)
        for row in rows:
            for seed in SEEDS[:seeds]:
                config = {**base, "method": row.values(column.data), "seed": seed}
                points.append(Point(configs.check(config), row.name, label))
    original = {key: name for key, name in names.items() if not tiny and key.split("/")[0] not in standins}
    title = table.title + (" (tiny, on embedded data)" if tiny else f" ({data} in place of FEMNIST)" * bool(standins))
    sweep = Sweep(title, points, list(table.metrics), grows=True, notes=_read_printed()["notes"][table.name])
    printed = _printed(table, rows, original)
    return replace(sweep, printed=printed, source=_read_printed()["source"]) if printed else sweep


def _printed(table: PaperTable, rows: Sequence[Row], names: dict[str, str]) -> Printed:
    """What the paper printed for these rows and columns, under our names; a variant stands beside the same row."""
    found = _read_printed()["tables"].get(table.name, {})
    result: Printed = {}
    for metric, by_method in found.items():
        for row in rows:
            cells = by_method.get(row.printed, {})
            kept = {name: cells[key] for key, name in names.items() if key in cells}
            if kept:
                result.setdefault(metric, {})[row.name] = kept
    return result


def _read_printed() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "paper" / "printed.json").read_text(encoding="utf-8")))


def _chosen_rows(table: PaperTable, methods: Sequence[str]) -> list[Row]:
    rows = table.rows()
    if not methods:
        return [row for row in rows if row.by_default]
    known = {name for row in rows for name in (row.name.lower(), row.method["name"])}
    for method in methods:
        if method.lower() not in known:
            raise unknown("method of this table", method, known)
    wanted = {method.lower() for method in methods}
    return [row for row in rows if {row.name.lower(), row.method["name"]} & wanted]


def _chosen_columns(table: PaperTable, only: Sequence[str]) -> list[Column]:
    """Columns by their data set or a part of their key: `cifar100`, `natural`, `dirichlet-0.1`, `E=3`."""
    known = list(dict.fromkeys(part for column in table.columns for part in column.key.split("/")))
    for part in only:
        if part not in known:
            raise unknown("part of this table", part, known)
    sets = [part for part in only if part in SETS]
    others = [part for part in only if part not in SETS]
    chosen = []
    for column in table.columns:
        parts = column.key.split("/")
        if (not sets or column.data in sets) and (not others or set(others) & set(parts)):
            chosen.append(column)
    return chosen


def _standin(table: Table, name: str) -> Table:
    """Another data set dealt the same way: to its own writers, or by label to as many clients as it has writers."""
    kept = {key: value for key, value in table.items() if key in ("partition", "alpha", "seed")}
    return {"name": name, **kept, **({"num_writers": 3400} if name == "glyphs" else {})}


_TINY = {"femnist": "glyphs", "cifar100": "digits", "movielens1m": "made-up ratings"}


def _shrink(table: Table, column: Column) -> Table:
    """The same setting on a handful of embedded or made-up clients, for a few rounds."""
    table = {**table, "rounds": 4, "eval_every": 2, "cohort": 3}
    dealt = {key: value for key, value in table["data"].items() if key in ("partition", "alpha", "seed")}
    if column.data == "femnist":
        table["data"] = {"name": "glyphs", **dealt, "num_writers": 12, "num_images": 120, "num_test": 62}
    elif column.data == "cifar100":
        table |= {"model": "linear", "data": {"name": "digits", **dealt, "num_clients": 20}}
    else:
        table["data"] = {**table["data"], "root": str(_made_up_ratings())}
    return table


def _made_up_ratings() -> Path:
    """A folder with an `ml-1m.zip` of 30 made-up people who rate movies at random, written once into the cache."""
    folder = cache.cache_root() / "made-up-ratings"
    path = folder / "ml-1m.zip"
    if path.exists():
        return folder
    rng = np.random.default_rng(0)
    ratings = [
        f"{user}::{movie}::{rng.integers(1, 6)}::{956703932 + when}\n"
        for user in range(1, 31)
        for when, movie in enumerate(rng.choice(np.arange(1, 201), size=int(rng.integers(8, 30)), replace=False))
    ]
    people = [f"{user}::{'FM'[user % 2]}::25::{user % 21}::{user:05}\n" for user in range(1, 31)]
    movies = [f"{movie}::Movie {movie} (1995)::Comedy\n" for movie in range(1, 201)]
    folder.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    with zipfile.ZipFile(beside, "w") as archive:
        for name, lines in (("ratings", ratings), ("users", people), ("movies", movies)):
            archive.writestr(zipfile.ZipInfo(f"ml-1m/{name}.dat"), "".join(lines))
    beside.replace(path)
    return folder
