"""Markup: a section's tables as HTML. Everything from files goes through `html.escape`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from .exports import caption, printed_words, words
from .labels import shared
from .results import DAMAGED, DONE, FAILED_RUN, Entry, Section
from .tables import Cell, Heading, Metric, Table, metric_named

_FEW = 3  # commands behind a section that are shown without a click
_EXPORTS = {"csv": "CSV", "md": "Markdown", "tex": "LaTeX"}


def section_html(section: Section, found: Sequence[Table], *, number: int, heading: str) -> str:
    """One section: what it is, its tables and tests, the places for curves, and the list of its runs."""
    shown = "".join(_table(section, table, place) for place, table in enumerate(found))
    tests = "".join(_tests(section, table) for table in found if table.chosen is not None and len(table.rows) > 1)
    parts = [
        f"<h2>{escape(heading)}</h2>",
        f'<p class="soft">{escape(_counts(section))}</p>',
        _made(section),
        _shared(section),
        f'<div class="tables">{shown}</div>',
        _notes(section),
        _CURVES if any(entry.record is not None and entry.record.lines for entry in section.entries) else "",
        _REACH if section.metrics and any(entry.state == DONE for entry in section.entries) else "",
        f'<div class="tables">{tests}</div>',
        _runs(section),
    ]
    return f'<section id="section-{number}" data-section="{number}">{"".join(parts)}</section>'


def _counts(section: Section) -> str:
    states = Counter(entry.state for entry in section.entries)
    said = ", ".join(f"{count} {state}" for state, count in states.items())
    seconds = sum(entry.timing.get("seconds", 0) for entry in section.entries)
    steps = sum(entry.timing.get("client_steps", 0) for entry in section.entries)
    cost = f"; {_duration(seconds)} of process time and {steps:,.0f} client-steps" if seconds else ""
    return f"{len(section.entries)} runs: {said}{cost}. From {section.folder}."


def _made(section: Section) -> str:
    """By what commands, on what machines, when and in how much time; sessions of one command are told together.

    A table is not kept waiting by more than a few of them: those are folded away.
    """
    told: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for session in section.sessions:
        command, machine = str(session.get("command", "")), str(session.get("machine", ""))
        seconds = session.get("seconds")
        spent = float(seconds) if isinstance(seconds, int | float) else 0.0
        told.setdefault((command, machine), []).append((str(session.get("begun", ""))[:10], spent))
    items = []
    for (command, machine), spans in told.items():
        days = sorted({day for day, _ in spans if day})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""
        known = [seconds for _, seconds in spans if seconds]
        took = f"{sum(known):,.0f} s" + (f" in {len(known)} sessions" if len(known) > 1 else "") if known else ""
        # A session writes its time when it ends, and one that was killed never did.
        lost = len(spans) - len(known)
        killed = f"{lost} {'sessions' if lost > 1 else 'session'} of unknown length" if lost else ""
        rest = ", ".join(escape(part) for part in (f"on {machine}" if machine else "", when, took, killed) if part)
        items.append(f'<p class="soft made">Made by: <code>{escape(command or "unknown")}</code>, {rest}</p>')
    if len(items) <= _FEW:
        return "".join(items)
    machines = " and ".join(sorted({machine for _, machine in told if machine}))
    where = f" on {escape(machines)}" if machines else ""
    return f'<details class="made"><summary>Made by {len(items)} commands{where}</summary>{"".join(items)}</details>'


def _notes(section: Section) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
    return f'<ul class="soft notes">{notes}</ul>' if notes else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _shared(section: Section) -> str:
    """What all runs have in common, folded away."""
    configs = [entry.config for entry in section.entries if entry.config]
    common = shared(configs) if configs else {}
    if not common:
        return ""
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in common.items())
    return f"<details><summary>What all runs have in common</summary><dl>{items}</dl></details>"


def _head(titles: Iterable[str], *, ascending: Sequence[int] = (0,)) -> str:
    cells = (
        f'<th scope="col" aria-sort="none"{" data-first=ascending" if place in ascending else ""}>'
        f'<button type="button" class="sort">{escape(title)}</button></th>'
        for place, title in enumerate(titles)
    )
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _block(title: str, table: str, *, note: str, aside: str = "") -> str:
    """A table under its title, with a note that does not scroll with it; title and note are markup."""
    return (
        f'<div class="block"><div class="block-head"><h3>{title}</h3>{aside}</div>'
        f'<div class="scroll">{table}</div><p class="soft">{note}</p></div>'
    )


def _lifted(table: Table) -> tuple[str, list[str]]:
    """The table's title with what all its headings begin with, and the rest of each heading, unbroken at `=`."""
    parts = [heading.title.replace(" = ", "\xa0=\xa0").split(", ") for heading in table.headings]
    common = 0
    if len(parts) > 1:
        columns = zip(*(words[:-1] for words in parts), strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    begin = ", ".join(parts[0][:common])
    return f"{table.title}: {begin}" if begin else table.title, [", ".join(words[common:]) for words in parts]


def _table(section: Section, table: Table, place: int) -> str:
    title, headings = _lifted(table)
    titles = ["method", *headings, "mean rank"]
    lower = [n + 1 for n, heading in enumerate(table.headings) if heading.metric.lower_is_better]
    body = []
    for row in table.rows:
        cells = "".join(_cell(section, table.cells[row, n], h, row) for n, h in enumerate(table.headings))
        rank = table.mean_rank(row)
        last = f'<td data-sort="{rank}">{rank:.1f}</td>' if math.isfinite(rank) else '<td data-sort="">–</td>'
        body.append(f'<tr><th scope="row">{escape(row)}</th>{cells}{last}</tr>')
    head = _head(titles, ascending=(0, *lower, len(titles) - 1))
    note = escape(caption(section)) + _legend(table)
    buttons = "".join(
        f'<button type="button" data-export="{kind}" data-table="{place}">{name}</button>'
        for kind, name in _EXPORTS.items()
    )
    aside = f'<div class="exports">Save as {buttons}</div>'
    text = f"<table>{head}<tbody>{''.join(body)}</tbody></table>"
    return _block(escape(title), text, note=note, aside=aside)


def _legend(table: Table) -> str:
    if not any(cell.difference is not None for cell in table.cells.values()):
        return ""
    return " Ours minus printed: ≈ within the seeds' noise, ▲ ▼ beyond it, ? unknown with one seed."


def _traced(section: Section, entries: Iterable[Entry], text: str, title: str) -> str:
    """A number as a button that shows the runs behind it."""
    wanted = set(map(id, entries))
    runs = " ".join(str(number) for number, entry in enumerate(section.entries) if id(entry) in wanted)
    return (
        f'<button type="button" class="value" data-runs="{runs}" data-title="{escape(title)}">{escape(text)}</button>'
    )


def _cell(section: Section, cell: Cell, heading: Heading, row: str) -> str:
    title = f"{row}, {heading.column}: {heading.metric.title}"
    value = _traced(section, cell.entries, words(cell, heading), title)
    rank = f'<span class="rank" title="rank in this column">{cell.rank}</span>' if cell.rank else ""
    number = repr(cell.mean) if math.isfinite(cell.mean) else ""
    kind = " ".join(_kinds(cell))
    return f'<td class="{kind}" data-sort="{number}">{value}{rank}{_beside(cell, heading)}{_reasons(cell)}</td>'


def _kinds(cell: Cell) -> list[str]:
    if cell.values:
        return ["best"] if cell.best else []
    return ["bad"] if cell.state in (FAILED_RUN, DAMAGED) else ["none"]


def _beside(cell: Cell, heading: Heading) -> str:
    """What is printed, and how far ours is from it."""
    if cell.printed is None:
        return ""
    text = f"printed {escape(printed_words(cell, heading))}"
    if cell.difference is None or not math.isfinite(cell.difference):
        return f'<div class="beside">{text}</div>'
    difference = heading.metric.show_difference(cell.difference)
    if cell.within_noise is None:
        mark, about, kind = "?", "the noise is unknown", "unknown"
    elif cell.within_noise:
        mark, about, kind = "≈", f"within the seeds' noise of {heading.metric.show(cell.noise or 0)}", "inside"
    else:
        mark = "▲" if cell.difference > 0 else "▼"
        about, kind = f"beyond the seeds' noise of {heading.metric.show(cell.noise or 0)}", "outside"
    shown = f'<span class="{kind}" title="{escape(about)}">{difference} {mark}</span>'
    return f'<div class="beside">{text}</div><div class="beside">{shown}</div>'


def _reasons(cell: Cell) -> str:
    """Why runs are missing: the reasons of failed and damaged ones, each once."""
    wrong = [entry for entry in cell.missing if entry.state in (FAILED_RUN, DAMAGED)]
    reasons = dict.fromkeys(f"{entry.state}: {entry.reason}" for entry in wrong)
    return "".join(f'<div class="reason bad">{escape(reason)}</div>' for reason in reasons)


def _tests(section: Section, table: Table) -> str:
    """The chosen row against every other."""
    chosen = table.chosen or ""
    others = [row for row in table.rows if row != chosen]
    if not any(table.cells[row, n].test for row in others for n in range(len(table.headings))):
        return ""
    body = []
    for row in others:
        cells = "".join(_test(section, table, row, n) for n in range(len(table.headings)))
        body.append(f'<tr><th scope="row">{escape(row)}</th>{cells}</tr>')
    note = (
        f"Mean difference, {escape(chosen)} minus the row, over shared seeds; two-sided paired t test; Holm's "
        "correction within the column. Bold: p (Holm) below 0.05. Five seeds are few."
    )
    title, headings = _lifted(table)
    text = f"<table>{_head(['method', *headings])}<tbody>{''.join(body)}</tbody></table>"
    return _block(escape(f"{chosen} against each other method: {title}"), text, note=note)


def _test(section: Section, table: Table, row: str, number: int) -> str:
    heading, chosen = table.headings[number], table.chosen or ""
    test, metric = table.cells[row, number].test, heading.metric
    if test is None:
        return '<td class="none" data-sort="">no shared seed</td>'
    sort = repr(test.difference) if math.isfinite(test.difference) else ""
    entries = [*table.cells[chosen, number].entries, *table.cells[row, number].entries]
    text = metric.show_difference(test.difference) if sort else "not finite"
    shown = _traced(section, entries, text, f"{chosen} and {row}, {heading.column}: {metric.title}")
    if math.isnan(test.p):
        why = "one seed" if test.num_seeds == 1 else f"{test.num_seeds} seeds, no spread"
        return f'<td data-sort="{sort}">{shown}<div class="beside">{why}</div></td>'
    kind = "clear" if test.holm < 0.05 else ""
    return (
        f'<td class="{kind}" data-sort="{sort}">{shown}<div class="beside">p {_p(test.p)}, Holm {_p(test.holm)}</div>'
        f'<div class="beside">ahead on {test.wins} of {test.num_seeds} seeds</div></td>'
    )


def _p(value: float) -> str:
    return "&lt; 0.0001" if value < 0.0001 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


_CURVES = """<div class="block curves"><div class="block-head"><h3>Curves</h3><div class="controls">
<label>Show <select class="choice"></select></label>
<label>Smooth <input type="range" class="smooth" min="1" max="51" step="2" value="1"> <output>off</output></label>
<label>Band <select class="band"><option value="range">worst to best seed</option><option value="deviation">± standard deviation</option><option value="seeds">every seed</option><option value="none">none</option></select></label>
</div></div><fieldset class="lines"></fieldset><div class="charts"></div></div>"""  # noqa: E501

_REACH = """<div class="block reach"><div class="block-head"><h3>Rounds and examples to reach a value</h3>
<div class="controls"><label>Metric <select></select></label><label>Value <input type="number" step="any"></label></div></div>
<div class="scroll"></div><p class="soft note"></p></div>"""  # noqa: E501


def _runs(section: Section) -> str:
    """Every run with its state, results, cost and record."""
    metrics = [metric_named(name) for name in section.metrics]
    titles = ["method", "column", "seed", "state", "rounds", *(m.title for m in metrics)]
    titles += ["time, s", "client-steps", "steps/s", "examples", "record"]
    body = "".join(_run(section, entry, metrics) for entry in section.entries)
    name = f"All {len(section.entries)} runs: results, time, client-steps, records"
    return (
        f'<details class="runs"><summary>{name}</summary><p class="filter"><label>Only those with the words '
        f'<input type="search"></label></p><div class="scroll"><table>{_head(titles, ascending=(0, 1, 2, 3))}'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _run(section: Section, entry: Entry, metrics: Sequence[Metric]) -> str:
    seed = _traced(section, [entry], str(entry.seed), f"{entry.row}, {entry.column}, seed {entry.seed}")
    state = escape(entry.state + (f": {entry.reason}" if entry.reason else ""))
    rounds = int(entry.record.evaluated[-1]) if entry.record and entry.record.lines else None
    cells = [
        f'<td class="text">{escape(entry.column)}</td>',
        f'<td data-sort="{entry.seed}">{seed}</td>',
        f'<td class="text reason">{state}</td>',
        _figure(rounds, "{:,}"),
    ]
    for metric in metrics:
        known = entry.state == DONE and entry.record is not None and metric.name in entry.record.metrics
        value = metric.factor * entry.record.final(metric.name, last=section.last) if known and entry.record else None
        cells.append(_figure(value, f"{{:.{metric.digits}f}}"))
    seconds, steps = entry.timing.get("seconds"), entry.timing.get("client_steps")
    cells += [_figure(seconds, "{:,.1f}"), _figure(steps, "{:,.0f}")]
    cells += [_figure(steps / seconds if steps is not None and seconds else None, "{:,.0f}")]
    cells += [_figure(entry.timing.get("examples"), "{:,.0f}"), f'<td class="path">{escape(str(entry.path))}</td>']
    return f'<tr><th scope="row">{escape(entry.row)}</th>{"".join(cells)}</tr>'


def _figure(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return '<td data-sort="">–</td>'
    return f'<td data-sort="{value!r}">{form.format(value)}</td>'
