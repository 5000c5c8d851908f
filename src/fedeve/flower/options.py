"""What our strategies can be told, with bounds and help texts: what Flower's FedAvg can, and options of our own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import FedeveError, unknown
from ..method import Method
from ..methods import all_methods
from ..settings import setting
from .arrays import STATISTICS

_THEIRS = {
    "proximal_mu": "mu",
    "eta": "server_lr",
    "server_learning_rate": "server_lr",
    "server_momentum": "beta",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
}
"""What Flower's strategies, of either API, call what has another name here."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How many nodes train and evaluate: arguments of Flower's FedAvg, checked when a strategy is made."""

    fraction_train: float = setting(help="the share of nodes that train", low=0, high=1)
    fraction_evaluate: float = setting(help="the share of nodes that evaluate", low=0, high=1)
    min_train_nodes: int = setting(help="the fewest nodes that train", low=0)
    min_evaluate_nodes: int = setting(help="the fewest nodes that evaluate", low=0)
    min_available_nodes: int = setting(help="how many nodes a round waits for", low=0)

    def __post_init__(self) -> None:
        settings.check(self)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How cohorts are drawn, where the state is kept, and what is asked of a reply."""

    seed: int = setting(0, help="seed of the cohorts, which are a function of it and of the round", low=0)
    nodes: str = setting(
        "registered",
        help="what a node's number is: its place in the order of registration, or the partition-id it is asked for",
        choices=("registered", "ask"),
    )
    num_clients: int | None = setting(None, help="the population, if more than the nodes of the first round", low=1)
    checkpoint: Any = setting(None, help="the file that holds the server's state after every round, a path")
    statistics: Any = setting(STATISTICS, help="names of arrays that are averaged but kept out of the method, a tuple")
    clip_norm: float | None = setting(None, help="largest norm of an update; a larger one is scaled down", above=0)
    outlier: float | None = setting(1000.0, help="a reply so many times larger than the median is left out", above=1)
    max_outliers: int = setting(
        8, help="how many such replies are left out; more of them, and the round is lost", low=1
    )
    max_examples: float = setting(1e9, help="more examples than a client can have", above=0)
    min_replies: int = setting(1, help="good replies without which a round is lost", low=1)
    window: int = setting(4, help="replies that are fetched before it is their turn", low=1)

    def __post_init__(self) -> None:
        settings.check(self)
        names = self.statistics
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            example = (names if isinstance(names, str) else "running_mean",)
            raise FedeveError("statistics must be a tuple of names", got=names, do=f"write statistics={example!r}")
        object.__setattr__(self, "statistics", tuple(names))
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise FedeveError("checkpoint must be a path", got=self.checkpoint, do='write checkpoint="server.state"')
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", Path(self.checkpoint))


def read_options(table: Mapping[str, Any], *, others: Iterable[str]) -> Options:
    """Options from keywords; `others` are what else a strategy takes, to be named where a keyword is unknown."""
    known = {*others, *(field.name for field in dataclasses.fields(Options))}
    for key in table:
        if key not in known and _THEIRS.get(key) in known:
            raise FedeveError("this keyword has another name here", got=key, do=f"write {_THEIRS[key]}")
        if key not in known:
            raise unknown("keyword", key, known)
    return settings.build(Options, table, kind="option")


def check_method(method: Any) -> None:
    """Raise unless this is a method; its class and the strategy of the same name are easily taken for it."""
    if isinstance(method, Method):
        return
    name = (method if isinstance(method, type) else type(method)).__name__
    name = name if name in {cls.__name__ for cls in all_methods().values()} else "FedEve"
    raise FedeveError(
        "a method is needed, not its class or a strategy",
        got=method,
        do=f"write {name}(...) with `from fedeve import {name}`",
    )
