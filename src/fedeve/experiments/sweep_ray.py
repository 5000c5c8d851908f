"""`--engine ray`: a sweep over the machines and GPUs of a Ray cluster, or over the GPUs of this machine.

One worker per GPU (per core where there is none), each with its own lane pool. Batches of runs are taken from one
queue; every worker writes into the sweep's folder, which must be the same storage for all. A worker that dies gives
its batch back: whoever takes it goes on from the checkpoints.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ..errors import FedeveError
from .sweep import Point
from .sweep_play import Event, Player
from .sweep_worker import Table, Waiting, Worker, order, work

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
    waiting = Waiting(player, points, num_workers=num_workers, deaths=_DEATHS)
    crew = _Crew(player, waiting, queue, gpu=bool(gpus))
    try:
        for _ in range(num_workers):
            crew.hire()
        crew.work()
    finally:
        crew.dismiss()


class _Crew:
    """The workers, and what each of them is doing."""

    def __init__(self, player: Player, waiting: Waiting, queue: Any, *, gpu: bool) -> None:
        self.player, self.waiting, self.queue = player, waiting, queue
        resources = {"num_gpus": 1} if gpu else {"num_cpus": player.threads}
        self.make = _ray().remote(**resources)(RayWorker)
        self.busy: dict[Any, tuple[Any, list[Point]]] = {}
        """A promise, the worker who gave it, and its batch; an empty one while the worker gets ready."""

    def hire(self) -> None:
        worker = self.make.remote(order(self.player), self.queue)
        self.busy[worker.ready.remote()] = (worker, [])

    def work(self) -> None:
        """Until every batch is done, or the time is up and every worker has stopped."""
        ray = _ray()
        while self.waiting.batches or any(batch for _, batch in self.busy.values()):
            self._listen()
            done, _ = ray.wait(list(self.busy), timeout=0.2)
            for promise in done:
                worker, batch = self.busy.pop(promise)
                try:
                    ray.get(promise)
                except ray.exceptions.RayActorError as error:
                    self.waiting.died(batch, " ".join(str(error).split())[:200])
                    self.hire()
                    continue
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, FedeveError) else error from None
                if batch := self.waiting.take():
                    self.busy[worker.play.remote(work(self.player, batch))] = (worker, batch)
            if not self.player.has_time():
                self.waiting.batches.clear()
        self._listen()

    def _listen(self) -> None:
        while not self.queue.empty():
            for event in self.queue.get_nowait_batch(min(self.queue.qsize(), 1000)):
                self.player.tell(event)

    def dismiss(self) -> None:
        for worker, _ in self.busy.values():
            _ray().kill(worker)
        self.queue.shutdown()


class RayWorker:
    """A process of the cluster."""

    def __init__(self, order: Table, queue: Any) -> None:
        self.queue, self.told_at = queue, 0.0
        self.worker = Worker(order, self.tell)

    def ready(self) -> int:
        return os.getpid()

    def play(self, work: Table) -> None:
        self.worker.play(work)

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
