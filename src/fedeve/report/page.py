"""The page: one HTML file that holds tables, curves, figures, the data behind them and all it needs to show them.

Tables are made here, as text, so that they can be read, printed and searched whatever a browser does; page.js sorts and
traces them, charts.js draws the curves. Whatever comes from a file is escaped, and a content security policy lets only
the page's own scripts run and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..errors import FedeveError, Words
from ..record import write_atomically
from .curves import DIGITS, section_data
from .drawings import Drawing, drawings
from .exports import WRITERS
from .markup import section_html
from .results import Results, Section
from .tables import tables

# Okabe & Ito: told apart by everybody; their yellow is left out, since it fades on white, and they are lighter on dark.
# The first is FedEve's. Dashes repeat with another period than the other colours, so that thirty lines differ.
PALETTE = {
    "light": ["#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7F7F7F"],
    "dark": ["#F0743A", "#4C8DFF", "#E69F00", "#10B98A", "#E08FC0", "#7CCBFA", "#A0A0A0"],
    "dashes": ["solid", "dash", "dashdot", "dot", "longdash"],
}
_FITTED = "svg { max-width: 100%; height: auto; display: block; margin: auto }"


def write_page(path: Path, results: Results, *, title: str, made: str) -> None:
    """Write the page; `made` says when and with what."""
    write_atomically(path, render(results, title=title, made=made).encode())


def render(results: Results, *, title: str, made: str) -> str:
    """The page as text; the same results give the same text."""
    found = drawings(results.figures)
    plotly = _plotly()
    script = _asset("page.js") + "\n" + _asset("charts.js")
    data = [_data(section) for section in results.sections]
    # A page about one section has that section's title; it need not be said twice.
    headings = ["Results" if section.title == title else section.title for section in results.sections]
    sections = [
        section_html(section, tables(section), number=n, heading=headings[n])
        for n, section in enumerate(results.sections)
    ]
    return Template(_asset("page.html")).substitute(
        policy=_policy(plotly, script),
        title=html.escape(title),
        style=_asset("page.css"),
        nav=_nav(headings, found),
        problems=_problems([*results.problems, *(drawing.problem for drawing in found if drawing.problem)]),
        sections="\n".join(sections),
        drawings=_drawings_html(found),
        notes=_notes(results, max(each["thinned"] for each in data)) if data else "",
        made=html.escape(made),
        data=_packed(json.dumps({"palette": PALETTE, "sections": data}, separators=(",", ":"), allow_nan=False)),
        plotly=_packed(plotly),
        script=script,
    )


def _data(section: Section) -> dict[str, Any]:
    exports = [
        {"title": table.title, "exports": {kind: write([(section, [table])]) for kind, write in WRITERS.items()}}
        for table in tables(section)
    ]
    return {"title": section.title, "tables": exports, **section_data(section)}


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise FedeveError(
            "the page needs plotly",
            got=Words("no such package"),
            do="install it with: pip install 'fedeve[report]' (--format csv, md and tex work without)",
        ) from None
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Only these scripts, styles of the page, pictures that it makes itself, and no address at all."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _packed(text: str) -> str:
    """A text gzipped and in base64: less than half of it, and nothing in it can end the element it stands in."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _nav(headings: list[str], found: list[Drawing]) -> str:
    links = [f'<a href="#section-{n}">{html.escape(heading)}</a>' for n, heading in enumerate(headings)]
    links += ['<a href="#figures">Figures</a>'] if found else []
    links += ['<a href="#notes">How the numbers are made</a>'] if headings else []
    return "".join(links)


def _problems(problems: list[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    return f'<div class="problem" role="alert"><strong>Not everything could be read.</strong><ul>{items}</ul></div>'


def _drawings_html(found: list[Drawing]) -> str:
    if not found:
        return ""
    parts = []
    for drawing in found:
        # In a shadow tree the ids and styles of one drawing cannot reach another, or the page.
        inked = " inked" if "currentColor" in drawing.svg else ""
        shadow = f'<template shadowrootmode="open"><style>{_FITTED}</style>{drawing.svg}</template>'
        plate = f'<div class="plate{inked}">{shadow}</div>' if drawing.svg else _problems([drawing.problem])
        texts = "".join(f"<p>{html.escape(text)}</p>" for text in (drawing.reading, drawing.caption) if text)
        files = f'<p class="soft">Beside it: {html.escape(", ".join(drawing.files))}</p>' if drawing.files else ""
        parts.append(
            f'<figure class="drawing"><h3>{html.escape(drawing.title)}</h3>{plate}'
            f"<figcaption>{texts}{files}</figcaption></figure>"
        )
    return f'<section id="figures"><h2>Figures</h2>{"".join(parts)}</section>'


def _notes(results: Results, thinned: int) -> str:
    """How the numbers are made, in words."""
    seeds = sorted({section.printed_seeds for section in results.sections if section.printed})
    points = f"so long that up to {thinned} neighbouring points are drawn as their mean, at the last of their rounds"
    return Template(_asset("notes.html")).substitute(
        taken=f" (taken to be over {', '.join(map(str, seeds))} seeds)" if seeds else "",
        points=points if thinned > 1 else "drawn point by point",
        digits=DIGITS,
    )
