"""A sweep's folder: `sweep.json` lists its runs, `runs/NAME/` holds each, and their states are read from the files.

There is no other memory of what is done: whatever a kill leaves, looking at the folder tells what to do next. A
finished run that was packed has no checkpoint and is not played again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import FedeveError, Words
from ..lock import LOCK
from ..record import PACKED, RECORD, DiskError, Record, recorded, write_atomically
from ..store import CHECKPOINT
from .manifest import (
    FAILED,
    FORMAT,
    RUNS,
    SWEEP,
    TIMING,
    Manifest,
    Printed,
    in_order,
    merged_printed,
    place,
    read_manifest,
    write_manifest,
)  # fmt: skip
from .sweep import Point, Sweep, portable


@dataclass(frozen=True)
class Status:
    """How far a run is: `waiting`, `begun`, `finished` or `failed`."""

    state: str
    num_rounds: int = 0
    reason: str = ""
    best: dict[str, float] = field(default_factory=dict)
    """The largest evaluation so far of every metric in the record."""


@dataclass
class SweepFolder:
    """The folder of a sweep."""

    out: Path
    sweep: Sweep
    engine: str = "reference"
    widths: dict[str, int] = field(default_factory=dict)
    """Lanes of each pool, by what its runs share: fixed once and for all, since last bits depend on it."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """How it was played so far; see `session.py`."""
    seen: dict[str, tuple[Any, Status]] = field(default_factory=dict)

    def folder(self, point: Point) -> Path:
        return self.out / RUNS / point.name

    def status(self, point: Point) -> Status:
        """A run's state, by its files; what has not changed is not read again."""
        stamp = [_stamp(self.folder(point) / name) for name in (RECORD, PACKED, CHECKPOINT, FAILED)]
        if point.name not in self.seen or self.seen[point.name][0] != stamp:
            self.seen[point.name] = (stamp, self._look(point))
        return self.seen[point.name][1]

    def _look(self, point: Point) -> Status:
        folder = self.folder(point)
        if (folder / FAILED).exists():
            return Status("failed", reason=_reason(folder / FAILED))
        try:
            if (folder / PACKED).exists():
                record = _of_point(folder / PACKED, point)
                if record.lines and record.lines[-1]["round"] == point.rounds:
                    return Status("finished", point.rounds, best=_best(record))
            if not (folder / RECORD).exists():
                return Status("waiting")  # of a packed run that was not finished nothing is left to go on from
            record = _of_point(folder / RECORD, point)
            reached = Checkpoint.reached(folder / CHECKPOINT) if (folder / CHECKPOINT).exists() else 0
        except FedeveError as error:
            return Status("failed", reason=str(error))
        if reached == point.rounds and not (record.lines and record.lines[-1]["round"] == reached):
            return Status("failed", reason=f"{folder / RECORD} lacks lines that its checkpoint relies on")
        return Status("finished" if reached == point.rounds else "begun", reached, best=_best(record))

    def statuses(self) -> list[Status]:
        """The states of all runs."""
        return [self.status(point) for point in self.sweep.points]

    def unfinished(self) -> list[Point]:
        """The runs that are still to be played; those that failed are not."""
        return [point for point in self.sweep.points if self.status(point).state in ("waiting", "begun")]

    def failures(self) -> dict[str, list[str]]:
        """Why runs failed, and which."""
        found: dict[str, list[str]] = {}
        for point in self.sweep.points:
            if (status := self.status(point)).state == "failed":
                found.setdefault(status.reason, []).append(point.name)
        return found

    def fail(self, point: Point, reason: str) -> None:
        """Write down that a run failed and why."""
        folder = self.folder(point)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FAILED, (json.dumps({"reason": reason}) + "\n").encode())

    def forgive(self, point: Point) -> None:
        """Let a failed run be tried again; a record that cannot be read is kept beside and begun anew."""
        folder = self.folder(point)
        (folder / FAILED).unlink(missing_ok=True)
        if self.status(point).state == "failed":
            number = sum(1 for _ in folder.parent.glob(f"{folder.name}.damaged-*")) + 1
            folder.rename(folder.with_name(f"{folder.name}.damaged-{number}"))

    def timed(self, point: Point, *, seconds: float, client_steps: int, examples: int) -> None:
        """Add to the time that a run has taken so far, and set its work."""
        path = self.folder(point) / TIMING
        try:
            before = float(json.loads(path.read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            before = 0.0
        value = {"seconds": round(before + seconds, 3), "client_steps": client_steps, "examples": examples}
        write_atomically(path, (json.dumps(value) + "\n").encode())

    def open(self, *, engine: str, width: int | None = None) -> None:
        """Take over what an earlier session fixed, refuse a folder of something else, and write sweep.json."""
        self.take_over(engine=engine, width=width)
        self.save()

    def take_over(self, *, engine: str, width: int | None = None) -> None:
        """The same without writing."""
        found = self._found()
        self.engine = engine
        if found is not None:
            self._refuse_other_engine(found, engine)
            self.widths = dict(found.get("widths", {}))
            self.sessions = list(found.get("sessions", ()))
        for shared in {point.shares for point in self.sweep.points}:
            if width is not None and self.widths.setdefault(shared, width) != width:
                before = self.widths[shared]
                raise FedeveError("this sweep was begun with another width", got=width, do=f"leave it at {before}")

    @contextmanager
    def session(self, begun: dict[str, Any]) -> Iterator[None]:
        """Keep in sweep.json that a session began and, however it ends, how many seconds it took."""
        start = time.monotonic()
        self.sessions.append(begun)
        self.save()
        try:
            yield
        finally:
            begun["seconds"] = round(time.monotonic() - start, 1)
            with suppress(DiskError):  # what ended the session matters more
                self.save()

    def stored_engine(self) -> str | None:
        """The engine of an earlier session."""
        found = self._found()
        return None if found is None else str(found["engine"])

    def save(self) -> None:
        """Write sweep.json; a sweep that grows keeps those of the earlier runs whose place is not taken."""
        mine, earlier = [self._entry(point) for point in self.sweep.points], self._found()
        if self.sweep.grows and earlier is not None:
            taken = set(map(place, mine))
            mine += [run for run in earlier["runs"] if place(run) not in taken]
        value: dict[str, Any] = {
            "format": FORMAT,
            "title": self.sweep.title,
            "metrics": self.sweep.metrics or self._metrics(),
            "last": self.sweep.last,
            "engine": self.engine,
            "widths": self.widths,
            "runs": in_order(mine, self.sweep.order),
        }
        if self.sweep.order:
            value["order"] = self.sweep.order
        if self.sweep.printed:
            value |= {"printed": self._all_printed(earlier), "source": self.sweep.source}
        if self.sweep.notes:
            value["notes"] = self.sweep.notes
        if self.sessions:
            value["sessions"] = self.sessions
        write_manifest(self.out, value)

    def _all_printed(self, earlier: Manifest | None) -> Printed:
        """Printed numbers of these runs and, of a sweep that grows, of the earlier ones."""
        return merged_printed((earlier or {}).get("printed", {}) if self.sweep.grows else {}, self.sweep.printed)

    def _entry(self, point: Point) -> dict[str, Any]:
        where = {"folder": f"{RUNS}/{point.name}", "row": point.row, "column": point.column, "seed": point.seed}
        return {**where, "config": point.config}

    def _metrics(self) -> list[str]:
        found = next((best for point in self.sweep.points if (best := self.status(point).best)), {})
        return [name for name in found if name != "loss"] or ["accuracy"]

    def _found(self) -> dict[str, Any] | None:
        """The sweep.json that is there, if it is this sweep's."""
        path = self.out / SWEEP
        if not path.exists():
            return self._left_over() if self.out.is_dir() else None
        found = read_manifest(self.out)
        ours = {f"{RUNS}/{point.name}" for point in self.sweep.points}
        strange = not self.sweep.grows and ours.isdisjoint(run["folder"] for run in found["runs"])
        if found["title"] != self.sweep.title or strange:
            held = Words(f"{found['title']!r} with {len(found['runs'])} runs" + (", none of them ours" * strange))
            raise FedeveError(f"{self.out} holds another sweep", got=held, do="choose another folder")
        return found

    def _left_over(self) -> dict[str, Any] | None:
        """What a folder without a sweep.json tells by the runs in it, which were begun with some engine."""
        runs = self.out / RUNS
        there = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
        ours = [point for point in self.sweep.points if point.name in there]
        nothing = {LOCK, f"{SWEEP}.part"} | (set() if there else {RUNS})
        if not ours and any(path.name not in nothing for path in self.out.iterdir()):
            raise FedeveError("this folder holds something else", got=str(self.out), do="choose an empty one")
        for point in ours:
            with suppress(FedeveError, KeyError):  # a damaged record is told when its run is looked at
                if (record := recorded(self.folder(point))) is not None:
                    return {"title": self.sweep.title, "engine": Record.read(record).header["engine"], "runs": []}
        return None

    def _refuse_other_engine(self, found: dict[str, Any], engine: str) -> None:
        if found["engine"] != engine:
            do = f"continue with --engine {found['engine']}, or choose another folder"
            raise FedeveError("this sweep was begun with another engine", got=engine, do=do)


def count(statuses: list[Status]) -> dict[str, int]:
    """How many runs are in which state."""
    found = Counter(status.state for status in statuses)
    return {state: found[state] for state in ("finished", "begun", "waiting", "failed")}


def _of_point(path: Path, point: Point) -> Record:
    record = Record.read(path)
    if portable(record.header["config"]) != portable(point.config):
        raise FedeveError(f"{path.parent} holds another run", got=Words("another configuration"), do="move it away")
    return record


def _best(record: Record) -> dict[str, float]:
    values = {name: record.metric(name) for name in record.metrics}
    return {name: float(np.nanmax(each)) for name, each in values.items() if np.isfinite(each).any()}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} cannot be read"
