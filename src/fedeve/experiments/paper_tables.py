"""The paper's tables, and those we put beside them, as sweeps: presets, methods with their values, the paper's seeds.

What the paper printed lies in `paper/printed.json`, with its source and what is known to be misprinted.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..data import cache
from ..data.datasets import all_datasets
from ..data.files import FileDataset
from ..errors import FedeveError, unknown
from ..seeds import SEEDS
from . import config as configs
from .config import Table
from .manifest import Printed
from .paper_grids import ABLATION, PER_LAYER, TUNED, layer_sizes
from .paper_settings import CIFAR, EPOCHS, FEMNIST, MOVIELENS, RANKING, ROWS, SETS, Column, PaperTable, Row
from .sweep import Point, Sweep

LAST = 100  # rounds whose evaluations are averaged, as in the paper; a tenth of them where there are fewer than 1000
TABLES = {
    table.name: table
    for table in (
        PaperTable(
            "table1",
            "Table 1: FEMNIST and CIFAR-100",
            "accuracy of every method by partition, LeNet-5 and ResNet-18",
            (*FEMNIST, *CIFAR),
        ),
        PaperTable(
            "table2",
            "Table 2: MovieLens-1M",
            "ranking by DIN, every user a client, at the paper's and at the released code's rate",
            MOVIELENS,
            RANKING,
        ),
        PaperTable(
            "table3",
            "Table 3: FEMNIST by local epochs",
            "accuracy of every method by partition and local epochs",
            EPOCHS,
        ),
        PaperTable(
            "gains",
            "The Kalman gain by partition and local epochs",
            "FedEve's gain over the rounds, in both variants; the paper shows box plots",
            EPOCHS,
            rows=tuple(row for row in ROWS if row.method["name"] == "fedeve"),
        ),
        TUNED,
        ABLATION,
    )
}


def build(
    table: PaperTable,
    *,
    seeds: int | Sequence[int] | None = None,
    methods: Sequence[str] = (),
    only: Sequence[str] = (),
    clients: int | None = None,
    data: str | None = None,
    tiny: bool = False,
    root: str | None = None,
    assignments: Iterable[str] = (),
) -> Sweep:
    """A table as a sweep: some of its rows and columns, with a stand-in for FEMNIST or tiny on embedded data.

    `seeds` are how many of the paper's, or which. `only` are choices of columns like `natural,E=3`, united.
    With `clients` it is CIFAR-100's columns alone, dealt to so many.
    """
    assignments = list(assignments)
    if tiny and data is not None:
        raise FedeveError("tiny has data of its own", got=data, do="leave out --tiny or --data")
    if data is not None and data not in all_datasets():
        raise unknown("data set", data, all_datasets())
    if clients is not None:
        table = _in_clients(table, clients)
    rows, columns = _chosen_rows(table, methods), _chosen_columns(table, only)
    standins = {"femnist": data} if data not in (None, "femnist") else {}
    places = _TINY if tiny else standins
    labels = {c: f"{places[c.data]} in place of {c.label}" if c.data in places else c.label for c in table.columns}
    points, names = [], {}
    for column in columns:
        base, label = column.config(), labels[column]
        if tiny:
            base = _shrink(base, column)
        elif column.data in standins:
            base["data"] = _standin(base["data"], data or "")
        if root is not None and not tiny and issubclass(all_datasets()[base["data"]["name"]], FileDataset):
            base["data"]["root"] = root
        model = _model(base)
        base = configs.override(base, assignments)
        if column.data not in standins and not tiny and _model(base) == model:  # else nothing was printed for it
            names[column] = label
        for row in rows:
            config = _of_row(base, row, column, tiny=tiny)
            points += [Point(configs.check({**config, "seed": s}), row.name, label) for s in _seeds(table, seeds)]
    title = table.title + (" (tiny, on embedded data)" if tiny else f" ({data} in place of FEMNIST)" * bool(standins))
    title += ("" if tiny else _other_rounds(points, columns)) + _other_settings(assignments)
    printed, book = _printed(table, rows, names), _read_printed()
    notes = book["notes"].get(table.name, []) if printed or table.name not in book["tables"] else []
    sweep = Sweep(title, points, list(table.metrics), grows=True, notes=notes)
    sweep = replace(sweep, order={"rows": [row.name for row in table.rows], "columns": list(labels.values())})
    sweep = replace(sweep, last=min(LAST, max(1, min(point.rounds for point in points) // 10)))
    return replace(sweep, printed=printed, source=book["source"]) if printed else sweep


def _other_rounds(points: Sequence[Point], columns: Sequence[Column]) -> str:
    """For a title: how many rounds there are, where not the paper's."""
    rounds, printed = {point.rounds for point in points}, {int(column.config()["rounds"]) for column in columns}
    if rounds <= printed:
        return ""
    ours, theirs = ("/".join(map(str, sorted(some))) for some in (rounds, printed))
    return f", {ours} rounds instead of {theirs}"


