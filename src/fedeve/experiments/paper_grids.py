"""Beyond the paper's tables: small grids for every method that has something to tune, and FedEve taken apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from .. import models
from ..layout import Layout
from .config import Plan
from .paper_settings import CIFAR, EVERYWHERE, FEMNIST, MOVIELENS, RANKING, PaperTable, Row

_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_GRIDS: tuple[tuple[str, str, tuple[dict[str, float], ...]], ...] = (
    ("FedAvg", "fedavg", tuple({"server_lr": lr} for lr in (1.0, 1.5, 2.0))),
    (
        "FedAvgM",
        "fedavgm",
        tuple({"server_lr": lr, "beta": beta} for lr, beta in ((1.0, 0.9), (3.0, 0.9), (1.0, 0.5), (2.0, 0.5))),
    ),
    ("FedProx", "fedprox", tuple({"mu": mu} for mu in (0.001, 0.01, 0.1, 1.0))),
    ("FedAdam", "fedadam", tuple({"server_lr": lr} for lr in _RATES)),
    ("FedEve", "fedeve", tuple({"server_lr": lr} for lr in (1.0, 1.5, 2.0, 3.0))),
    ("FedEveAdam", "fedeveadam", tuple({"server_lr": lr} for lr in _RATES)),
)


def _called(name: str, values: Mapping[str, float]) -> str:
    """`FedAvgM, server_lr 3, beta 0.9`."""
    return ", ".join([name, *(f"{key} {value:g}" for key, value in values.items())])


TUNED = PaperTable(
    "tuned",
    "Small grids of every method",
    "rates, momentum and mu of the methods that have them, on one seed",
    EVERYWHERE,
    ("accuracy", *RANKING),
    tuple(
        Row(_called(name, values), "", {"name": method, **values}) for name, method, grid in _GRIDS for values in grid
    ),
    seeds=1,
)

PER_LAYER = "every layer"  # stands for the sizes of a column's model
_FEDAVG = {"name": "fedavg", "server_lr": 1.0}
_FEDEVE = {"name": "fedeve", "server_lr": 1.0, "drift": "paper"}
_PARTS = (
    Row("FedEve", "", _FEDEVE),
    Row("FedEve, no look-ahead", "", {"name": "fedeveparts", "look_ahead": False}),
    *(Row(f"FedEve, gain {gain}", "", {"name": "fedeveparts", "gain": gain}) for gain in (0.1, 0.3, 0.5, 0.7)),
    Row("FedEve (released)", "", {**_FEDEVE, "drift": "released"}),
    Row("FedEve, gain per layer", "", {"name": "fedeveparts", "layers": PER_LAYER}),
    *(Row(f"FedEve, server_lr {lr:g}", "", {**_FEDEVE, "server_lr": lr}) for lr in (1.5, 2.0)),
    Row("FedAvg", "", _FEDAVG),
)
_ELSEWHERE = tuple(
    Row(f"{name}, {word} {value}", "", method, changes={key: value})
    for (key, word, values) in (("cohort", "cohort", (5, 50)), ("local.epochs", "E", (3, 5)))
    for value in values
    for name, method in (("FedEve", _FEDEVE), ("FedAvg", _FEDAVG))
)
ABLATION = PaperTable(
    "ablation",
    "FedEve taken apart",
    "look-ahead, gain, rate, cohort and local epochs, one changed at a time, FedAvg beside",
    (*FEMNIST, *CIFAR, MOVIELENS[0]),
    ("accuracy", *RANKING),
    (*_PARTS, *_ELSEWHERE),
    seeds=3,
)

# Input, outputs and cardinalities of the data sets that take long to load.
_SHAPES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    "femnist": ((28, 28), 62, ()),
    "glyphs": ((28, 28), 62, ()),
    "mnist": ((28, 28), 10, ()),
    "cifar100": ((3, 32, 32), 100, ()),
    "movielens1m": ((2,), 1, (6040, 2, 7, 21, 3439, 3707)),
}


def layer_sizes(plan: Plan, *, load: bool = False) -> str:
    """How many parameters each layer of a plan's model has, weight and bias together: `156,2416,...`.

    The data is loaded where its shape is not known beforehand, and where that is asked for: it may be a part only.
    """
    if plan.dataset.name in _SHAPES and not load:
        shape, outputs, counts = _SHAPES[plan.dataset.name]
    else:
        data = plan.dataset.load()
        shape, outputs, counts = data.input_shape, data.num_outputs, data.cardinalities
    with torch.device("meta"):  # shapes alone: no numbers are drawn
        model = models.create(plan.plain["model"], shape, outputs, cardinalities=counts, **plan.plain["model_options"])
    layout = Layout.of(model)
    named = zip(layout.names, layout.sizes, strict=True)
    layers = itertools.groupby(named, key=lambda each: each[0].rpartition(".")[0])
    return ",".join(str(sum(size for _, size in group)) for _, group in layers)
