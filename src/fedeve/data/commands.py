"""What `fedeve data get` and `fedeve data check` do, as plain values and as the lines that are printed of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ..errors import FedeveError, unknown
from .datasets import Dataset, all_datasets
from .download import Progress, Step, verify
from .download import get as download
from .files import FileDataset, Remote

_SECONDS = 2.0  # between plain lines


def get(name: str, *, root: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Download those files of a data set that are not there yet, check all, and say where they are."""
    dataset = _create(name, root)
    if not isinstance(dataset, FileDataset):
        return {"data": name, "folder": None, "files": [], "note": f"{name} needs no download: {dataset.source}"}
    if not dataset.remotes:
        note = f"{name} has no public address; see {dataset.homepage or dataset.source}"
        return {"data": name, "folder": str(dataset.folder), "files": [], "note": note}
    files = []
    for remote in dataset.remotes:
        found = _where(dataset, remote)
        path = download(remote, found.parent if found else dataset.folder, progress=progress)
        size = path.stat().st_size
        files.append({"name": remote.name, "path": str(path), "size": size, "downloaded": found is None})
    return {"data": name, "folder": str(dataset.folder), "files": files, "note": ""}


def get_lines(report: dict[str, Any]) -> list[str]:
    """The report of `get` for people."""
    words = {True: "downloaded", False: "was there"}
    return [
        *(f"{file['path']}  {_amount(file['size'])}  {words[file['downloaded']]}" for file in report["files"]),
        *filter(None, [report["note"]]),
    ]


def check(name: str, *, root: str | None = None) -> dict[str, Any]:
    """Compare a data set's files with their checksums, load it as it comes by default, and count what is in it."""
    started = time.monotonic()
    dataset = _create(name, root)
    files, missing = [], []
    if isinstance(dataset, FileDataset):
        for remote in dataset.remotes:
            path = _where(dataset, remote)
            if path is None:  # no error yet: it may lie there unpacked, and loading tells what it needs
                missing.append(remote.name)
            else:
                files.append({"name": remote.name, "path": str(path), **verify(remote, path)._asdict()})
    data = dataset.load()
    sizes = data.sizes
    return {
        "data": name,
        "files": files,
        "missing": missing,
        "partition": dataset.partition,
        "clients": data.num_clients,
        "examples": int(sizes.sum()),
        "test_examples": len(data.y_test),
        "classes": data.num_classes,
        "client_sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "fingerprint": data.fingerprint,
        "seconds": round(time.monotonic() - started, 3),
    }


def check_lines(report: dict[str, Any]) -> list[str]:
    """The report of `check` for people."""
    sizes = report["client_sizes"]
    lines = []
    for file in report["files"]:
        lines.append(f"{file['path']}  {_amount(file['size'])}")
        lines.append(f"  sha256 {file['sha256']}, compared with {file['compared']}")
    if report["missing"]:
        lines.append(f"not here, and not needed for this: {', '.join(report['missing'])}")
    return [
        *lines,
        f"{report['examples']} examples of {report['clients']} clients ({report['partition']}), "
        f"{sizes['min']} to {sizes['max']} each, median {sizes['median']:g}",
        f"{report['test_examples']} test examples, {report['classes']} classes",
        f"fingerprint {report['fingerprint']}, loaded in {report['seconds']:.1f} s",
    ]


@contextmanager
def watching(*, as_json: bool = False, stream: TextIO | None = None) -> Iterator[Progress]:
    """A `progress` for downloads that suits where the output goes: a bar, plain lines, or JSON lines."""
    stream = stream or sys.stdout
    if stream.isatty() and not as_json:
        with _bars() as tell:
            yield tell
    else:
        yield _Lines(stream, as_json)


class _Lines:
    """Prints a step when a file's state changes, and every few seconds in between."""

    def __init__(self, stream: TextIO, as_json: bool) -> None:
        self.stream, self.as_json = stream, as_json
        self.last, self.when = ("", ""), 0.0

    def __call__(self, step: Step) -> None:
        now, what = time.monotonic(), (step.name, step.state)
        if what == self.last and now - self.when < _SECONDS:
            return
        self.last, self.when = what, now
        line = json.dumps(step._asdict()) if self.as_json else f"{step.name}  {_words(step)}"
        print(line, file=self.stream, flush=True)


def _words(step: Step) -> str:
    if step.state == "downloading":
        return f"{_amount(step.done)} of {'?' if step.total is None else _amount(step.total)}"
    return "waiting for another download of it" if step.state == "waiting" else step.state


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bars(*columns) as bars:
        tasks: dict[str, Any] = {}

        def tell(step: Step) -> None:
            if step.name not in tasks:
                # The bar begins where the download does, so that what came earlier does not count as speed.
                tasks[step.name] = bars.add_task(step.name, total=step.total, completed=step.done, state="")
            state = "" if step.state == "downloading" else _words(step)
            bars.update(tasks[step.name], total=step.total, completed=step.done, state=state)

        yield tell


def _create(name: str, root: str | None) -> Dataset:
    known = all_datasets()
    if name not in known:
        raise unknown("data set", name, known)
    cls = known[name]
    if not issubclass(cls, FileDataset):
        return cls()
    return cls(root=root)


def _where(dataset: FileDataset, remote: Remote) -> Path | None:
    try:
        return dataset.find(remote.name)
    except FedeveError:
        return None


def _amount(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} bytes"
