"""Playing a sweep's runs in this process: in pools of runs that share lanes, or one after another.

What happens is told as events, plain tables that a view, a tracker or another process can read. A run that raises is
written down as failed and the others go on; a disk that refuses, or a GPU that is lost, stops them all.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..data.federated import FederatedData
from ..engines.blame import LostDeviceError, culprit, is_lost
from ..engines.loop import Progress, simulate
from ..engines.profile import Profile
from ..engines.width import useful
from ..errors import FedeveError, Words
from ..record import DiskError
from ..run import Run, choose_device
from .config import Plan
from .sweep import Point
from .sweep_clock import SECONDS, Work, calibrate, work
from .sweep_folder import SweepFolder

Event = dict[str, Any]
Tell = Callable[[Event], None]

WIDEST = 256  # lanes, unless a sweep says otherwise
TOGETHER = 128  # runs in one pool at a time: each has its own state on the device, and files of its own
_DATA_SETS = 8  # kept loaded at a time


class DataSets:
    """Data sets by their configuration, loaded once."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[str, FederatedData | FedeveError] = OrderedDict()

    def get(self, plan: Plan) -> FederatedData:
        """The data of a plan; one that cannot be loaded raises the same error every time."""
        key = json.dumps(plan.describe()["data"], sort_keys=True)
        if key not in self._loaded:
            try:
                self._loaded[key] = plan.dataset.load()
            except FedeveError as error:
                self._loaded[key] = error
            while len(self._loaded) > _DATA_SETS:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        found = self._loaded[key]
        if isinstance(found, FedeveError):
            raise found
        return found


@dataclass
class Player:
    """Plays points into a sweep's folder until they are done or the time is up."""

    folder: SweepFolder
    tell: Tell
    device: str = "auto"
    threads: int = 1
    checkpoint_every: float = 10.0
    until: float | None = None
    """A moment of `time.monotonic()`."""
    datasets: DataSets = field(default_factory=DataSets)
    precision: str = "float32"
    profile: Profile | None = None
    """Filled with where the time went, where one is given."""
    cores: int | None = None
    """On a CPU, for the lanes of a pool; all of them unless set."""
    preparing_took: float = 0.0
    works: dict[tuple[Any, ...], Work] = field(default_factory=dict)

    def play(self, points: list[Point]) -> None:
        """Play these runs, as far as time allows."""
        waiting = batches(points, engine=self.folder.engine)
        self.plan_widths(waiting)
        for some in waiting:
            if self.has_time():
                self.play_together(some)

    def calibrate(self, points: list[Point]) -> dict[str, float]:
        """Seconds a round of each run takes, by name: measured on one of each kind, none where it cannot be."""
        measured: dict[str, float] = {}
        result: dict[str, float] = {}
        waiting = batches(points, engine=self.folder.engine)
        self.plan_widths(waiting)
        for some in waiting:
            kind = _kind(some[0])
            if kind not in measured and self.has_time():
                measured[kind] = self._measure(some)
            result |= {point.name: measured[kind] for point in some if kind in measured}
        return result

    def _measure(self, points: list[Point]) -> float:
        width, runs = self._width(points), []
        try:
            for point in points:
                runs.append(point.plan.build(self.datasets.get(point.plan)))
                if width is None:  # one run keeps the cores busy; a GPU's lanes are full only with all of them
                    break
            # Of a small budget, calibrating takes a small part.
            seconds = SECONDS if self.until is None else min(SECONDS, (self.until - time.monotonic()) / 50)
            options = {"engine": self.folder.engine, "device": self.device}
            options |= {"precision": self.precision}
            return calibrate(runs, **options, threads=self.threads, width=width, seconds=seconds)
        except DiskError:
            raise
        except Exception:  # the run that raises is named when it is played
            return 0.0

    def plan_widths(self, batches: list[list[Point]]) -> None:
        """Fix how many lanes runs get that are played in these batches, where no earlier session has fixed it."""
        if self.folder.engine != "lanes":
            return
        found: dict[str, int] = {}
        for batch in batches:
            if (shared := batch[0].shares) not in self.folder.widths:
                found[shared] = max(found.get(shared, 1), self._useful(batch))
        if found:
            self.folder.widths |= found
            self.folder.save()

    def _useful(self, points: list[Point]) -> int:
        try:
            return min(WIDEST, useful([point.plan.build(self.datasets.get(point.plan)) for point in points]))
        except FedeveError:  # told when they are played
            return min(WIDEST, sum(int(point.config["cohort"]) for point in points))

    def has_time(self) -> bool:
        """Whether there is more time left than getting runs ready has taken."""
        return self.until is None or time.monotonic() + self.preparing_took < self.until

    def play_together(self, points: list[Point]) -> None:
        """Play runs in one pool. When it raises, the others go on; it is split if nobody knows whose fault it was."""
        begun = time.monotonic()
        runs = {}
        for point in points:
            try:
                runs[point] = point.plan.build(self.datasets.get(point.plan))
            except FedeveError as error:
                self._fail(point, error)
        failure = self._try(runs, begun) if runs else None
        if failure is None:
            return
        at, played = culprit(failure), list(runs)
        if at is None and len(played) > 1:
            half = len(played) // 2
            self.play_together(played[:half])
            self.play_together(played[half:])
        else:
            self._fail(played.pop(at or 0), failure)
            self.play_together(played)

    def _try(self, runs: dict[Point, Run], begun: float) -> Exception | None:
        """Play runs and write down what they took; what one of them raised, if one did."""
        for run in runs.values():
            self.work(run)  # counted now, so that it takes no time when the time is up
        session = _Session(self, runs, begun)
        try:
            self._simulate(list(runs), list(runs.values()), session)
        except (DiskError, BrokenPipeError):  # nobody reads what is told any more: no fault of a run either
            raise
        except Exception as error:
            if is_lost(choose_device(self.device)):
                raise _lost(error) from error
            return error
        finally:
            session.write()
        return None

    def _simulate(self, points: list[Point], runs: list[Run], session: _Session) -> None:
        simulate(
            runs,
            engine=self.folder.engine,
            device=self.device,
            threads=self.threads,
            width=self._width(points),
            precision=self.precision,
            profile=self.profile,
            out=[self.folder.folder(point) for point in points],
            resume="auto",
            checkpoint_every=self.checkpoint_every,
            until=self.until,
            watch=session.watch,
        )

    def _width(self, points: list[Point]) -> int | None:
        """On a GPU the last bits depend on it, so it is kept with the sweep; on a CPU it is the number of cores."""
        if choose_device(self.device).type == "cuda":
            return self.folder.widths[points[0].shares]
        return None if self.cores is None else min(self.cores, sum(int(point.config["cohort"]) for point in points))

    def work(self, run: Run) -> Work:
        """A run's work, counted once for all methods that have the same cohorts."""
        key = (run.data.fingerprint, run.seed, run.rounds, run.cohort, run.dropout, run.empty, run.local)
        if key not in self.works:
            self.works[key] = work(run)
        return self.works[key]

    def _fail(self, point: Point, error: Exception) -> None:
        words = str(error) if isinstance(error, FedeveError) else f"{type(error).__name__}: {error}"
        reason = " ".join(words.split())
        self.folder.fail(point, reason)
        self.tell({"event": "failed", "run": point.name, "reason": reason})


