"""Results: what lies in folders of runs, read into sections of entries. No statistics and no page here.

A folder with a `sweep.json` is a section as that file lays it out. Records that belong to no sweep become a section of
their own, with rows and columns named by what differs between their configurations. A piece that is damaged is named
and kept in its place; the others are read all the same.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import FedeveError, Words
from ..record import PACKED, RECORD, Record, recorded
from .labels import labels

SWEEP, FIGURES, TIMING, FAILED = "sweep.json", "figures.json", "timing.json", "failed.json"
FORMAT = 1
DONE, UNFINISHED, FAILED_RUN, NOT_RUN, DAMAGED, REPEAT = (
    "done", "unfinished", "failed", "not run", "damaged", "repeat",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One run in its place of a table: how far it came, and its record where it has one."""

    folder: Path
    row: str
    column: str
    seed: int
    state: str
    reason: str = ""
    """Why it is not done, in words."""
    config: dict[str, Any] = field(default_factory=dict)
    record: Record | None = None
    timing: dict[str, float] = field(default_factory=dict)
    """`seconds`, `client_steps`, `examples`, where they were kept."""

    @property
    def path(self) -> Path:
        """Where its record is, or would be."""
        return recorded(self.folder) or self.folder / RECORD


@dataclass(frozen=True)
class Section:
    """A table's worth of runs; `printed` is {metric: {row: {column: (mean, deviation)}}} in the units printed."""

    title: str
    folder: Path
    entries: tuple[Entry, ...]
    metrics: tuple[str, ...]
    last: int = 100
    printed: dict[str, dict[str, dict[str, tuple[float, float]]]] = field(default_factory=dict)
    printed_seeds: int = 5
    source: str = ""
    notes: tuple[str, ...] = ()
    """What a reader must know of these numbers, in sentences."""
    sessions: tuple[dict[str, Any], ...] = ()
    """How they were made: `command`, `machine`, `begun`, `seconds` of every session that was kept."""
    order: dict[str, list[str]] = field(default_factory=dict)
    """The `rows` and `columns` of the table that they are part of, where that is known."""

    @property
    def rows(self) -> list[str]:
        """Every row in the table's order; else those of the runs as they come, then those that are only printed."""
        printed = (row for table in self.printed.values() for row in table)
        return self._in_order("rows", [*(entry.row for entry in self.entries), *printed])

    @property
    def columns(self) -> list[str]:
        """Every column, likewise."""
        printed = (column for table in self.printed.values() for row in table.values() for column in row)
        return self._in_order("columns", [*(entry.column for entry in self.entries), *printed])

    def _in_order(self, axis: str, names: list[str]) -> list[str]:
        known = {name: at for at, name in enumerate(self.order.get(axis, ()))}
        return sorted(dict.fromkeys(names), key=lambda name: known.get(name, len(known)))


@dataclass(frozen=True)
class Results:
    """All that was found: sections of runs, files that list figures, and what was damaged, one line each."""

    sections: tuple[Section, ...]
    figures: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()


Watcher = Callable[[int, int], None]


class _Told:
    """Counts records and tells a watcher."""

    def __init__(self, watch: Watcher | None, *, total: int) -> None:
        self.watch, self.total, self.count = watch, total, 0

    def one(self) -> None:
        self.count += 1
        if self.watch is not None:
            self.watch(self.count, self.total)


def read(folders: Sequence[Path], *, last: int | None = None, watch: Watcher | None = None) -> Results:
    """Everything below the folders; `last` overrides how many of the last rounds are averaged.

    `watch` is told, record by record, how many were read and how many there are.
    """
    sweeps, records, figures = _find(folders)
    told = _Told(watch, total=sum(map(len, records.values())))
    sections = []
    for found in sweeps.values():
        # What is beside printed numbers comes first, since a page is called by its first section.
        sections += sorted((_sweep(path, last, told) for path in found), key=lambda section: not section.printed)
    taken = {entry.folder.resolve() for section in sections for entry in section.entries}
    loose = {top: [path for path in paths if path.parent.resolve() not in taken] for top, paths in records.items()}
    sections += [_loose(top, paths, last, told) for top, paths in loose.items() if paths]
    if not any(section.entries for section in sections) and not figures:
        raise FedeveError(
            "there is nothing to show",
            got=Words(", ".join(map(str, folders))),
            do=f"give a folder that has {RECORD} files, a {SWEEP} or a {FIGURES} somewhere below",
        )
    damaged = [e.reason for section in sections for e in section.entries if e.state == DAMAGED]
    return Results(tuple(_told_apart(sections)), tuple(figures), tuple(damaged))


def _told_apart(sections: list[Section]) -> Iterator[Section]:
    """Sections of one title, as two sweeps of one table, say which folder they are from."""
    times = Counter(section.title for section in sections)
    for section in sections:
        alone = times[section.title] == 1
        yield section if alone else replace(section, title=f"{section.title} ({section.folder})")


def _find(folders: Sequence[Path]) -> tuple[dict[Path, list[Path]], dict[Path, list[Path]], list[Path]]:
    """Paths of sweeps and records by the folder given, and of lists of figures; each once, in the order of names."""
    sweeps, records, figures = {top: list[Path]() for top in folders}, {top: list[Path]() for top in folders}, []
    seen: set[Path] = set()
    for top in folders:
        if not top.is_dir():
            raise FedeveError("there is no such folder", got=str(top), do="give folders made by fedeve run or sweep")
        for path in _walk(top):
            key = (path.parent if path.name in (RECORD, PACKED) else path).resolve()  # a folder holds one run
            if key in seen:
                continue
            seen.add(key)
            if path.name == SWEEP:
                sweeps[top].append(path)
            elif path.name == FIGURES:
                figures.append(path)
            else:
                records[top].append(path)
    return sweeps, records, figures


