"""Exports: tables as CSV for programs, Markdown for pages and LaTeX (booktabs) for papers. Strings in and out."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .results import DONE, Section
from .tables import Cell, Heading, Table, tables

COLUMNS = (
    "section", "metric", "row", "column", "state", "reason", "seeds", "num_seeds", "mean", "std", "rank",
    "printed_mean", "printed_std", "difference", "noise", "within_noise", "fedeve_minus_row", "p_paired_t", "p_holm",
    "records",
)  # fmt: skip
Written = tuple[Section, Sequence[Table]]


def export(kind: str, sections: Iterable[Section]) -> str:
    """All tables of some sections as one text of this kind: csv, md or tex."""
    return WRITERS[kind]([(section, tables(section)) for section in sections])


def to_csv(written: Sequence[Written]) -> str:
    """One line for every cell, full precision, with the paths of the records behind it."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for section, found in written:
        for table in found:
            for row in table.rows:
                writer.writerows(_line(section, row, h, table.cells[row, n]) for n, h in enumerate(table.headings))
    return buffer.getvalue()


def _line(section: Section, row: str, heading: Heading, cell: Cell) -> dict[str, Any]:
    printed = cell.printed or ("", "")
    test = cell.test
    return {
        "section": section.title,
        "metric": heading.metric.title,
        "row": row,
        "column": heading.column,
        "state": cell.state,
        "reason": "; ".join(f"seed {e.seed}: {e.state}, {e.reason}" for e in cell.missing),
        "seeds": " ".join(map(str, cell.values)),
        "num_seeds": len(cell.values),
        "mean": _number(cell.mean),
        "std": _number(cell.deviation),
        "rank": cell.rank or "",
        "printed_mean": printed[0],
        "printed_std": printed[1],
        "difference": _number(cell.difference),
        "noise": _number(cell.noise),
        "within_noise": "" if cell.within_noise is None else str(cell.within_noise).lower(),
        "fedeve_minus_row": _number(test.difference) if test else "",
        "p_paired_t": _number(test.p) if test else "",
        "p_holm": _number(test.holm) if test else "",
        "records": " ".join(str(e.path) for e in cell.entries if e.state == DONE),
    }


def _number(value: float | None) -> float | str:
    return "" if value is None or math.isnan(value) else value


def words(cell: Cell, heading: Heading) -> str:
    """`71.20 ± 1.70`, or why there is no number."""
    show = heading.metric.show
    if not cell.values:
        return cell.state
    text = show(cell.mean) if math.isnan(cell.deviation) else f"{show(cell.mean)} ± {show(cell.deviation)}"
    return text if not cell.missing else f"{text} ({len(cell.values)} of {len(cell.values) + len(cell.missing)} seeds)"


def printed_words(cell: Cell, heading: Heading) -> str:
    """`70.10 ± 0.20` as printed, or nothing."""
    return " ± ".join(map(heading.metric.show, cell.printed)) if cell.printed else ""


def to_markdown(written: Sequence[Written]) -> str:
    """A table of GitHub's Markdown for each, the best in bold, printed values in a line below ours."""
    parts = []
    for section, found in written:
        for table in found:
            head = [_in_markdown(text) for text in ("", *(heading.title for heading in table.headings))]
            lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * len(table.headings) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in _body(table, _in_markdown, "**{}**", "*printed*")]
            parts.append(f"**{_in_markdown(section.title)}: {_in_markdown(table.title)}**\n\n" + "\n".join(lines))
            parts.append(_in_markdown(caption(section)))
    return "\n\n".join(parts) + "\n"


def to_latex(written: Sequence[Written]) -> str:
    """A booktabs table for each; needs \\usepackage{booktabs}."""
    parts = ["% \\usepackage{booktabs}"]
    for section, found in written:
        for table in found:
            head = ["", *(_in_latex(heading.title) for heading in table.headings)]
            body = [f"{' & '.join(row)} \\\\" for row in _body(table, _in_latex, "\\textbf{{{}}}", "\\quad printed")]
            lines = [
                "\\begin{table}", "\\centering",
                f"\\caption{{{_in_latex(f'{section.title}: {table.title}. {caption(section)}')}}}",
                f"\\begin{{tabular}}{{l{'r' * len(table.headings)}}}",
                "\\toprule", f"{' & '.join(head)} \\\\", "\\midrule", *body, "\\bottomrule",
                "\\end{tabular}", "\\end{table}",
            ]  # fmt: skip
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def caption(section: Section) -> str:
    """What the numbers are."""
    text = f"Mean of the evaluations in the last {section.last} rounds, ± standard deviation over seeds."
    return f"{text} Printed: {section.source}." if section.printed and section.source else text


def _body(table: Table, escape: Callable[[str], str], bold: str, printed: str) -> list[list[str]]:
    lines = []
    for row in table.rows:
        cells = [(table.cells[row, n], heading) for n, heading in enumerate(table.headings)]
        texts = [(cell, escape(words(cell, heading))) for cell, heading in cells]
        lines.append([escape(row), *(bold.format(text) if cell.best else text for cell, text in texts)])
        if any(cell.printed for cell, _ in cells):
            lines.append([printed, *(escape(printed_words(cell, heading)) for cell, heading in cells)])
    return lines


def _in_markdown(text: str) -> str:
    for mark in "\\|*_<>`[]":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def _in_latex(text: str) -> str:
    marks = {
        "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{", "}": "\\}",
        "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "−": "$-$", "<": "$<$", ">": "$>$",
    }  # fmt: skip
    return " ".join("".join(marks.get(sign, sign) for sign in text).split())


WRITERS: dict[str, Callable[[Sequence[Written]], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
