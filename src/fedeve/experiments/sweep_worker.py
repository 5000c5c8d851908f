"""Playing a sweep by several processes: what a worker is told, how it plays, and the batches that wait for one.

Processes of this machine (`sweep_processes.py`) and of a cluster (`sweep_ray.py`) differ only in how they are started
and spoken to. All that is said is plain tables.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..engines.blame import LostDeviceError
from ..errors import FedeveError, Words
from . import config as configs
from .manifest import SWEEP
from .sweep import Point, Sweep
from .sweep_folder import SweepFolder
from .sweep_play import TOGETHER, Player, Tell, batches

Table = dict[str, Any]


def order(player: Player) -> Table:
    """What a worker must know to play as this player would."""
    folder = player.folder
    about: Table = {"out": str(folder.out.resolve()), "title": folder.sweep.title}
    about |= {"engine": folder.engine, "widths": folder.widths}
    names = ("device", "threads", "checkpoint_every", "precision", "cores")
    return {**about, "options": {name: getattr(player, name) for name in names}}


def work(player: Player, batch: list[Point]) -> Table:
    """A batch of runs and the seconds that are left for it, since clocks of two processes may differ."""
    left = None if player.until is None else player.until - time.monotonic()
    return {"cells": [[point.config, point.row, point.column] for point in batch], "seconds_left": left}


class Worker:
    """Plays batches of runs into the folder that all share."""

    def __init__(self, order: Table, tell: Tell) -> None:
        out = Path(order["out"])
        if not (out / SWEEP).exists():
            where = Words(f"{out} on {socket.gethostname()}")
            raise FedeveError("a worker does not see the sweep's folder", got=where, do="use storage that all share")
        folder = SweepFolder(out, Sweep(order["title"], []), order["engine"], order["widths"])
        self.player = Player(folder, tell, **order["options"])

    def play(self, work: Table) -> None:
        """Play a batch, as far as time allows."""
        left = work["seconds_left"]
        self.player.until = None if left is None else time.monotonic() + left
        try:
            self.player.play([Point(configs.check(config), row, column) for config, row, column in work["cells"]])
        except LostDeviceError as error:  # for this process; another may still have it, and goes on
            print(f"fedeve: {error.what}: {error.got}", file=sys.stderr)
            raise SystemExit(1) from None


def shared_out(points: list[Point], num_workers: int, engine: str) -> list[list[Point]]:
    """Batches of about one size. Somewhat larger ones, if so every worker has one: a last one would be played alone."""
    fair = min(TOGETHER, max(1, -(-len(points) // num_workers)))
    shares = range(fair, min(TOGETHER, fair * 5 // 4) + 1)
    tried = (batches(points, engine=engine, together=share, at_once=True) for share in shares)
    fitting = (some for some in tried if len(some) <= num_workers)
    return next(fitting, None) or batches(points, engine=engine, together=fair)


class Waiting:
    """The batches that wait, and what becomes of one whose worker died."""

    def __init__(self, player: Player, points: list[Point], *, num_workers: int, deaths: int) -> None:
        """`deaths` of workers with the same runs, and those runs count as the cause."""
        self.player, self.limit = player, deaths
        self.batches = deque(shared_out(points, num_workers, player.folder.engine))
        player.plan_widths(list(self.batches))
        self.deaths: dict[str, int] = {}

    def take(self) -> list[Point]:
        """The next batch; none where there is none, or no time for it."""
        if not self.player.has_time():
            self.batches.clear()
        return self.batches.popleft() if self.batches else []

    def died(self, batch: list[Point], why: str) -> None:
        """A worker died: its batch comes back and goes on from its checkpoints, unless workers die of it."""
        key = batch[0].name if batch else ""
        self.deaths[key] = self.deaths.get(key, 0) + 1
        if not batch and self.deaths[key] > self.limit:
            raise FedeveError("processes die before they begin", got=Words(why), do="mend that first")
        batch = [point for point in batch if self.player.folder.status(point).state in ("waiting", "begun")]
        if not batch:
            return
        if self.deaths[key] < self.limit:
            self.batches.appendleft(batch)
        elif len(batch) > 1:
            half = len(batch) // 2
            self.deaths[batch[0].name] = self.deaths[batch[half].name] = 0
            self.batches.extendleft([batch[half:], batch[:half]])
        else:
            reason = f"{self.limit} processes died of it: {why}"
            self.player.folder.fail(batch[0], reason)
            self.player.tell({"event": "failed", "run": batch[0].name, "reason": reason})
