"""`fedeve report`: from folders to a page or to an export, thin around the library."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FedeveError, unknown

FORMATS = ("html", "csv", "md", "tex")
_FEW = 3  # titles that one title can hold


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders with records somewhere below: of runs or of sweeps.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; report.html unless set.")] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="html, csv, md or tex; by the ending of --out unless set.")
    ] = None,
    title: Annotated[str, typer.Option(help="The page's title.")] = "",
    last: Annotated[
        int | None,
        typer.Option(help="Average over so many last rounds; as the sweep says, or 100.", min=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Make one self-contained page of runs: tables, tests, curves, figures; or export the tables.

    A damaged record is named, marked on the page, and makes the exit code 1; the other runs are shown all the same.

    Example: fedeve report runs --out report.html
    """
    from .. import __version__
    from ..lock import refuse_unwritable
    from ..record import write_atomically
    from . import exports, page, results

    chosen = _kind(kind, out)
    path = out or Path(f"report.{chosen}")
    _refuse_results(path)
    refuse_unwritable(path.parent)
    found = results.read(folders, last=last, watch=None if as_json else telling("read"))
    if chosen == "html":
        command = ["fedeve", "report", *map(str, folders), *(["--title", title] if title else [])]
        made = f"fedeve {__version__}, {date.today()}. Made by: {shlex.join(command)}"
        titles = list(dict.fromkeys(section.title for section in found.sections))
        text = page.render(found, title=title or _title(titles), made=made)
    else:
        text = exports.export(chosen, found.sections)
    _make_folder(path.parent)  # now, since nothing can come between it and the file
    write_atomically(path, text.encode())
    num_runs = sum(len(section.entries) for section in found.sections)
    said = f"{path}: {num_runs} runs, {path.stat().st_size / 1e6:.1f} MB"
    if as_json:
        said = json.dumps({"done": True, "out": str(path), "runs": num_runs, "problems": found.problems})
    with suppress(BrokenPipeError):  # the page is there, whoever listens
        print(said, flush=True)
    for problem in found.problems:
        print(f"fedeve: {problem}", file=sys.stderr)
    if found.problems:
        raise typer.Exit(1)


def _title(titles: list[str]) -> str:
    """What a page is called by itself: by its sections where they are few."""
    if len(titles) > _FEW:
        return f"{titles[0]}, and {len(titles) - 1} more"
    return ", ".join(titles) or "Figures"


def _refuse_results(path: Path) -> None:
    """A page may be written over a page, but not over what pages are made of."""
    from ..record import PACKED, RECORD
    from .results import FAILED, FIGURES, SWEEP, TIMING

    if path.name in (RECORD, PACKED, SWEEP, FIGURES, TIMING, FAILED):
        raise FedeveError("results would be lost", got=str(path), do="give --out another name, such as report.html")
    if path.is_dir():
        raise FedeveError("--out is a folder", got=str(path), do=f"give a file in it, such as {path / 'report.html'}")


def _make_folder(folder: Path) -> None:
    from ..record import cannot_write

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def telling(done_to_it: str) -> Callable[[int, int], None]:
    """Says every two seconds how many records were read, or whatever is done to them; a short work stays silent."""
    said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > 2.0:
            said = time.monotonic()
            print(f"{done_to_it} {done} of {total} records", flush=True)

    return tell


def _kind(kind: str | None, out: Path | None) -> str:
    """The format that was asked for, or the one the file's name ends in."""
    if kind is None and out is not None and out.suffix[1:] not in FORMATS:
        raise FedeveError(
            "cannot tell the format", got=str(out), do="end --out in .html, .csv, .md or .tex, or set --format"
        )
    chosen = kind or (out.suffix[1:] if out else "html")
    if chosen not in FORMATS:
        raise unknown("format", chosen, FORMATS)
    return chosen
