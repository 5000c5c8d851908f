"""fedeve: cross-device federated learning, simulated and served, with FedEve and the drifts it weighs.

Names are imported when first used, so that `fedeve --help` does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import datasets, partition
    from .data.federated import FederatedData
    from .engines.loop import simulate
    from .errors import FedeveError
    from .layout import Layout
    from .local import LocalWork
    from .method import Correction, Method, Sent
    from .methods import all_methods
    from .methods.fedavg import FedAvg
    from .methods.fedavgm import FedAvgM
    from .methods.feddyn import FedDyn
    from .methods.fedeve import FedEve
    from .methods.fedeveadam import FedEveAdam
    from .methods.fedeveparts import FedEveParts
    from .methods.fedeveprox import FedEveProx
    from .methods.fedopt import FedAdagrad, FedAdam, FedYogi
    from .methods.fedprox import FedProx
    from .methods.scaffold import Scaffold
    from .record import Record
    from .run import Run
    from .summary import Summary

__version__ = "0.1.0"

_HOME = {
    "data": ("datasets", "partition"),
    "data.federated": ("FederatedData",),
    "engines.loop": ("simulate",),
    "errors": ("FedeveError",),
    "layout": ("Layout",),
    "local": ("LocalWork",),
    "method": ("Correction", "Method", "Sent"),
    "methods": ("all_methods",),
    "methods.fedavg": ("FedAvg",),
    "methods.fedavgm": ("FedAvgM",),
    "methods.feddyn": ("FedDyn",),
    "methods.fedeve": ("FedEve",),
    "methods.fedeveadam": ("FedEveAdam",),
    "methods.fedeveparts": ("FedEveParts",),
    "methods.fedeveprox": ("FedEveProx",),
    "methods.fedopt": ("FedAdagrad", "FedAdam", "FedYogi"),
    "methods.fedprox": ("FedProx",),
    "methods.scaffold": ("Scaffold",),
    "record": ("Record",),
    "run": ("Run",),
    "summary": ("Summary",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Correction", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedDyn", "FedEve", "FedEveAdam", "FedEveParts",
    "FedEveProx", "FedProx", "FedYogi", "FederatedData", "FedeveError", "Layout", "LocalWork", "Method", "Record",
    "Run", "Scaffold", "Sent", "Summary", "all_methods", "datasets", "partition", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedeve' has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_OF[name]}", __name__)
    if name in ("datasets", "partition"):
        return importlib.import_module(f".data.{name}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
