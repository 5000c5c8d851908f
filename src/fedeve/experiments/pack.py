"""Packing: copies of sweeps, small enough to keep beside code. Records alone, gzipped, of every run that has one.

Every evaluation is kept: those of the last rounds, of which tables are made, as they are; earlier ones with five
digits. Facts become their means over the rounds of each line, and what was done to a record stands in its header.
Checkpoints stay behind. Packing again adds what came since: a run gives way only to one that came further.
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FedeveError, Words
from ..lock import locked
from ..record import PACKED, Record, cannot_write, recorded, write_atomically
from ..report.results import check
from .manifest import FAILED, SWEEP, TIMING, Manifest, merged, read_manifest, write_manifest

DIGITS = 5
STATES = ("finished", "unfinished", "failed", "not run")


@dataclass
class Packing:
    """What became of one sweep: the runs that lie in `out` now, by state, and how many of them are new or further."""

    out: Path
    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    added: int = 0
    other: list[str] = field(default_factory=list)
    """Finished runs that have other numbers than the finished one that is there, which stays."""
    problems: list[str] = field(default_factory=list)
    """Records that could not be read, one line each."""
    num_bytes: int = 0


def pack(folders: Sequence[Path], out: Path, *, watch: Callable[[int, int], None] | None = None) -> list[Packing]:
    """Copy every sweep at or below the folders to `out`/NAME, NAME being its place below, or its folder's own name.

    `watch` is told, run by run, how many were packed and how many there are.
    """
    sweeps = [(path, out / name) for top in folders for path, name in _find(top, out)]
    for path, target in sweeps:
        if path.resolve() == target.resolve():
            raise FedeveError("a sweep cannot be packed into itself", got=str(path), do="choose another --out")
    if not sweeps:
        what = Words(", ".join(map(str, folders)))
        raise FedeveError("there is no sweep to pack", got=what, do=f"give folders with a {SWEEP} somewhere below")
    manifests = _all_manifests(sweeps)
    total, count = sum(len(manifest["runs"]) for manifest in manifests), itertools.count(1)

    def told() -> None:
        if watch is not None:
            watch(next(count), total)

    return [_pack(path, target, told) for path, target in sweeps]


def packed(record: Record, *, last: int) -> Record:
    """A record in short: the evaluations of its last rounds whole, earlier ones rounded, facts as means of lines."""
    if record.is_packed:
        return record
    rounds = record.header["config"]["rounds"]
    means = {name: record.fact_means(name) for name in record.fact_names}
    lines = []
    for number, line in enumerate(record.lines):
        short = dict(line) if line["round"] > rounds - last else {key: _short(value) for key, value in line.items()}
        short["facts"] = {name: _short(float(means[name][number])) for name in line["facts"]}
        lines.append(short)
    how = {"digits": DIGITS, "whole": f"evaluations of the last {last} rounds", "facts": "means over a line's rounds"}
    return Record({**record.header, "packed": {**how, "finished": _num_rounds(record) == rounds}}, lines)


def compressed(record: Record) -> bytes:
    """A record's gzipped file: the same record gives the same bytes, whenever it is written."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(record.jsonl())
    return buffer.getvalue()


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def _num_rounds(record: Record) -> int:
    return int(record.lines[-1]["round"]) if record.lines else 0


def _find(top: Path, out: Path) -> Iterator[tuple[Path, Path]]:
    """Sweeps below a folder, and their names; what lies in `out`, where that is below too, is packed already."""
    if not top.is_dir():
        raise FedeveError("there is no such folder", got=str(top), do="give folders made by fedeve sweep or paper")
    for name, inner, files in os.walk(top):
        folder = Path(name)
        inner[:] = sorted(each for each in inner if (folder / each).resolve() != out.resolve())
        if SWEEP in files:
            yield folder, Path(top.resolve().name) if folder == top else folder.relative_to(top)


