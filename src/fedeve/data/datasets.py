"""Data sets by name. A data set is one file in this folder: a dataclass whose fields are its options.

`datasets.load("glyphs", partition="dirichlet", alpha=0.1)` makes one and deals it to clients.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from .. import settings
from ..errors import FedeveError, unknown
from ..registry import subclasses_in
from ..seeds import Indices
from ..settings import setting
from . import partition as ways
from .federated import FederatedData

DEALING = ("partition", "alpha", "num_clients", "shards_per_client")
"""Options that say how examples are dealt to clients, not which they are."""


class Arrays(NamedTuple):
    """A data set before it is dealt: inputs as stored, labels, the owner of every training row if it has one."""

    x: NDArray[np.generic]
    y: Indices
    owners: Indices | None
    x_test: NDArray[np.generic]
    y_test: Indices
    num_classes: int
    shift: float | NDArray[np.floating] = 0.0
    scale: float | NDArray[np.floating] = 1.0
    task: str = "classes"
    gather: nn.Module | None = None
    source: str = ""
    """Checksum of the files and options these arrays came from, where reading them all would take long."""


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """A data set and how it is dealt to clients. Subclasses add their own options and `arrays`."""

    partition: str = setting(
        "natural", help="how examples are dealt to clients", choices=("natural", "iid", "dirichlet", "shards")
    )
    alpha: float = setting(0.1, help="Dirichlet's concentration: small is heterogeneous", above=0)
    num_clients: int | None = setting(None, help="how many clients, unless the partition is natural", low=1)
    shards_per_client: int = setting(2, help="shards each client gets", low=1)
    seed: int = setting(0, help="seed of the data and of its partition", low=0)

    source: ClassVar[str] = "made on the spot"
    licence: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    default_clients: ClassVar[int] = 100

    def __post_init__(self) -> None:
        settings.check(self, where="data.")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def arrays(self) -> Arrays:
        """The examples, before they are dealt to clients."""

    def load(self) -> FederatedData:
        """The data set dealt to clients."""
        arrays = self.arrays()
        return FederatedData.from_arrays(
            arrays.x,
            arrays.y,
            self._deal(arrays),
            x_test=arrays.x_test,
            y_test=arrays.y_test,
            num_classes=arrays.num_classes,
            shift=arrays.shift,
            scale=arrays.scale,
            name=self.name,
            options=dataclasses.asdict(self),
            task=arrays.task,
            gather=arrays.gather,
            source=arrays.source,
        )

    def _deal(self, arrays: Arrays) -> ways.Partition:
        if self.partition == "natural":
            if arrays.owners is None:
                raise FedeveError(
                    f"{self.name} has no natural clients", got="natural", do="use iid, dirichlet or shards"
                )
            if self.num_clients is not None:
                raise FedeveError("natural clients cannot be counted", got=self.num_clients, do="leave num_clients out")
            return ways.natural(arrays.owners)
        owners = self.default_clients if arrays.owners is None else len(np.unique(arrays.owners))
        count = self.num_clients or owners
        if self.partition == "iid":
            return ways.iid(arrays.y, num_clients=count, seed=self.seed)
        if self.partition == "shards":
            return ways.shards(arrays.y, num_clients=count, per_client=self.shards_per_client, seed=self.seed)
        return ways.dirichlet(arrays.y, num_clients=count, alpha=self.alpha, seed=self.seed)


def all_datasets() -> dict[str, type[Dataset]]:
    """Every data set by name, `{"digits": Digits, ...}`."""
    return dict(subclasses_in("fedeve.data", Dataset))


def create(name: str, **options: Any) -> Dataset:
    """A data set's description by name; nothing is read or made before `load()`."""
    if name not in all_datasets():
        raise unknown("data set", name, all_datasets())
    return settings.build(all_datasets()[name], options, where="data.", kind="option")


def load(name: str, **options: Any) -> FederatedData:
    """A data set by name, dealt to clients: `load("digits", partition="dirichlet", alpha=0.1, num_clients=50)`."""
    return create(name, **options).load()
