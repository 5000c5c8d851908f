"""Our methods in a real federation, as strategies for Flower (extra `flower`; tested with flwr 1.41).

`from fedeve.flower import FedEve` replaces Flower's FedAvg in a ServerApp. There is one such name for every method
that `all_methods()` finds, made when first asked for; `MethodStrategy` is what they share.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import FedeveError, Words
from ..methods import all_methods

if importlib.util.find_spec("flwr") is None:  # pragma: no cover
    raise FedeveError("Flower is not installed", got=Words("no module flwr"), do="pip install 'fedeve[flower]'")

if TYPE_CHECKING:
    from .client import Corrected, correct, say_partition
    from .monitor import DriftMonitor
    from .options import Options
    from .secure import SecureStrategy, secure_update
    from .strategy import MethodStrategy

    # What `__getattr__` makes, spelled out for type checkers; a test compares the list with all_methods().
    class FedAdagrad(MethodStrategy): ...

    class FedAdam(MethodStrategy): ...

    class FedAvg(MethodStrategy): ...

    class FedAvgM(MethodStrategy): ...

    class FedDyn(MethodStrategy): ...

    class FedEve(MethodStrategy): ...

    class FedEveAdam(MethodStrategy): ...

    class FedEveParts(MethodStrategy): ...

    class FedEveProx(MethodStrategy): ...

    class FedProx(MethodStrategy): ...

    class FedYogi(MethodStrategy): ...

    class Scaffold(MethodStrategy): ...


_HOME = {
    "client": ("Corrected", "correct", "say_partition"),
    "monitor": ("DriftMonitor",),
    "options": ("Options",),
    "secure": ("SecureStrategy", "secure_update"),
    "strategy": ("MethodStrategy",),
}
__all__ = [
    "Corrected", "DriftMonitor", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedDyn", "FedEve", "FedEveAdam",
    "FedEveParts", "FedEveProx", "FedProx", "FedYogi", "MethodStrategy", "Options", "Scaffold", "SecureStrategy",
    "correct", "say_partition", "secure_update",
]  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    if name not in _method_names():  # also asked for submodules while they are being imported
        raise AttributeError(f"module 'fedeve.flower' has no attribute {name!r}")
    from .names import strategies

    return strategies()[name]


def _method_names() -> list[str]:
    return [cls.__name__ for cls in all_methods().values()]


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, *_method_names()])
