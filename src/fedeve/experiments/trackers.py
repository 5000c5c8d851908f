"""Trackers that people already use: TensorBoard, Weights & Biases, MLflow. Each is an extra of the package.

They only listen. A tracker that raises is named once and left alone; the sweep goes on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from ..errors import FedeveError, unknown
from .sweep import Point
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
                runs.pop(point.name).finish(quiet=True)

    try:
        yield WandB()
    finally:
        for run in runs.values():
            run.finish(quiet=True)


@contextmanager
def _mlflow(folder: SweepFolder) -> Iterator[Tracker]:
    from mlflow import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder.out / 'mlflow.db').resolve()}"
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(folder.sweep.title)
    experiment = found.experiment_id if found else client.create_experiment(folder.sweep.title)
    runs: dict[str, str] = {}

    def open_run(point: Point) -> str:
        old = client.search_runs([experiment], filter_string=f"tags.fedeve = '{point.name}'")
        if old:
            return str(old[0].info.run_id)
        run = client.create_run(experiment, run_name=_label(point), tags={"fedeve": point.name})
        for key, value in _flat(point.config).items():
            client.log_param(run.info.run_id, key, value)
        return str(run.info.run_id)

    class Mlflow:
        def log(self, point: Point, values: dict[str, float], round: int) -> None:
            if point.name not in runs:
                runs[point.name] = open_run(point)
            for name, value in values.items():
                client.log_metric(runs[point.name], name, value, step=round)

        def finish(self, point: Point) -> None:
            if point.name in runs:
                client.set_terminated(runs.pop(point.name))

    yield Mlflow()


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result


_OPENERS: dict[str, Callable[[SweepFolder], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
