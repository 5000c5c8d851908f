"""Trackers that people already use: TensorBoard, Weights & Biases, MLflow. Each is an extra of the package.

They only listen. A tracker that raises is named once and left alone; the sweep goes on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from ..errors import FedeveError, unknown
from .sweep import Point, leaves
from .sweep_folder import SweepFolder
from .sweep_play import Event, Tell

_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Tracker(Protocol):
    """What becomes of a run's numbers elsewhere."""

    def log(self, point: Point, values: dict[str, float], round: int) -> None: ...

    def finish(self, point: Point) -> None: ...


def check(names: Sequence[str]) -> None:
    """Raise unless there are trackers of these names and they are installed."""
    for name in names:
        if name not in _MODULES:
            raise unknown("tracker", name, _MODULES)
        if importlib.util.find_spec(_MODULES[name]) is None:
            raise FedeveError(f"{name} is not installed", got=name, do=f"pip install 'fedeve[{name}]'")


@contextmanager
def tracking(names: Sequence[str], folder: SweepFolder) -> Iterator[Tell]:
    """A listener that sends metrics and facts to trackers; each keeps its files in `DIR/NAME`."""
    points = {point.name: point for point in folder.sweep.points}
    with ExitStack() as stack:
        open_ = {name: stack.enter_context(_OPENERS[name](folder)) for name in names}

        def tell(event: Event) -> None:
            for name in list(open_):
                try:
                    _pass_on(open_[name], points[event["run"]], event)
                except Exception as error:
                    del open_[name]
                    print(f"fedeve: {name} is left alone from here on: {error}", file=sys.stderr)

        yield tell


def _pass_on(tracker: Tracker, point: Point, event: Event) -> None:
    if event["event"] == "finished":
        tracker.finish(point)
    elif event["event"] == "round":
        facts = {f"facts/{name}": value for name, value in (event["facts"] or {}).items()}
        tracker.log(point, {**event["metrics"], **facts}, event["round"])


def _label(point: Point) -> str:
    return f"{point.row} | {point.column} | seed {point.seed}"


@contextmanager
def _tensorboard(folder: SweepFolder) -> Iterator[Tracker]:
    from torch.utils.tensorboard import SummaryWriter

    writers: dict[str, Any] = {}

    class TensorBoard:
        def log(self, point: Point, values: dict[str, float], round: int) -> None:
            if point.name not in writers:
                # A resumed run writes from its checkpoint on; what an earlier session wrote beyond it is purged.
                where = folder.out / "tensorboard" / point.name
                writers[point.name] = SummaryWriter(str(where), purge_step=round)
                writers[point.name].add_text("run", _label(point), round)
            for name, value in values.items():
                writers[point.name].add_scalar(name, value, round)

        def finish(self, point: Point) -> None:
            if point.name in writers:
                writers.pop(point.name).close()

    try:
        yield TensorBoard()
    finally:
        for writer in writers.values():
            writer.close()


@contextmanager
def _wandb(folder: SweepFolder) -> Iterator[Tracker]:
    import wandb

    runs: dict[str, Any] = {}
    place = folder.out / "wandb"
    place.mkdir(parents=True, exist_ok=True)

    class WandB:
        def log(self, point: Point, values: dict[str, float], round: int) -> None:
            if point.name not in runs:
                runs[point.name] = wandb.init(
                    project="fedeve",
                    group=folder.sweep.title,
                    name=_label(point),
                    id=point.name,
                    resume="allow",
                    config=point.config,
                    dir=str(place),
                    reinit="create_new",
                )
            runs[point.name].log(values, step=round)

        def finish(self, point: Point) -> None:
            if point.name in runs:
                runs.pop(point.name).finish()

    try:
        yield WandB()
    finally:
        for run in runs.values():
            run.finish()


@contextmanager
def _mlflow(folder: SweepFolder) -> Iterator[Tracker]:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder.out / 'mlflow.db').resolve()}"
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(folder.sweep.title)
    experiment = found.experiment_id if found else client.create_experiment(folder.sweep.title)
    runs: dict[str, str] = {}
    held: dict[str, list[Any]] = {}

    def open_run(point: Point) -> str:
        old = client.search_runs([experiment], filter_string=f"tags.fedeve = '{point.name}'")
        if old:
            return str(old[0].info.run_id)
        run = client.create_run(experiment, run_name=_label(point), tags={"fedeve": point.name})
        settings = [Param(key, str(value)) for key, value in leaves(point.config)]
        client.log_batch(run.info.run_id, params=settings)
        return str(run.info.run_id)

    def send(name: str) -> None:
        if held.get(name):
            client.log_batch(runs[name], metrics=held.pop(name))

    class Mlflow:
        def log(self, point: Point, values: dict[str, float], round: int) -> None:
            if point.name not in runs:
                runs[point.name] = open_run(point)
            now = int(1000 * time.time())
            # One call to the store takes as long as some rounds: they are sent a hundred numbers at a time.
            waiting = held.setdefault(point.name, [])
            waiting += [Metric(name, value, now, round) for name, value in values.items()]
            if len(waiting) > 100:
                send(point.name)

        def finish(self, point: Point) -> None:
            if point.name in runs:
                send(point.name)
                client.set_terminated(runs.pop(point.name))

    try:
        yield Mlflow()
    finally:
        for name in runs:
            send(name)


_OPENERS: dict[str, Callable[[SweepFolder], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
