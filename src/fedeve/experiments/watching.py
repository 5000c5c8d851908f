"""Watching a run: a live line on a terminal, plain lines when piped, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ..engines.loop import Progress, Watcher

_MIN_SECONDS = 0.5  # before this, a rate is noise


@contextmanager
def watching(*, as_json: bool = False, label: str = "", stream: TextIO | None = None) -> Iterator[Watcher]:
    """A watcher for `simulate` that suits where the output goes."""
    stream = stream or sys.stdout
    if as_json:
        yield lambda progress: _print_json(progress, label, stream)
    elif stream.isatty():
        with _live_line(label) as watcher:
            yield watcher
    else:
        clock = _Clock()
        yield lambda progress: _print_plain(progress, label, clock, stream)


class _Clock:
    """Rounds a second and time left, counted from the first round seen (a resumed run starts in the middle)."""

    def __init__(self) -> None:
        self.started, self.first = time.monotonic(), -1

    def words(self, progress: Progress) -> str:
        self.first = progress.num_rounds - 1 if self.first < 0 else self.first
        elapsed = time.monotonic() - self.started
        done = progress.num_rounds - self.first
        if elapsed < _MIN_SECONDS or done < 1:
            return ""
        left = (progress.run.rounds - progress.num_rounds) * elapsed / done
        return f"{done / elapsed:.1f} rounds/s  {left:.0f} s left"


def _figures(progress: Progress) -> str:
    line, facts = progress.line or {}, progress.facts
    metrics = [name for name in line if name not in ("round", "loss")]
    words = [f"accuracy {100 * line['accuracy']:.1f} %"] if "accuracy" in line else []
    words = words or [f"{name} {line[name]:.4f}" for name in metrics[:1] if isinstance(line[name], float)]
    if facts is None:
        words.append("nobody answered")
    elif "gain" in facts and progress.run.method.name == "fedeve":  # others have it as the gain they do not use
        words.append(f"gain {facts['gain']:.2f}")
    return "  ".join(words)


def _print_plain(progress: Progress, label: str, clock: _Clock, stream: TextIO) -> None:
    if progress.line is not None or progress.facts is None:
        width = len(str(progress.run.rounds))
        where = f"round {progress.num_rounds:>{width}}/{progress.run.rounds}"
        words = (label, where, _figures(progress), clock.words(progress))
        print("  ".join(word for word in words if word), file=stream, flush=True)


def _print_json(progress: Progress, label: str, stream: TextIO) -> None:
    if progress.line is None and progress.facts is not None:
        return
    value: dict[str, Any] = {"label": label} if label else {}
    value |= {"round": progress.num_rounds, "rounds": progress.run.rounds}
    line = progress.line or {}
    value |= {key: number for key, number in line.items() if isinstance(number, float)}
    value |= progress.facts if progress.facts is not None else {"lost": True}
    print(json.dumps(value), file=stream, flush=True)


@contextmanager
def _live_line(label: str) -> Iterator[Watcher]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns) as bar:
        task = bar.add_task(label or "rounds", total=None, figures="")
        clock, accuracy = _Clock(), ""

        def watch(progress: Progress) -> None:
            nonlocal accuracy
            figures = _figures(progress)
            accuracy = figures.split("  ")[0] if progress.line else accuracy
            words = figures if progress.line else f"{accuracy}  {figures}"
            rate = clock.words(progress).split("  ")[0]
            bar.update(task, total=progress.run.rounds, completed=progress.num_rounds, figures=f"{words}  {rate}")

        yield watch
