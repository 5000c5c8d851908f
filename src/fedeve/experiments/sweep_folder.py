"""A sweep's folder: `sweep.json` lists its runs, `runs/NAME/` holds each, and their states are read from the files.

There is no other memory of what is done: whatever a kill leaves, looking at the folder tells what to do next.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import FedeveError, Words
from ..record import Record, write_atomically
from ..store import CHECKPOINT, RECORD
from .sweep import Point, Printed, Sweep, portable

FORMAT = 1
WIDEST = 256  # lanes, unless a sweep says otherwise
SWEEP, RUNS, FAILED, TIMING = "sweep.json", "runs", "failed.json", "timing.json"


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
    seen: dict[str, tuple[Any, Status]] = field(default_factory=dict)

    def folder(self, point: Point) -> Path:
        return self.out / RUNS / point.name

    def status(self, point: Point) -> Status:
        """A run's state, by its files; what has not changed is not read again."""
        stamp = [_stamp(self.folder(point) / name) for name in (RECORD, CHECKPOINT, FAILED)]
        if point.name not in self.seen or self.seen[point.name][0] != stamp:
            self.seen[point.name] = (stamp, self._look(point))
        return self.seen[point.name][1]

    def _look(self, point: Point) -> Status:
        folder = self.folder(point)
        if (folder / FAILED).exists():
            return Status("failed", reason=_reason(folder / FAILED))
        if not (folder / RECORD).exists():
            return Status("waiting")
        try:
            record = Record.read(folder / RECORD)
            if portable(record.header["config"]) != portable(point.config):
                raise FedeveError(f"{folder} holds another run", got=Words("another configuration"), do="move it away")
            reached = Checkpoint.reached(folder / CHECKPOINT) if (folder / CHECKPOINT).exists() else 0
        except FedeveError as error:
            return Status("failed", reason=str(error))
        values = {name: record.metric(name) for name in record.metrics}
        best = {name: float(np.nanmax(each)) for name, each in values.items() if np.isfinite(each).any()}
        return Status("finished" if reached == point.rounds else "begun", reached, best=best)

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
        found = self._found()
        self.engine = engine
        if found is not None:
            self._refuse_other_engine(found, engine)
            self.widths = dict(found.get("widths", {}))
        for shared, cohorts in _cohorts(self.sweep.points).items():
            before = self.widths.setdefault(shared, width or min(WIDEST, cohorts))
            if width not in (None, before):
                raise FedeveError("this sweep was begun with another width", got=width, do=f"leave it at {before}")
        self.save()

    def stored_engine(self) -> str | None:
        """The engine of an earlier session."""
        found = self._found()
        return None if found is None else str(found["engine"])

    def save(self) -> None:
        """Write sweep.json; a sweep that grows keeps those of the earlier runs whose place is not taken."""
        mine, earlier = [self._entry(point) for point in self.sweep.points], self._found()
        if self.sweep.grows and earlier is not None:
            taken = {(run["row"], run["column"], run["seed"]) for run in mine}
            mine += [run for run in earlier["runs"] if (run["row"], run["column"], run["seed"]) not in taken]
        value: dict[str, Any] = {
            "format": FORMAT,
            "title": self.sweep.title,
            "metrics": self.sweep.metrics or self._metrics(),
            "last": self.sweep.last,
            "engine": self.engine,
            "widths": self.widths,
            "runs": mine,
        }
        if self.sweep.printed:
            value |= {"printed": self._all_printed(earlier), "source": self.sweep.source}
        if self.sweep.notes:
            value["notes"] = self.sweep.notes
        write_atomically(self.out / SWEEP, (json.dumps(value, indent=1) + "\n").encode())

    def _all_printed(self, earlier: dict[str, Any] | None) -> Printed:
        """Printed numbers of these runs and, of a sweep that grows, of the earlier ones."""
        old = (earlier or {}).get("printed", {}) if self.sweep.grows else {}
        result = {metric: dict(rows) for metric, rows in old.items()}
        for metric, rows in self.sweep.printed.items():
            for row, cells in rows.items():
                result.setdefault(metric, {})[row] = {**result.get(metric, {}).get(row, {}), **cells}
        return result

    def _entry(self, point: Point) -> dict[str, Any]:
        place = {"folder": f"{RUNS}/{point.name}", "row": point.row, "column": point.column, "seed": point.seed}
        return {**place, "config": point.config}

    def _metrics(self) -> list[str]:
        found = next((best for point in self.sweep.points if (best := self.status(point).best)), {})
        return [name for name in found if name != "loss"] or ["accuracy"]

    def _found(self) -> dict[str, Any] | None:
        """The sweep.json that is there, if it is this sweep's."""
        path = self.out / SWEEP
        if not path.exists():
            if self.out.is_dir() and any(p for p in self.out.iterdir() if p.name not in (".lock", f"{SWEEP}.part")):
                raise FedeveError("this folder holds something else", got=str(self.out), do="choose an empty one")
            return None
        found = read_manifest(self.out)
        ours = {f"{RUNS}/{point.name}" for point in self.sweep.points}
        strange = not self.sweep.grows and ours.isdisjoint(run["folder"] for run in found["runs"])
        if found["title"] != self.sweep.title or strange:
            held = Words(f"{found['title']!r} with {len(found['runs'])} runs" + (", none of them ours" * strange))
            raise FedeveError(f"{self.out} holds another sweep", got=held, do="choose another folder")
        return found

    def _refuse_other_engine(self, found: dict[str, Any], engine: str) -> None:
        if found["engine"] != engine:
            do = f"continue with --engine {found['engine']}, or choose another folder"
            raise FedeveError("this sweep was begun with another engine", got=engine, do=do)


def read_manifest(out: Path) -> dict[str, Any]:
    """The sweep.json of a folder."""
    path = out / SWEEP
    try:
        found = json.loads(path.read_text())
        whole = found["format"] == FORMAT and isinstance(found["runs"], list) and "engine" in found
        whole = whole and all(key in run for run in found["runs"] for key in ("folder", "row", "column", "seed"))
    except OSError as error:
        raise FedeveError("there is no sweep here", got=Words(f"{path}: {error.strerror}"), do="check it") from error
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole or not isinstance(found.get("title"), str):
        raise FedeveError(f"{path} is damaged", got=Words("no sweep of format 1"), do="restore it, or remove it")
    return dict(found)


def count(statuses: list[Status]) -> dict[str, int]:
    """How many runs are in which state."""
    found = Counter(status.state for status in statuses)
    return {state: found[state] for state in ("finished", "begun", "waiting", "failed")}


def _cohorts(points: list[Point]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for point in points:
        sums[point.shares] += int(point.config["cohort"])
    return dict(sums)


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