def _lost(error: Exception) -> LostDeviceError:
    return LostDeviceError(
        "the GPU answers nothing any more in this process",
        got=Words(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"),
        do="give the same command again, it goes on from the checkpoints; if a run is at fault, --processes 2 finds it",
    )


class _Session:
    """What one pool's runs did in this session: tells of every round, and shares the time out by the work done."""

    def __init__(self, player: Player, runs: dict[Point, Run], begun: float) -> None:
        self.player, self.runs, self.begun = player, runs, begun
        self.points = list(runs)
        self.first: dict[int, int] = {}
        self.reached: dict[int, int] = {}

    def watch(self, progress: Progress) -> None:
        number, point = progress.number, self.points[progress.number]
        if not self.first:
            took = time.monotonic() - self.begun
            self.player.preparing_took = max(self.player.preparing_took, took)
        self.first.setdefault(number, progress.num_rounds - 1)
        self.reached[number] = progress.num_rounds
        event = {"event": "round", "run": point.name, "round": progress.num_rounds, "occupancy": progress.occupancy}
        metrics = {key: value for key, value in (progress.line or {}).items() if isinstance(value, float)}
        self.player.tell({**event, "metrics": metrics, "facts": progress.facts})
        if progress.num_rounds == progress.run.rounds:
            self.player.tell({"event": "finished", "run": point.name})

    def write(self) -> None:
        """The timing of every run that moved."""
        seconds = time.monotonic() - self.begun
        works = {number: self.player.work(self.runs[self.points[number]]) for number in self.reached}
        moved = {n: works[n].steps[self.reached[n]] - works[n].steps[self.first[n]] for n in self.reached}
        total = sum(moved.values()) or 1
        for number, reached in self.reached.items():
            self.player.folder.timed(
                self.points[number],
                seconds=float(seconds * moved[number] / total),
                client_steps=int(works[number].steps[reached]),
                examples=int(works[number].examples[reached]),
            )


def _kind(point: Point) -> str:
    """Runs for which this is equal take about as long."""
    config = point.config
    return json.dumps([config[key] for key in ("model", "dtype", "cohort", "local")] + [config["data"]["name"]])


def batches(points: list[Point], *, engine: str, together: int = TOGETHER, at_once: bool = False) -> list[list[Point]]:
    """Which runs are played together: in the order of their seeds, so that every cell has a first number early, or
    where all batches are played at once, of every kind some, so that they end together."""
    order = {seed: number for number, seed in enumerate(dict.fromkeys(point.seed for point in points))}
    points = sorted(points, key=lambda point: order[point.seed])
    if engine != "lanes":
        return [[point] for point in points]
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.shares, []).append(point)
    cut = _deal if at_once else _cut
    return [part for group in groups.values() for part in cut(group, -(-len(group) // together))]


def _cut(points: list[Point], parts: int) -> list[list[Point]]:
    """So many parts, of one size as nearly as can be."""
    ends = [len(points) * part // parts for part in range(parts + 1)]
    return [points[first:end] for first, end in itertools.pairwise(ends)]


def _deal(points: list[Point], parts: int) -> list[list[Point]]:
    """The same by turns, every time beginning with the next part: columns of a table do not end up in one."""
    return [[p for n, p in enumerate(points) if (n + n // parts) % parts == part] for part in range(parts)]
