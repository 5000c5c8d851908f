"""Whose fault an error is, where that can be told: of runs that are played together the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..record import DiskError

_NOBODYS = (MemoryError, torch.OutOfMemoryError, DiskError)  # whoever was there when the last of it was taken


@contextmanager
def blame(number: int) -> Iterator[None]:
    """What is raised in here is this run's fault, the innermost where there are several."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _NOBODYS):
            vars(error).setdefault("run_number", number)
        raise


def culprit(error: BaseException) -> int | None:
    """The number of the run that an error is blamed on."""
    number = getattr(error, "run_number", None)
    return number if isinstance(number, int) else None