def _all_manifests(sweeps: Sequence[tuple[Path, Path]]) -> list[Manifest]:
    """What all sweeps will say of themselves, read before anything is written, since one of them may be refused."""
    planned: dict[Path, Manifest] = {}
    result = []
    for source, target in sweeps:
        manifest, before = read_manifest(source), planned.get(target)
        if before is None and (target / SWEEP).exists():
            before = read_manifest(target)
        planned[target] = manifest if before is None else merged(before, manifest, out=target)
        for run in planned[target]["runs"]:
            _inside(run["folder"])
        result.append(planned[target])
    return result


def _pack(source: Path, target: Path, told: Callable[[], None]) -> Packing:
    manifest, result = read_manifest(source), Packing(target)
    manifest.pop("widths", None)  # of runs to go on with, of which no checkpoint is packed; further ones plan their own
    with locked(target):
        before = read_manifest(target) if (target / SWEEP).exists() else None
        # First, since it may refuse; a run that is listed and not there yet is one that was not run.
        manifest = manifest if before is None else merged(before, manifest, out=target)
        if manifest != before:
            write_manifest(target, manifest)
        for run in manifest["runs"]:
            _pack_run(source / _inside(run["folder"]), target / run["folder"], int(manifest.get("last", 100)), result)
            told()
    result.num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return result


def _inside(folder: str) -> str:
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise FedeveError("a run lies outside of its sweep's folder", got=folder, do=f"mend the {SWEEP}")
    return folder


@dataclass(frozen=True)
class _Run:
    """What lies in the folder of a run."""

    folder: Path
    record: Record | None

    @classmethod
    def read(cls, folder: Path, problems: list[str]) -> _Run:
        if (path := recorded(folder)) is None:
            return cls(folder, None)
        try:
            record = Record.read(path)
            check(record, path)
        except FedeveError as error:
            problems.append(str(error))
            return cls(folder, None)
        return cls(folder, record)

    @property
    def is_finished(self) -> bool:
        return self.record is not None and _num_rounds(self.record) == self.record.header["config"]["rounds"]

    @property
    def has_failed(self) -> bool:
        return not self.is_finished and (self.folder / FAILED).exists()

    @property
    def came(self) -> tuple[int, bool]:
        """How far: of two runs the one for which this is larger is kept."""
        return -1 if self.record is None else _num_rounds(self.record), self.has_failed

    @property
    def state(self) -> str:
        if self.is_finished:
            return "finished"
        return "failed" if self.has_failed else "not run" if self.record is None else "unfinished"


def _pack_run(source: Path, target: Path, last: int, result: Packing) -> None:
    ours, theirs = _Run.read(source, result.problems), _Run.read(target, result.problems)
    if theirs.is_finished and theirs.record is not None:
        if ours.is_finished and ours.record is not None and _gist(ours.record) != _gist(theirs.record):
            result.other.append(target.name)
    elif ours.came > (-1, False) and ours.came >= theirs.came:
        result.added += _write(ours, target, last)
        theirs = ours
    result.states[theirs.state] += 1


def _gist(record: Record) -> list[list[Any]]:
    """Its evaluations, rounded: the same for an ordinary and a packed record of one run."""
    return [[_short(line.get(name)) for name in ("round", *record.metrics)] for line in record.lines]


def _write(run: _Run, target: Path, last: int) -> bool:
    """Write a run's files where they are not there already; whether any was written."""
    files = {} if run.record is None else {PACKED: compressed(packed(run.record, last=last))}
    kept = (TIMING, FAILED) if run.has_failed else (TIMING,)
    try:
        files |= {name: (run.folder / name).read_bytes() for name in kept if (run.folder / name).exists()}
        target.mkdir(parents=True, exist_ok=True)
        changed = {n: content for n, content in files.items() if not _holds(target / n, content)}
        if not run.has_failed:
            (target / FAILED).unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(target, error) from error
    for name, content in changed.items():
        write_atomically(target / name, content)
    return bool(changed)


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content
