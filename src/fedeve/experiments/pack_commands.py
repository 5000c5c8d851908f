"""`fedeve pack`: thin around `pack.py`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..options import stoppable


def pack(
    folders: Annotated[list[Path], typer.Argument(help="Sweeps, or folders with sweeps somewhere below.")],
    out: Annotated[Path, typer.Option(help="Where the copies go: OUT/NAME for a sweep in a folder NAME.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Copy sweeps without checkpoints and with small records, to be kept; the report reads them as it reads sweeps.

    Done again, it adds what came since. A record that cannot be read is named and makes the exit code 1.

    Example: fedeve pack paper/table1 paper/table2 --out results
    """
    from ..report.commands import telling
    from . import pack as packs

    problems: list[str] = []
    with stoppable("stopped; the same command goes on"):
        packed = packs.pack(folders, out, watch=None if as_json else telling("packed"))
    for done in packed:
        problems += done.problems
        if as_json:
            print(json.dumps({**asdict(done), "out": str(done.out)}))
            continue
        states = ", ".join(f"{number} {state}" for state, number in done.states.items() if number)
        print(f"{done.out}: {states}; {done.added} added; {done.num_bytes / 1e6:.2f} MB")
        if done.other:
            names = ", ".join(done.other[:3]) + (" ..." if len(done.other) > 3 else "")
            print(f"  {len(done.other)} differ from the finished runs kept there: {names}")
    for problem in problems:
        print(f"fedeve: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
