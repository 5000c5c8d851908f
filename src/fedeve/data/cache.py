"""The cache: a data set's files converted once into plain arrays that later opens map into memory, in milliseconds.

A cache is a folder of .npy files and `meta.json`, built beside and renamed, so it is whole or not there. It belongs to
its sources' checksums and is rebuilt when they, or the format, change. It lives below FEDEVE_CACHE, else
~/.cache/fedeve, and may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import FedeveError
from ..record import cannot_write, write_atomically
from .files import sha256_of

FORMAT = 1


@dataclass(frozen=True)
class Cache:
    """An opened cache: arrays mapped by name, notes, and the sources' checksum."""

    arrays: Mapping[str, NDArray[Any]]
    notes: Mapping[str, Any]
    checksum: str


class Builder:
    """Handed to the function that fills a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: dict[str, Any] = {}
        self._arrays: dict[str, NDArray[Any]] = {}

    def create(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new array on disk, to be filled; only what is touched is in memory."""
        if 0 in shape:  # an empty file cannot be mapped
            np.save(self.folder / f"{name}.npy", np.empty(shape, dtype), allow_pickle=False)
            return np.empty(shape, dtype)
        path = self.folder / f"{name}.npy"
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        with path.open("r+b") as file:  # a full disk must say so now: met while writing to a mapping, it kills
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        self._arrays[name] = array
        return array

    def put(self, name: str, values: NDArray[Any]) -> None:
        """A whole array at once."""
        np.save(self.folder / f"{name}.npy", values, allow_pickle=False)

    def finish(self, sources: Sequence[Path]) -> None:
        """Write everything through to the disk, `meta.json` last."""
        for array in self._arrays.values():
            array.flush()  # type: ignore[attr-defined]
        self._arrays.clear()
        sizes = {path.stem: path.stat().st_size for path in sorted(self.folder.glob("*.npy"))}
        meta = {"format": FORMAT, "arrays": sizes, "notes": self.notes, "sources": [_seen(path) for path in sources]}
        meta["checksum"] = sha256_of(sources)
        write_atomically(self.folder / "meta.json", json.dumps(meta).encode())


def cached(
    name: str, sources: Sequence[Path], build: Callable[[Builder], None], *, options: Mapping[str, Any] | None = None
) -> Cache:
    """The cache of these source files, built by `build` if it is not there, of other files or of another format.

    `options` are what else the arrays depend on. Two processes may ask at once: one builds, the other waits.
    """
    places = [str(path.resolve()) for path in sources]
    key = hashlib.sha256(json.dumps([places, options or {}], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root() / f"{name}-{key}"
    if _is_current(folder, sources):  # needs no lock, so a cache may be read-only
        return _open(folder)
    with _locked(folder):
        if not _is_current(folder, sources):
            _build(folder, sources, build)
        return _open(folder)


def cache_root() -> Path:
    """The folder for caches."""
    return Path(os.environ.get("FEDEVE_CACHE") or Path.home() / ".cache" / "fedeve" / "cache").expanduser()


def _is_current(folder: Path, sources: Sequence[Path]) -> bool:
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["format"] != FORMAT:
            return False
        whole = all((folder / f"{n}.npy").stat().st_size == size for n, size in meta["arrays"].items())
        if not whole:
            return False
        if meta["sources"] == [_seen(path) for path in sources]:
            return True
        # A copied or touched file has another time but may be the same; only its checksum can tell.
        if meta["checksum"] != sha256_of(sources):
            return False
        meta["sources"] = [_seen(path) for path in sources]
        with suppress(FedeveError):  # else a read-only cache is checked again next time
            write_atomically(folder / "meta.json", json.dumps(meta).encode())
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _seen(path: Path) -> list[Any]:
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]


def _build(folder: Path, sources: Sequence[Path], build: Callable[[Builder], None]) -> None:
    beside = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        builder = Builder(beside)
        build(builder)
        builder.finish(sources)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise cannot_write(folder, error) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _open(folder: Path) -> Cache:
    meta = json.loads((folder / "meta.json").read_bytes())
    arrays = {}
    for name in meta["arrays"]:
        path = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(path, mmap_mode="c", allow_pickle=False)  # never written back
        except ValueError:  # an empty array cannot be mapped
            arrays[name] = np.load(path, allow_pickle=False)
    return Cache(arrays, meta["notes"], meta["checksum"])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def source_error(path: Path, what: str, got: object) -> FedeveError:
    """The error for a source file that is not what it should be."""
    return FedeveError(f"{path} {what}", got=got, do="get the file again; nothing was kept of this one")
