"""Watching a run: a live line on a terminal, plain lines when piped, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..engines.loop import Progress, Watcher
from ..record import Record

_MIN_SECONDS = 0.5  # before this, a rate is noise


@contextmanager
def watching(*labels: str, as_json: bool = False, stream: TextIO | None = None) -> Iterator[Watcher]:
    """A watcher for `simulate` that suits where the output goes; `labels` name the runs, in their order."""
    stream, names = stream or sys.stdout, labels or ("",)
    if as_json:
        yield lambda progress: _print_json(progress, names[progress.number], stream)
    elif stream.isatty():
        with _live_lines(names) as watcher:
            yield watcher
    else:
        clocks = [_Clock() for _ in names]
        yield lambda progress: _print_plain(progress, names[progress.number], clocks[progress.number], stream)


def end_lines(record: Record, out: Path) -> list[str]:
    """What came of a run: its last metrics, whom it lost and left out, and where its record lies."""
    lines = []
    for name in record.metrics:
        last, value = record.metric(name)[-1], record.final(name)
        lines.append(f"{name} {last:.4f} after the last round, {value:.4f} over the evaluations of the last 100 rounds")
    if record.lost:
        lines.append(f"{len(record.lost)} rounds were lost, since nobody answered: {_few(record.lost)}")
    if record.left_out:
        clients = _few(sorted({client for part in record.left_out.values() for client in part}))
        lines.append(
            f"updates that were not finite were left out in {len(record.left_out)} rounds, of clients {clients}"
        )
    return [*lines, f"record: {out / 'record.jsonl'}"]


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")


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
def _live_lines(labels: Sequence[str]) -> Iterator[Watcher]:
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
        tasks = [bar.add_task(label or "rounds", total=None, figures="") for label in labels]
        clocks, accuracies = [_Clock() for _ in labels], [""] * len(labels)

        def watch(progress: Progress) -> None:
            which, figures = progress.number, _figures(progress)
            if progress.line:
                accuracies[which] = figures.split("  ")[0]
            words = figures if progress.line else f"{accuracies[which]}  {figures}"
            rate = clocks[which].words(progress).split("  ")[0]
            total, done = progress.run.rounds, progress.num_rounds
            bar.update(tasks[which], total=total, completed=done, figures=f"{words}  {rate}")

        yield watch
