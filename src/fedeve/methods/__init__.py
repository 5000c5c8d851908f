"""One file per method. A scan of this folder is the registry: a new file is found by its class."""

from __future__ import annotations

from typing import Any

from ..errors import unknown
from ..method import Method
from ..registry import subclasses_in
from ..settings import build


def all_methods() -> dict[str, type[Method]]:
    """Every method by name, `{"fedavg": FedAvg, ...}`."""
    return dict(subclasses_in(__name__, Method))


def create(name: str, **options: Any) -> Method:
    """A method by its name, `create("fedavgm", beta=0.5)`."""
    if name not in all_methods():
        raise unknown("method", name, all_methods())
    return build(all_methods()[name], options, where="method.", kind="hyper-parameter")
