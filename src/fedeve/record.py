"""Record: what a run did, as a header and one JSON line per evaluated round.

A line holds the evaluation and the facts of every round since the line before, so nothing is lost between
evaluations. Times are not in it: an interrupted and resumed run leaves the same bytes as one that never stopped.
A packed record (`experiments/pack.py`) is gzipped, says so in its header, and has one mean a line of every fact.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import __version__
from .errors import FedeveError, Words

if TYPE_CHECKING:
    from .run import Run

FORMAT = 1
RECORD, PACKED = "record.jsonl", "record.jsonl.gz"
_NOT_METRICS = ("round", "facts", "answered", "left_out", "lost")


@dataclass
class Record:
    """A run's results in memory, and `params`, its final parameters, where they are known."""

    header: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)
    params: Any = None

    @property
    def evaluated(self) -> NDArray[np.int64]:
        """The rounds after which the model was evaluated."""
        return np.array([line["round"] for line in self.lines], dtype=np.int64)

    @property
    def metrics(self) -> list[str]:
        """Names of what was evaluated."""
        return [key for key in (self.lines[0] if self.lines else ()) if key not in _NOT_METRICS]

    def metric(self, name: str) -> NDArray[np.float64]:
        """A metric over the evaluations."""
        if name not in self.metrics:
            raise FedeveError(f"this record has no metric {name!r}", got=self.metrics, do="ask for one of those")
        return _column([line.get(name) for line in self.lines])

    def facts(self, name: str) -> NDArray[np.float64]:
        """A method's fact over all rounds, NaN where a round was lost; of a packed record, the mean of each line."""
        if self.is_packed:
            return self.fact_means(name)
        missing = [[None] * len(line["answered"]) for line in self.lines]
        values = [part.get(name, gap) for part, gap in zip(self._facts(name), missing, strict=True)]
        return _column([value for part in values for value in part])

    def fact_means(self, name: str) -> NDArray[np.float64]:
        """A fact's mean over the rounds of each line, of those that have it; NaN where none has."""
        found = [part.get(name) for part in self._facts(name)]
        return _column(found if self.is_packed else [_mean(values or ()) for values in found])

    @property
    def fact_names(self) -> list[str]:
        """Names of the facts that any line has."""
        return sorted({key for line in self.lines for key in line["facts"]})

    def _facts(self, name: str) -> list[dict[str, Any]]:
        if name not in self.fact_names:
            raise FedeveError(f"this record has no fact {name!r}", got=self.fact_names, do="ask for one of those")
        return [line["facts"] for line in self.lines]

    @property
    def is_packed(self) -> bool:
        """Whether only the means of facts were kept."""
        return "packed" in self.header

    def final(self, name: str, *, last: int = 100) -> float:
        """The mean of a metric over the evaluations of the last `last` rounds."""
        if not self.lines:
            raise FedeveError("nothing was evaluated yet", got=Words("an empty record"), do="let the run go on")
        if last < 1:
            raise FedeveError("a mean needs at least one round", got=last, do="set last to 1 or more")
        values = self.metric(name)
        return float(values[self.evaluated > self.evaluated[-1] - last].mean())

    @property
    def lost(self) -> list[int]:
        """Rounds in which nobody who has data answered."""
        return [round for line in self.lines for round in line.get("lost", [])]

    @property
    def left_out(self) -> dict[int, list[int]]:
        """Clients whose update was not finite, by round."""
        return {int(r): clients for line in self.lines for r, clients in line.get("left_out", {}).items()}

    @classmethod
    def read(cls, path: str | Path) -> Record:
        """A record from its file; a torn last line, left by a kill in mid-write, is passed over."""
        header, lines = _parse(Path(path))
        return cls(header, lines)

    def jsonl(self) -> bytes:
        """What its file holds, before any compression."""
        return "".join(map(_dump, [self.header, *self.lines])).encode()


def recorded(folder: Path) -> Path | None:
    """The file that holds a folder's run, if one does: of an ordinary and a packed one, which came further."""
    found = [path for name in (RECORD, PACKED) if (path := folder / name).exists()]
    return max(found, key=_reached) if len(found) > 1 else next(iter(found), None)


def _reached(path: Path) -> int:
    try:
        return int(max([0, *Record.read(path).evaluated]))
    except FedeveError:
        return -1


