"""Whose fault an error is, where that can be told: of runs that are played together the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import FedeveError
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


class LostDeviceError(FedeveError):
    """A device answers nothing any more in this process: what is raised from there on is nobody's fault."""


def is_lost(device: torch.device) -> bool:
    """Whether a device answers nothing any more, as a GPU does after an access to what is not there."""
    try:
        torch.zeros((), device=device).item()
    except RuntimeError as error:
        return not isinstance(error, torch.OutOfMemoryError)
    return False


def culprit(error: BaseException) -> int | None:
    """The number of the run that an error is blamed on."""
    number = getattr(error, "run_number", None)
    return number if isinstance(number, int) else None
