"""Where a section stands while it is unfinished: a column in which no seed is finished in every row yet is shown as of
the last round that all of its runs reached, and says so, instead of showing nothing or comparing rows by different
seeds. Pure: a section in, a section out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..record import Record
from .results import DONE, UNFINISHED, Entry, Section


def standing(section: Section) -> tuple[Section, dict[str, str]]:
    """The section with such columns cut to a round, and by column what to add to their headings."""
    entries, notes = list(section.entries), {}
    for column in section.columns:
        begun = [n for n, entry in enumerate(entries) if entry.column == column and _has_begun(entry)]
        if not _is_between(entries[n] for n in begun):
            continue
        reached = min(_reached(entries[n]) for n in begun)
        rounds = max(int(_record(entries[n]).header["config"]["rounds"]) for n in begun)
        for n in begun:
            entries[n] = _cut(entries[n], reached, min(section.last, max(1, reached // 10)))
        notes[column] = f" (after {reached:,} of {rounds:,} rounds)"
    return replace(section, entries=tuple(entries)), notes


def _is_between(begun: Iterable[Entry]) -> bool:
    """Whether runs are under way, and there is no seed by which all rows could be compared."""
    finished: dict[str, set[int]] = {}
    under_way = False
    for entry in begun:
        seeds = finished.setdefault(entry.row, set())
        if entry.state == DONE:
            seeds.add(entry.seed)
        else:
            under_way = True
    return under_way and not set.intersection(*finished.values())


def _has_begun(entry: Entry) -> bool:
    return entry.state in (DONE, UNFINISHED) and entry.record is not None and bool(entry.record.lines)


def _record(entry: Entry) -> Record:
    assert entry.record is not None
    return entry.record


def _reached(entry: Entry) -> int:
    return int(_record(entry).evaluated[-1])


def _cut(entry: Entry, reached: int, last: int) -> Entry:
    """As if the run had ended there: only the evaluations that its value is the mean of are left."""
    record = _record(entry)
    kept = [line for line in record.lines if line["round"] <= reached]
    first = kept[-1]["round"] - last if kept else 0
    window = [line for line in kept if line["round"] > first]
    return replace(entry, state=DONE if window else entry.state, record=Record(record.header, window))
