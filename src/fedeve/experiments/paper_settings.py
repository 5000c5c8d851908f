"""What a table of the paper is made of: rows, each a method with its values, and columns, each a setting.

Which tables there are is in `paper_tables.py`, what is run beyond the paper in `paper_grids.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from . import config as configs
from .config import Table

SETS = {"femnist": "FEMNIST", "cifar100": "CIFAR-100", "movielens1m": "MovieLens-1M"}
RANKING = ("auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10")


@dataclass(frozen=True)
class Row:
    """A method under the name it has in our tables, and whose printed row stands beside it."""

    name: str
    printed: str
    method: Table
    by_default: bool = True
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What else differs from the column's setting, by key: `{"local.epochs": 3}`."""

    def values(self, data: str) -> Table:
        """Its hyper-parameters on a data set: the authors' (they differ by data set) where the row has none."""
        if self.method["name"] in ("fedprox", "fedeveprox"):
            return {"mu": 0.01 if data == "movielens1m" else 1.0, **self.method}
        if self.method["name"] in ("fedadam", "fedeveadam"):
            return {"tau": 3e-4 if data == "femnist" else 1e-4, **self.method}
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
    Row("FedEveAdam (ours)", "", {"name": "fedeveadam", "server_lr": 1e-3, "beta2": 0.99}),
    Row("FedEveProx (ours)", "", {"name": "fedeveprox", "server_lr": 1.0, "drift": "paper"}, by_default=False),
)

# Parts of a column's key that change its preset: the setting they put a value in, and how a column's name says it.
_CHANGES = {
    "E": ("local.epochs", ", E = {}"),
    "lr": ("local.lr", ", lr {}"),
    "N": ("data.num_clients", " in {} clients"),
}


@dataclass(frozen=True)
class Column:
    """A setting by its key: a preset and what differs from it, `femnist/natural/E=3`."""

    key: str
    printed_as: str | None = None
    """Its key in `printed.json`, where that is another."""

    @property
    def data(self) -> str:
        return self.key.split("/")[0]

    @property
    def printed(self) -> str:
        return self.key if self.printed_as is None else self.printed_as

    @property
    def label(self) -> str:
        """Its name in tables: `FEMNIST, Dirichlet 0.1, E = 3`."""
        plain = "".join(f", {part.replace('dirichlet-', 'Dirichlet ')}" for part in self._preset[1:])
        words = {name: _CHANGES[name][1].format(value) for name, value in self._changes}
        return SETS[self.data] + words.pop("N", "") + plain + "".join(words.values())

    def config(self) -> Table:
        table = configs.read(f"paper/{'-'.join(self._preset)}")
        return configs.override(table, [f"{_CHANGES[name][0]}={value}" for name, value in self._changes])

    @property
    def _preset(self) -> list[str]:
        return [part for part in self.key.split("/") if "=" not in part]

    @property
    def _changes(self) -> list[tuple[str, str]]:
        return [(part.split("=")[0], part.split("=")[1]) for part in self.key.split("/") if "=" in part]


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper, or one of ours beside it."""

    name: str
    title: str
    about: str
    columns: tuple[Column, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    rows: tuple[Row, ...] = ROWS
    seeds: int = 5
    """How many of the paper's seeds, unless asked for others."""


WAYS = ("natural", "dirichlet-1", "dirichlet-0.1", "dirichlet-0.01")
FEMNIST = tuple(Column(f"femnist/{way}") for way in WAYS)
CIFAR = tuple(Column(f"cifar100/{way}") for way in WAYS[1:])
# The paper has Adam at 0.01, the released code at 0.001: what is printed stands beside both.
MOVIELENS = tuple(Column(f"movielens1m/lr={lr}", "movielens1m") for lr in ("0.01", "0.001"))
EPOCHS = tuple(Column(f"femnist/{way}/E={epochs}") for way in WAYS for epochs in (1, 3, 5))
EVERYWHERE = (*CIFAR, *MOVIELENS, *FEMNIST)
