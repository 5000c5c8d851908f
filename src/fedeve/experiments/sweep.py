"""Sweeps: a TOML file names a base configuration and what varies, and becomes a list of points, one per run.

Playing them is `sweep_play.py`; what a sweep's folder holds is `sweep_folder.py`.

```toml
title = "Server methods on skewed digits"
base = "digits.toml"                  # a file beside this one, a preset such as "paper/movielens1m", or a table
seeds = [192, 225, 226]

[grid]                                # every combination
method = ["fedavg", "fedavgm", "fedeve"]
data.alpha = [1, 0.1]

[[points]]                            # and these; a list is again a choice
method = { name = "fedprox" }
method.mu = [0.01, 0.1]
```
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import methods
from ..data.datasets import DEALING
from ..errors import FedeveError, Words, unknown
from . import config as configs
from .config import Plan, Table
from .manifest import Printed

KEYS = ("title", "base", "seeds", "grid", "points", "metrics", "last")


@dataclass(frozen=True, eq=False)
class Point:
    """One run of a sweep: its checked configuration and the cell of the table it belongs to."""

    plan: Plan
    row: str = ""
    column: str = ""

    @functools.cached_property
    def config(self) -> Table:
        """The whole configuration, as the run's record will have it."""
        return self.plan.describe()

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def rounds(self) -> int:
        return int(self.config["rounds"])

    @functools.cached_property
    def name(self) -> str:
        """The name of its folder. It depends on the configuration alone, so a run is found again in a larger sweep."""
        config = self.config
        words = f"{config['method']['name']}-{config['data']['name']}-s{self.seed}"
        return f"{re.sub(r'[^a-z0-9]+', '-', words.lower())}-{checksum(config)}"

    @functools.cached_property
    def shares(self) -> str:
        """Runs for which this is equal share one pool of lanes, however their examples are dealt to clients."""
        config = portable(self.config)
        local = {k: v for k, v in config["local"].items() if k not in ("lr", "epochs", "steps")}
        data = {k: v for k, v in config["data"].items() if k not in DEALING}
        return checksum({"model": config["model"], "data": data, "dtype": config["dtype"], "local": local})


@dataclass(frozen=True)
class Sweep:
    """A title, the points without duplicates, and how their records are to be read."""

    title: str
    points: list[Point]
    metrics: list[str] = field(default_factory=list)
    """Names in the records; found in the first record where it is empty."""
    last: int = 100
    """How many of the last rounds a value is the mean of."""
    printed: Printed = field(default_factory=dict)
    source: str = ""
    notes: list[str] = field(default_factory=list)
    """What a reader of the printed numbers should know."""
    grows: bool = False
    """Whether a folder may hold more than these points, asked for earlier."""
    order: Mapping[str, list[str]] = field(default_factory=dict)
    """All `rows` and `columns` of the table that these points are from, asked for or not."""


def portable(config: Mapping[str, Any]) -> Table:
    """A configuration without where its files lie, which changes nothing of what is in them."""
    config = configs.copy(config)
    for place in ("root", "path"):
        config["data"].pop(place, None)
    return config


def checksum(config: Mapping[str, Any]) -> str:
    """Eight characters that two equal configurations share."""
    kept = portable(config) if "data" in config else config
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def read(path: str | Path, *, assignments: Iterable[str] = ()) -> Sweep:
    """The sweep in a TOML file; assignments such as `rounds=10` change its base."""
    table = configs.read(path)
    for key in table:
        if key not in KEYS:
            raise unknown(f"key {key!r} of a sweep", key, KEYS)
    base = configs.override(_base(table.get("base", {}), Path(path).parent), assignments)
    blocks = [table["grid"]] if "grid" in table else []
    blocks += table.get("points", [])
    for block in blocks:
        if not isinstance(block, dict) or not block:
            raise FedeveError(
                "a grid must be a table that is not empty", got=block, do="write key = [value, ...] lines"
            )
    if not blocks:
        raise FedeveError("the sweep has no runs", got=Words("no grid and no points"), do="add a [grid] of key = [...]")
    if "seeds" in table:
        blocks = [block if "seed" in block else {**block, "seed": table["seeds"]} for block in blocks]
    points = labelled(unique([point for block in blocks for point in _expand(base, block)]))
    title = _text("title", table.get("title", Path(path).stem))
    return Sweep(title, points, _names(table.get("metrics", [])), _last(table.get("last", 100)))


def unique(points: list[Point]) -> list[Point]:
    """The points without those whose configuration came before."""
    first: dict[str, Point] = {}
    for point in points:
        first.setdefault(point.name, point)
    return list(first.values())


def labelled(points: list[Point]) -> list[Point]:
    """Points that have no row or column of their own get them from what differs between them."""
    flat = [dict(leaves(portable(point.config))) for point in points]
    varied = _varying([{k: v for k, v in one.items() if not k.startswith("method.") and k != "seed"} for one in flat])
    by_method: dict[str, list[Table]] = defaultdict(list)
    for one in flat:
        by_method[one["method.name"]].append({k: v for k, v in one.items() if k.startswith("method.")})
    knobs = {name: _varying(ones) for name, ones in by_method.items()}
    result = []
    for point, one in zip(points, flat, strict=True):
        name = one["method.name"]
        words = _words(one, knobs[name])
        row = methods.all_methods()[name].__name__ + (f" ({words})" if words else "")
        result.append(Point(point.plan, point.row or row, point.column or _words(one, varied) or one["data.name"]))
    return result


def _varying(ones: list[Table]) -> list[str]:
    keys = dict.fromkeys(key for one in ones for key in one)
    return [key for key in keys if len({json.dumps(one.get(key)) for one in ones}) > 1]


def _words(one: Table, keys: list[str]) -> str:
    """`alpha 0.1, lr 0.05`: the last parts of the keys, unless two of them end alike; a name stands alone."""
    ends = [key.rpartition(".")[2] for key in keys]
    parts = []
    for key, end in zip(keys, ends, strict=True):
        if one.get(key) is not None:
            value = f"{one[key]:g}" if isinstance(one[key], float) else str(one[key])
            parts.append(value if end == "name" else f"{end if ends.count(end) == 1 else key} {value}")
    return ", ".join(parts)


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """A table's values with their keys written as `local.lr`."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _base(value: Any, folder: Path) -> Table:
    if isinstance(value, dict):
        return value
    text = _text("base", value)
    beside = folder / text
    return configs.read(beside if beside.exists() else text)


def _expand(base: Table, block: Table) -> Iterable[Point]:
    """Every combination of a block's choices, put into the base and checked."""
    choices = []
    for key, values in leaves({k: v for k, v in block.items() if k not in ("row", "column")}):
        listed = values if isinstance(values, list) else [values]
        if not listed:
            raise FedeveError(f"{key} has no values", got=values, do=f"write {key} = [value, ...]")
        choices.append((key.split("."), listed))
    # `method` before `method.mu`: the table is there when its key is set.
    choices.sort(key=lambda choice: len(choice[0]))
    for picked in itertools.product(*(listed for _, listed in choices)):
        table = configs.copy(base)
        for (path, _), value in zip(choices, picked, strict=True):
            configs.put(table, path, configs.copy(value) if isinstance(value, dict) else value)
        yield Point(configs.check(table), _text("row", block.get("row", "")), _text("column", block.get("column", "")))


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FedeveError(f"{key} must be a text", got=value, do=f'write {key} = "..."')
    return value


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FedeveError("metrics must be a list of names", got=value, do='write metrics = ["accuracy"]')
    return value


def _last(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FedeveError("last must be a number of rounds", got=value, do="write last = 100")
    return value
