"""`--engine ray`: a sweep over the machines and GPUs of a Ray cluster, or over the GPUs of this machine.

One worker per GPU (per core where there is none), each with its own lane pool. Batches of runs are taken from one
queue; every worker writes into the sweep's folder, which must be the same storage for all. A worker that dies gives
its batch back: whoever takes it goes on from the checkpoints.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..errors import FedeveError, Words
from . import config as configs
from .manifest import SWEEP
from .sweep import Point, Sweep
from .sweep_folder import SweepFolder
from .sweep_play import TOGETHER, Event, Player, batches

_DEATHS = 3  # of workers with the same runs, before those runs count as the cause
_PASSED_ON = ("FEDEVE_DATA", "FEDEVE_CACHE")
_SELDOM = 0.5  # seconds between events of one run's rounds that no evaluation comes with


def connect(device: str = "auto") -> str:
    """Join the cluster that RAY_ADDRESS or this machine names, or start one here; the engine for its workers."""
    ray = _ray()
    if not ray.is_initialized():
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        ray.init(log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": environment})
    return "lanes" if _num_gpus(device) else "reference"


def play_on_cluster(player: Player, points: list[Point]) -> None:
    """Play points on all workers, telling the player's listener what they tell."""
    connect(player.device)
    ray, queue = _ray(), _queue()
    gpus = _num_gpus(player.device)
    num_workers = gpus or max(1, int(ray.cluster_resources().get("CPU", 1)) // player.threads)
    num_workers = min(num_workers, len(points))
    share = min(TOGETHER, -(-len(points) // num_workers))
    crew = _Crew(player, queue, gpu=bool(gpus))
    crew.waiting.extend(batches(points, engine=player.folder.engine, together=share))
    try:
        for _ in range(num_workers):
            crew.hire()
        crew.work()
    finally:
        crew.dismiss()


class _Crew:
    """The workers, what each of them is doing, and the batches that wait."""

    def __init__(self, player: Player, queue: Any, *, gpu: bool) -> None:
        self.player, self.queue = player, queue
        resources = {"num_gpus": 1} if gpu else {"num_cpus": player.threads}
        self.make = _ray().remote(**resources)(Worker)
        self.waiting: deque[list[Point]] = deque()
        self.busy: dict[Any, tuple[Any, list[Point]]] = {}
        """A promise, the worker who gave it, and its batch; an empty one while the worker gets ready."""
        self.deaths: dict[str, int] = {}

    def hire(self) -> None:
        folder, player = self.player.folder, self.player
        about = {"title": folder.sweep.title, "engine": folder.engine, "widths": folder.widths}
        options = {"device": player.device, "threads": player.threads, "checkpoint_every": player.checkpoint_every}
        options["precision"] = player.precision
        worker = self.make.remote(str(folder.out.resolve()), about, options, self.queue)
        self.busy[worker.ready.remote()] = (worker, [])

    def work(self) -> None:
        """Until every batch is done, or the time is up and every worker has stopped."""
        ray = _ray()
        while self.waiting or any(batch for _, batch in self.busy.values()):
            self._listen()
            done, _ = ray.wait(list(self.busy), timeout=0.2)
            for promise in done:
                worker, batch = self.busy.pop(promise)
                try:
                    ray.get(promise)
                except ray.exceptions.RayActorError as error:
                    self._bury(batch, error)
                    self.hire()
                    continue
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, FedeveError) else error from None
                if self.waiting and self.player.has_time():
                    self._give(worker, self.waiting.popleft())
            if not self.player.has_time():
                self.waiting.clear()
        self._listen()

    def _give(self, worker: Any, batch: list[Point]) -> None:
        cells = [(point.config, point.row, point.column) for point in batch]
        left = None if self.player.until is None else self.player.until - time.monotonic()
        self.busy[worker.play.remote(cells, left)] = (worker, batch)

    def _bury(self, batch: list[Point], error: Exception) -> None:
        """A worker died: its batch goes back to the queue, unless workers die of it."""
        key = batch[0].name if batch else ""
        self.deaths[key] = self.deaths.get(key, 0) + 1
        if not batch:
            if self.deaths[key] >= _DEATHS:
                why = Words(str(error).strip().splitlines()[-1])
                raise FedeveError("workers of the cluster die before they begin", got=why, do="mend that first")
        elif self.deaths[key] < _DEATHS:
            self.waiting.appendleft(batch)
        elif len(batch) > 1:
            half = len(batch) // 2
            self.deaths[key] = 0
            self.waiting.extendleft([batch[half:], batch[:half]])
        else:
            reason = f"{_DEATHS} workers died of it: {' '.join(str(error).split())[:200]}"
            self.player.folder.fail(batch[0], reason)
            self.player.tell({"event": "failed", "run": key, "reason": reason})

    def _listen(self) -> None:
        while not self.queue.empty():
            for event in self.queue.get_nowait_batch(min(self.queue.qsize(), 1000)):
                self.player.tell(event)

    def dismiss(self) -> None:
        for worker, _ in self.busy.values():
            _ray().kill(worker)
        self.queue.shutdown()


class Worker:
    """A process of the cluster that plays batches of runs into the shared folder."""

    def __init__(self, out: str, about: dict[str, Any], options: dict[str, Any], queue: Any) -> None:
        if not (Path(out) / SWEEP).exists():
            where = Words(f"{out} on {socket.gethostname()}")
            raise FedeveError("a worker does not see the sweep's folder", got=where, do="use storage that all share")
        self.queue, self.told_at = queue, 0.0
        folder = SweepFolder(Path(out), Sweep(about["title"], []), about["engine"], about["widths"])
        self.player = Player(folder, self.tell, **options)

    def ready(self) -> int:
        return os.getpid()

    def play(self, cells: list[tuple[dict[str, Any], str, str]], seconds_left: float | None) -> None:
        self.player.until = None if seconds_left is None else time.monotonic() + seconds_left
        self.player.play([Point(configs.check(config), row, column) for config, row, column in cells])

    def tell(self, event: Event) -> None:
        now = time.monotonic()
        if event["event"] != "round" or event["metrics"] or now - self.told_at > _SELDOM:
            self.told_at = now
            self.queue.put(event)


def _num_gpus(device: str) -> int:
    return 0 if device == "cpu" else int(_ray().cluster_resources().get("GPU", 0))


def _queue() -> Any:
    from ray.util.queue import Queue

    return Queue(actor_options={"num_cpus": 0})


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise FedeveError("ray is not installed", got="--engine ray", do="pip install 'fedeve[ray]'") from None
    return ray
