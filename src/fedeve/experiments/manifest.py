"""`sweep.json`: what a sweep's folder says of itself. Read, and merged where two folders hold parts of one sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import FedeveError, Words
from ..record import write_atomically

FORMAT = 1
SWEEP, RUNS, FAILED, TIMING = "sweep.json", "runs", "failed.json", "timing.json"
Manifest = dict[str, Any]
Printed = dict[str, dict[str, dict[str, list[float]]]]
"""Numbers printed elsewhere: metric, row, column, then mean and standard deviation."""


def read_manifest(out: Path) -> Manifest:
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
        do = "restore it, or remove it and run the sweep again"
        raise FedeveError(f"{path} is damaged", got=Words("no sweep of format 1"), do=do)
    return dict(found)


def write_manifest(out: Path, manifest: Manifest) -> None:
    """Write the sweep.json of a folder."""
    write_atomically(out / SWEEP, (json.dumps(manifest, indent=1) + "\n").encode())


def place(run: Mapping[str, Any]) -> tuple[str, str, int]:
    """A run's cell and seed: a table has room for one."""
    return run["row"], run["column"], run["seed"]


def in_order(runs: Iterable[dict[str, Any]], order: Mapping[str, Sequence[str]] | None) -> list[dict[str, Any]]:
    """Runs by the columns and rows of the table they are from; those that it does not have come last."""
    known = order or {}
    columns, rows = ({name: at for at, name in enumerate(known.get(axis, ()))} for axis in ("columns", "rows"))
    return sorted(runs, key=lambda run: (columns.get(run["column"], len(columns)), rows.get(run["row"], len(rows))))


def merged(earlier: Manifest, later: Manifest, *, out: Path) -> Manifest:
    """What both say of one sweep; where they differ, what the later says. `out` is named in errors."""
    if earlier["title"] != later["title"]:
        do = f"pack {later['title']!r} from a folder of another name, or into another --out"
        raise FedeveError(f"{out} holds another sweep", got=earlier["title"], do=do)
    old, new = ({run["folder"]: run for run in each["runs"]} for each in (earlier, later))
    places = {place(run): folder for folder, run in old.items() if folder not in new}
    for folder, run in new.items():
        if folder not in old and place(run) in places:
            raise FedeveError(
                f"{out} has a run of another configuration in the same cell with the same seed",
                got=Words(f"{places[place(run)]} and {folder}"),
                do=f"remove {out} if it is out of date, or pack into another --out",
            )
    result = {**earlier, **later}
    result["runs"] = in_order({**old, **new}.values(), result.get("order"))
    if "printed" in result:
        result["printed"] = merged_printed(earlier.get("printed", {}), later.get("printed", {}))
    if "notes" in result:
        result["notes"] = list(dict.fromkeys([*earlier.get("notes", ()), *later.get("notes", ())]))
    if "sessions" in result:
        result["sessions"] = _merged_sessions([*earlier.get("sessions", ()), *later.get("sessions", ())])
    return result


def merged_printed(earlier: Printed, later: Printed) -> Printed:
    """The printed numbers of both."""
    result = {metric: dict(rows) for metric, rows in earlier.items()}
    for metric, rows in later.items():
        for row, cells in rows.items():
            result.setdefault(metric, {})[row] = {**result.get(metric, {}).get(row, {}), **cells}
    return result


def _merged_sessions(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each once, in the order of their times; of one seen twice, as it was when it had lasted longer."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for session in sessions:
        key = tuple(session.get(name) for name in ("begun", "machine", "command"))
        if key not in found or session.get("seconds", 0) > found[key].get("seconds", 0):
            found[key] = session
    return sorted(found.values(), key=lambda session: str(session.get("begun", "")))
