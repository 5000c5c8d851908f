"""Lock: a folder held by one process alone."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import FedeveError, Words
from .record import cannot_write

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder, made if need be, for this process alone; the lock goes with the process, however it ends.

    A child that is given the file descriptor, which is what there is to get, holds it as well.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "unknown"
            raise FedeveError(
                f"{folder} is in use", got=Words(f"process {holder}"), do="wait for it to end or choose another folder"
            ) from None
        with suppress(OSError):  # on a full disk the lock still holds, only its note is missing
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield handle
    finally:
        os.close(handle)
