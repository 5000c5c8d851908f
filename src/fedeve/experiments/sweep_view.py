"""Watching a sweep: one live view on a terminal, plain lines when piped, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .sweep import Point
from .sweep_clock import words
from .sweep_folder import Status, SweepFolder, count
from .sweep_play import Event, Tell

_EVERY = 10.0  # seconds between plain lines about the whole
_ROWS = 40  # of the live table


class Board:
    """The whole sweep at a glance, kept up to date by events."""

    def __init__(self, folder: SweepFolder, statuses: list[Status], per_round: dict[str, float]) -> None:
        self.title, self.points = folder.sweep.title, {point.name: point for point in folder.sweep.points}
        self.states = dict(zip(self.points, (status.state for status in statuses), strict=True))
        self.rounds = dict(zip(self.points, (status.num_rounds for status in statuses), strict=True))
        self.is_foreseen, self.per_round = bool(per_round), per_round or dict.fromkeys(self.points, 1.0)
        self.occupancy: float | None = None
        self.playing: set[str] = set()
        self.metrics = list(folder.sweep.metrics)
        self.metric_of: dict[str, str] = {}  # of a column: the first of the sweep's that it has
        self.best: dict[tuple[str, str], float] = {}
        self.begun, self.foreseen = time.monotonic(), 0.0
        for point, status in zip(folder.sweep.points, statuses, strict=True):
            self._judge(point, status.best)

    def apply(self, event: Event) -> None:
        """Take note of what happened."""
        name, kind = event["run"], event["event"]
        if kind == "round":
            self.foreseen += self.per_round.get(name, 0.0)
            self.rounds[name], self.occupancy = event["round"], event.get("occupancy")
            self.playing.add(name)
            self._judge(self.points[name], event["metrics"])
        else:
            self.states[name] = kind
            self.playing.discard(name)

    def _judge(self, point: Point, line: dict[str, Any]) -> None:
        named = self.metrics or [name for name in line if name != "loss"]
        metric = next((name for name in named if isinstance(line.get(name), float)), None)
        if metric is not None:
            value, cell = float(line[metric]), (point.row, point.column)
            self.metric_of.setdefault(point.column, metric)
            self.best[cell] = max(value, self.best.get(cell, value))

    @property
    def metric(self) -> str:
        """What is shown, by name; several where columns differ."""
        return " or ".join(dict.fromkeys(self.metric_of.values()))

    @property
    def counts(self) -> dict[str, int]:
        """Runs finished, running, waiting and failed."""
        found = count([Status(state) for state in self.states.values()])
        running = len(self.playing)
        waiting = found["begun"] + found["waiting"] - running
        return {"finished": found["finished"], "running": running, "waiting": waiting, "failed": found["failed"]}

    @property
    def time_left(self) -> float | None:
        """Seconds, by what was foreseen of the rounds that are left (else all alike) and how fast those so far were."""
        left = sum(
            (point.rounds - self.rounds[name]) * self.per_round.get(name, 0.0)
            for name, point in self.points.items()
            if self.states[name] in ("waiting", "begun")
        )
        elapsed = time.monotonic() - self.begun
        if not left:
            return None
        if self.foreseen and elapsed > 2:
            return left * elapsed / self.foreseen
        return left if self.is_foreseen else None

    @property
    def rounds_played(self) -> tuple[int, int]:
        """How many rounds of all."""
        return sum(self.rounds.values()), sum(point.rounds for point in self.points.values())

    def words(self) -> str:
        """The whole in one line."""
        parts = [f"{number} {state}" for state, number in self.counts.items() if number or state == "finished"]
        played, of_all = self.rounds_played
        if 0 < played < of_all:
            parts.append(f"{played:,} of {of_all:,} rounds")
        if self.occupancy is not None:
            parts.append(f"lanes {self.occupancy:.0%} busy")
        if self.time_left is not None:
            parts.append(f"{words(self.time_left)} left")
        return ", ".join(parts)

    def value(self, row: str, column: str) -> str:
        """The best evaluation so far of a cell's runs."""
        if (row, column) not in self.best:
            return ""
        value = self.best[row, column]
        return f"{100 * value:.2f} %" if self.metric_of[column] == "accuracy" else f"{value:.4f}"


@contextmanager
def watching(board: Board, *, as_json: bool = False, stream: TextIO | None = None) -> Iterator[Tell]:
    """A listener that suits where the output goes."""
    stream = stream or sys.stdout
    if stream.isatty() and not as_json:
        with _live(board, stream) as tell:
            yield tell
    else:
        yield _Lines(board, stream, as_json)


class _Lines:
    """A line whenever a run ends, and one about the whole every few seconds."""

    def __init__(self, board: Board, stream: TextIO, as_json: bool) -> None:
        self.board, self.stream, self.as_json = board, stream, as_json
        self.told_at = time.monotonic()

    def __call__(self, event: Event) -> None:
        self.board.apply(event)
        now = time.monotonic()
        if event["event"] != "round":
            self._print(self._end(event))
        elif now - self.told_at >= _EVERY:
            self.told_at = now
            played, of_all = self.board.rounds_played
            whole = {"event": "progress", **self.board.counts, "rounds": played, "rounds_in_all": of_all}
            whole["seconds_left"] = self.board.time_left
            self._print(whole if self.as_json else self.board.words())

    def _end(self, event: Event) -> str | Event:
        point = self.board.points[event["run"]]
        if self.as_json:
            return {**event, "row": point.row, "column": point.column, "seed": point.seed}
        where = f"{point.row}, {point.column}, seed {point.seed}"
        if event["event"] == "failed":
            return f"failed: {where}: {event['reason']}"
        return f"{where}: best of its cell {self.board.value(point.row, point.column)}  ({self.board.words()})"

    def _print(self, what: str | Event) -> None:
        print(what if isinstance(what, str) else json.dumps(what), file=self.stream, flush=True)


@contextmanager
def _live(board: Board, stream: TextIO) -> Iterator[Tell]:
    from rich.console import Console
    from rich.live import Live

    with Live(get_renderable=lambda: _picture(board), console=Console(file=stream), refresh_per_second=4):
        yield board.apply


def _picture(board: Board) -> Any:
    from rich import box
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    columns = list(dict.fromkeys(point.column for point in board.points.values()))
    rows = list(dict.fromkeys(point.row for point in board.points.values()))
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", caption=f"best {board.metric} so far", caption_justify="left"
    )
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    top = {column: max((board.best.get((row, column), -1.0) for row in rows), default=-1.0) for column in columns}
    for row in rows[:_ROWS]:
        cells = []
        for column in columns:
            is_top = board.best.get((row, column)) == top[column]
            cells.append(Text(board.value(row, column), style="bold" if is_top else ""))
        table.add_row(row, *cells)
    played, of_all = board.rounds_played
    bar = ProgressBar(total=of_all, completed=played, width=48)
    more = [Text(f"and {len(rows) - _ROWS} rows more")] if len(rows) > _ROWS else []
    return Group(Text(board.title, style="bold"), bar, Text(board.words()), table, *more)
