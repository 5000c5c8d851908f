"""What our strategies can be told beyond what Flower's FedAvg can, with bounds and help texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..settings import setting
from .arrays import STATISTICS


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
        object.__setattr__(self, "statistics", tuple(self.statistics))
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", Path(self.checkpoint))