def _other_settings(assignments: Iterable[str]) -> str:
    """For a title: what was set otherwise than in the paper; how often is evaluated and on what are said elsewhere."""
    return "".join(f", {words}" for words in assignments if not words.startswith(("rounds=", "eval_every=", "data.")))


def _seeds(table: PaperTable, chosen: int | Sequence[int] | None) -> Iterable[int]:
    if isinstance(chosen, Sequence):
        return dict.fromkeys(chosen)
    return SEEDS[: table.seeds if chosen is None else chosen]


def _in_clients(table: PaperTable, count: int) -> PaperTable:
    """CIFAR-100's columns of a table, dealt to another number of clients; nothing was printed for these."""
    columns = tuple(Column(f"{column.key}/N={count}") for column in table.columns if column.data == "cifar100")
    if not columns:
        raise FedeveError(
            f"{table.name} has no CIFAR-100 to deal to other clients", got=count, do="leave out --clients"
        )
    return replace(table, title=f"{table.title.split(':')[0]}: CIFAR-100 in {count} clients", columns=columns)


def _of_row(base: Table, row: Row, column: Column, *, tiny: bool) -> Table:
    """A column's setting with a row's method and changes in it."""
    config = configs.copy(base) | {"method": dict(row.values(column.data))}
    for key, value in row.changes.items():
        configs.put(config, key.split("."), min(value, _TINY_COHORT) if tiny and key == "cohort" else value)
    if config["method"].get("layers") == PER_LAYER:
        plan = configs.check({**config, "method": "fedeve"})
        config["method"]["layers"] = layer_sizes(plan, load=tiny)
    return config


def _model(config: Table) -> Any:
    """A setting's model by name."""
    model = config["model"]
    return model["name"] if isinstance(model, dict) else model


def _printed(table: PaperTable, rows: Sequence[Row], names: dict[Column, str]) -> Printed:
    """What the paper printed for these rows and columns, under our names; a variant stands beside the same row."""
    found = _read_printed()["tables"].get(table.name, {})
    result: Printed = {}
    for metric, by_method in found.items():
        for row in rows:
            cells = by_method.get(row.printed, {})
            kept = {name: cells[column.printed] for column, name in names.items() if column.printed in cells}
            if kept:
                result.setdefault(metric, {})[row.name] = kept
    return result


def _read_printed() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "paper" / "printed.json").read_text(encoding="utf-8")))


def _chosen_rows(table: PaperTable, methods: Sequence[str]) -> list[Row]:
    rows = table.rows
    if not methods:
        return [row for row in rows if row.by_default]
    known = {name for row in rows for name in (row.name.lower(), row.method["name"])}
    for method in methods:
        if method.lower() not in known:
            raise unknown("method of this table", method, known)
    # A row by its very name is that row alone; any other spelling is a method, in all its variants.
    exact = {method for method in methods if method in {row.name for row in rows}}
    wanted = {method.lower() for method in methods if method not in exact}
    return [row for row in rows if row.name in exact or {row.name.lower(), row.method["name"]} & wanted]


def _chosen_columns(table: PaperTable, only: Sequence[str]) -> list[Column]:
    """The columns of any of these choices, all where there is none."""
    chosen = {column for choice in only for column in _choice(table, choice)}
    return [column for column in table.columns if not only or column in chosen]


def _choice(table: PaperTable, text: str) -> list[Column]:
    """Columns by parts of their key, so that `natural,E=3,E=5` is two of them.

    Kinds of parts are data sets (`cifar100`), partitions (`natural`) and each change by its name (`E=3`). A column has
    one of the parts that were asked for of every kind that it has; with none of them it is left out.
    """
    parts = [part.strip() for part in text.split(",")]
    known = list(dict.fromkeys(part for column in table.columns for part in column.key.split("/")))
    for part in parts:
        if part not in known:
            raise unknown("part of this table", part, known)
    kinds = {_kind(part) for part in parts}
    chosen = []
    for column in table.columns:
        asked = {part for part in column.key.split("/") if _kind(part) in kinds}
        if asked and asked <= set(parts):
            chosen.append(column)
    if not chosen:
        do = "leave some out, or give --only for each; --dry-run shows the columns"
        raise FedeveError(f"{table.name} has no column with all of these", got=text, do=do)
    return chosen


def _kind(part: str) -> str:
    return "data" if part in SETS else part.split("=")[0] if "=" in part else "partition"


def _standin(table: Table, name: str) -> Table:
    """Another data set dealt the same way: to its own writers, or by label to as many clients as it has writers."""
    kept = {key: value for key, value in table.items() if key in ("partition", "alpha", "seed")}
    if name == "mnist" and table["partition"] != "natural":
        kept["num_clients"] = 539
    return {"name": name, **kept, **(_LIKE_FEMNIST if name == "glyphs" else {})}


_LIKE_FEMNIST = {"num_writers": 3400, "num_images": 671_585, "num_test": 77_483}


_TINY_COHORT = 8  # the most of a handful
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
