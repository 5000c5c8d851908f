"""Where a section stands while it is unfinished: a column in which a row has no finished run yet is shown as of the
last round that all of its runs reached, and says so, instead of showing nothing. Pure: a section in, a section out.
"""

from __future__ import annotations

from dataclasses import replace

from ..record import Record
from .results import DONE, UNFINISHED, Entry, Section


def standing(section: Section) -> tuple[Section, dict[str, str]]:
    """The section with such columns cut to a round, and by column what to add to their headings."""
    entries, notes = list(section.entries), {}
    for column in section.columns:
        begun = [n for n, entry in enumerate(entries) if entry.column == column and _has_begun(entry)]
        finished = {entries[n].row for n in begun if entries[n].state == DONE}
        if {entries[n].row for n in begun} <= finished:
            continue
        reached = min(_reached(entries[n]) for n in begun)
        rounds = max(int(_record(entries[n]).header["config"]["rounds"]) for n in begun)
        for n in begun:
            entries[n] = _cut(entries[n], reached, min(section.last, max(1, reached // 10)))
        notes[column] = f" (after {reached:,} of {rounds:,} rounds)"
    return replace(section, entries=tuple(entries)), notes


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