def _walk(top: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(top):
        inner.sort()
        yield from (Path(folder) / name for name in sorted(files) if name in (SWEEP, FIGURES, RECORD, PACKED))


def _sweep(path: Path, last: int | None, told: _Told) -> Section:
    """The section that a sweep.json lays out."""
    table = read_json(path)
    try:
        if table["format"] != FORMAT:
            raise FedeveError(f"{path} is of another format", got=table["format"], do="use the version that wrote it")
        entries = [_entry(path.parent / run["folder"], run, told) for run in table["runs"]]
        section = Section(
            title=str(table["title"]),
            folder=path.parent,
            entries=tuple(_without_repeats(entries)),
            metrics=tuple(map(str, table["metrics"])),
            last=int(last or table["last"]),
            printed=_printed(table.get("printed") or {}),
            printed_seeds=int(table.get("printed_seeds", 5)),
            source=str(table.get("source", "")),
            notes=tuple(map(str, table.get("notes") or ())),
            sessions=tuple(map(dict, table.get("sessions") or ())),
            order={str(axis): list(map(str, names)) for axis, names in (table.get("order") or {}).items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FedeveError):
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise FedeveError(
            f"{path} is damaged", got=Words(what), do="restore it, or remove it and run the sweep again"
        ) from None
    return section


def _printed(tables: dict[str, Any]) -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    return {
        str(metric): {
            str(row): {str(column): (float(pair[0]), float(pair[1])) for column, pair in cells.items()}
            for row, cells in table.items()
        }
        for metric, table in tables.items()
    }


def _entry(folder: Path, run: dict[str, Any], told: _Told) -> Entry:
    """A run of a sweep as it lies on disk."""
    planned = Entry(folder, str(run["row"]), str(run["column"]), int(run["seed"]), NOT_RUN, config=run["config"])
    if planned.path.exists():
        return _recorded(planned, told)
    failed = folder / FAILED
    if failed.exists():
        return replace(planned, state=FAILED_RUN, reason=_why(failed))
    return replace(planned, reason="no record yet")


def _why(path: Path) -> str:
    """The reason in a failed.json; one that cannot be read is said to be so."""
    try:
        return str(read_json(path)["reason"])
    except (FedeveError, KeyError, TypeError):
        return f"the reason cannot be read from {path}"


def _recorded(planned: Entry, told: _Told) -> Entry:
    """The entry with its record, its state and its timing."""
    told.one()
    try:
        record = Record.read(planned.path)
        check(record, planned.path)
    except FedeveError as error:
        return replace(planned, state=DAMAGED, reason=str(error))
    header = record.header
    found = replace(planned, config=header["config"], record=record, timing=_timing(planned.folder / TIMING))
    done, rounds = int(record.evaluated[-1]) if record.lines else 0, header["config"]["rounds"]
    failed = planned.folder / FAILED
    if done < rounds and failed.exists():
        return replace(found, state=FAILED_RUN, reason=_why(failed))
    if done < rounds:
        return replace(found, state=UNFINISHED, reason=f"{done} of {rounds} rounds")
    return replace(found, state=DONE, reason="")


def _timing(path: Path) -> dict[str, float]:
    """What a timing.json holds; without one, or with a broken one, nothing: no result depends on it."""
    try:
        table = read_json(path) if path.exists() else {}
    except FedeveError:
        return {}
    names = ("seconds", "client_steps", "examples")
    return {key: table[key] for key in names if isinstance(table, dict) and isinstance(table.get(key), int | float)}


def check(record: Record, path: Path) -> None:
    """Refuse a record whose first line is not what a run writes; of the others its reader made sure."""
    config = record.header.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("rounds"), int) or "seed" not in record.header:
        raise FedeveError(f"line 1 of {path} is damaged", got=record.header, do="restore the file or run again")


def _without_repeats(entries: Iterable[Entry]) -> list[Entry]:
    """Of two runs with one row, column and seed the second does not count: a mean is over different seeds."""
    seen: set[tuple[str, str, int]] = set()
    kept = []
    for entry in entries:
        key = (entry.row, entry.column, entry.seed)
        again = entry.state in (DONE, UNFINISHED) and key in seen
        kept.append(replace(entry, state=REPEAT, reason="this seed is there already") if again else entry)
        seen.add(key)
    return kept


def _loose(top: Path, paths: Sequence[Path], last: int | None, told: _Told) -> Section:
    """Records outside of sweeps, named by what differs between them."""
    found = [_recorded(Entry(path.parent, "", "", 0, DAMAGED), told) for path in paths]
    found = [replace(e, seed=int(e.record.header["seed"])) if e.record else e for e in found]
    names = iter(labels([e.config for e in found if e.record]))
    placed = []
    for entry in found:
        row, column = next(names) if entry.record else ("(damaged)", str(entry.folder))
        placed.append(replace(entry, row=row, column=column))
    metrics = dict.fromkeys(name for e in placed if e.record for name in e.record.metrics)
    return Section(top.resolve().name or str(top), top, tuple(_without_repeats(placed)), tuple(metrics), last or 100)


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedeveError(f"cannot read {path}", got=Words(error.strerror or str(error)), do="check the path") from None
    except ValueError as error:
        raise FedeveError(f"{path} is damaged", got=Words(str(error)), do="restore it or write it again") from None