def _column(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


class RecordFile:
    """A record on disk, appended line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, header: dict[str, Any]) -> None:
        """Write a new file with this header, beside and renamed."""
        write_atomically(self.path, _dump(header).encode())

    def append(self, line: dict[str, Any]) -> None:
        """Add a line; if the disk refuses, the file is as it was before."""
        size = self.path.stat().st_size
        try:
            with self.path.open("ab", buffering=0) as file:
                _write_all(file.fileno(), _dump(line).encode())
        except OSError as error:
            os.truncate(self.path, size)
            raise cannot_write(self.path, error) from error

    def sync(self) -> None:
        """Wait until what was appended is on the disk."""
        try:
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def rewind(self, num_rounds: int) -> list[dict[str, Any]]:
        """Drop every line after `num_rounds` and return those that stay."""
        header, lines = _parse(self.path)
        kept = [line for line in lines if line["round"] <= num_rounds]
        write_atomically(self.path, Record(header, kept).jsonl())
        return kept


def header(run: Run, *, num_params: int, device: object, engine: str, precision: str = "float32") -> dict[str, Any]:
    """The first line of a record: what was run, on what."""
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {
        "record": FORMAT,
        "config": run.describe(),
        "identity": run.identity(),
        "num_params": num_params,
        "seed": run.seed,
        "data": {
            "fingerprint": run.data.fingerprint,
            "num_clients": run.data.num_clients,
            "num_examples": len(run.data.order),
            "num_test": len(run.data.y_test),
        },
        "device": str(device),
        "engine": engine,
        "precision": precision,
        "versions": {"fedeve": __version__, "python": platform.python_version(), **versions},
    }


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it there: it is either the old one or the new one, never half."""
    beside = path.with_name(path.name + ".part")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise cannot_write(path, error) from error


class DiskError(FedeveError):
    """The disk refuses: no fault of the run that met it first."""


def cannot_write(path: Path, error: OSError) -> DiskError:
    """The error for a disk that refuses."""
    return DiskError(
        f"cannot write {path}",
        got=Words(error.strerror or str(error)),
        do="make room or choose another folder; what was there before is untouched",
    )


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(finite(value), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """A value as JSON can hold it, which has no NaN or infinity: they are null, and read back as NaN."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        rows = _content(path).split(b"\n")
    except OSError as error:
        raise FedeveError(
            "cannot read the record", got=Words(f"{path}: {error.strerror}"), do="check the path"
        ) from error
    rows, torn = rows[:-1], rows[-1]
    del torn  # without its newline a line was not finished
    values = []
    for number, row in enumerate(rows, start=1):
        try:
            values.append(json.loads(row))
        except ValueError:
            raise _damaged(number, path, row) from None
    if not values or not isinstance(values[0], dict) or values[0].get("record") != FORMAT:
        found = values[0] if values else Words("an empty file")
        raise FedeveError(
            f"{path} is not a record of format {FORMAT}", got=found, do="give a record.jsonl of this version"
        )
    before = 0
    for number, (line, row) in enumerate(zip(values[1:], rows[1:], strict=True), start=2):
        if not _is_whole(line, before, packed="packed" in values[0]):
            raise _damaged(number, path, row)
        before = line["round"]
    return values[0], values[1:]


def _is_whole(line: Any, before: int, *, packed: bool) -> bool:
    """A later round than the line before, a value per round since then (packed: one), numbers where they belong."""
    if not isinstance(line, dict):
        return False
    facts, answered, round = line.get("facts"), line.get("answered"), line.get("round")
    if not (isinstance(facts, dict) and isinstance(answered, list) and isinstance(round, int)):
        return False
    if round - before != len(answered) or round <= before:
        return False
    if packed:
        facts = {name: [value] * len(answered) for name, value in facts.items()}
    lists = [answered, *facts.values()]
    if not all(isinstance(values, list) and len(values) == len(answered) for values in lists):
        return False
    metrics = (value for key, value in line.items() if key not in _NOT_METRICS)
    numbers = [*metrics, *(value for values in facts.values() for value in values)]
    return all(isinstance(value, int) for value in answered) and all(
        value is None or isinstance(value, int | float) for value in numbers
    )


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        do = "restore the file from a copy or pack the run again"
        raise FedeveError(f"{path} is damaged", got=Words(str(error)), do=do) from None


def _damaged(number: int, path: Path, row: bytes) -> FedeveError:
    what, do = f"line {number} of {path} is damaged", "restore the file from a copy or run again"
    return FedeveError(what, got=row[:60], do=do)
