"""Lock: a folder held by one process alone, and whether a folder can be written at all."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import FedeveError, Words
from .record import cannot_write

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder, made if need be, for this process alone; the lock goes with the process, however it ends.

    A child that is given the file descriptor, which is what there is to get, holds it as well. When an error ends it
    before anything was written, a folder that was made here is removed again.
    """
    made, is_new = _missing(folder), not (folder / LOCK).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        _remove(made)
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
        try:
            yield handle
        except BaseException:
            with suppress(OSError):  # while it is held: who comes now makes a new one
                if is_new and os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
                    _remove(made)
            raise
    finally:
        os.close(handle)


def refuse_unwritable(folder: Path) -> None:
    """Find out now, not after minutes of work, that a folder cannot be written. Nothing is left of the trial."""
    made = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        _remove(made)


def _missing(folder: Path) -> list[Path]:
    """The folder and those above it that are not there yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def _remove(made: Sequence[Path]) -> None:
    for path in made:
        with suppress(OSError):  # never made, or somebody has put something into it
            path.rmdir()
