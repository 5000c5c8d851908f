"""What `fedeve drift measure` does: both drifts of Definition 1 for a target, as plain values and as lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import Checkpoint
from ..experiments import config as configs
from ..record import RECORD
from ..run import Run
from ..store import CHECKPOINT
from .cohorts import check_size
from .inspection import table_of
from .lab import Clock, one_thread
from .measures import client_drift, period_drift
from .objectives import ModelObjective


def measure(
    target: str,
    *,
    cohort: int,
    average: str,
    cohorts: int,
    tolerance: float,
    max_steps: int,
    max_clients: int | None,
    changes: Sequence[str],
    root: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Both drifts, in float64, with how they were found and what they cost."""
    run = configs.check({"cohort": 1} | table_of(target, changes=changes, root=root)).build()
    with one_thread():
        objective = ModelObjective(run.data, run.model, model_options=dict(run.model_options), seed=run.seed)
        where, rounds = _standing(Path(target), run, objective)
        count = len(objective.weights)
        check_size(cohort, count)
        clock = Clock("clients' gradients", min(count, max_clients or count), tell)
        period = period_drift(
            objective, where, size=cohort, average=average, max_clients=max_clients, seed=run.seed, tell=clock
        )
        report: dict[str, Any] = {
            "target": target,
            "model": run.model,
            "num_params": len(where),
            "rounds": rounds,
            "cohort": cohort,
            "average": average,
            "period_drift": dataclasses.asdict(period),
        }
        if cohorts:
            clock = Clock("cohorts trained", cohorts, tell)
            client = client_drift(
                objective,
                size=cohort,
                average="examples" if average == "examples" else "plain",
                tolerance=tolerance,
                max_steps=max_steps,
                num_cohorts=cohorts,
                start=where,
                seed=run.seed,
                tell=clock,
            )
            report["client_drift"] = dataclasses.asdict(client)
    return report


def _standing(path: Path, run: Run, objective: ModelObjective) -> tuple[Tensor, int]:
    """Where a run's folder has got to, else where training would begin."""
    if not (path / RECORD).exists() or not (path / CHECKPOINT).exists():
        return objective.start, 0
    found = Checkpoint.load(path / CHECKPOINT, identity=run.identity())
    return found.tensors["state.params"].to(objective.start), int(found.values["num_rounds"])


def lines(report: dict[str, Any]) -> list[str]:
    """The report in words."""
    at = f"after {report['rounds']} rounds" if report["rounds"] else "untrained"
    period = report["period_drift"]
    said = [
        f"{report['model']} with {report['num_params']:,} parameters, {at}; cohorts of {report['cohort']} out of "
        f"{period['num_clients']:,} clients with data",
        f"period drift  {_value(period)}",
        f"              {period['cost']:,} gradients in {period['seconds']:.1f} s; average: {report['average']}",
    ]
    if period["bias"] and period["value"]:
        share = f"{100 * period['bias'] / period['value']:.2g} %"
        said.insert(
            2,
            f"              of it {period['bias']:.4g} ({share}) in every cohort: f counts by examples, cohorts do not",
        )
    if "client_drift" in report:
        client = report["client_drift"]
        said += [
            f"client drift  {_value(client)}",
            f"              {client['cost']:,} gradients in {client['seconds']:.1f} s; "
            f"{client['num_reached']} of {client['num_optima']} trainings reached {client['tolerance']:g} of their "
            "first gradient",
        ]
    return said


def _value(estimate: dict[str, Any]) -> str:
    spread = "" if estimate["how"] != "sampled" else f" ± {estimate['error']:.2g}"
    drawn = f", {estimate['num_cohorts']:,} cohorts" if estimate["num_cohorts"] else ""
    return f"{estimate['value']:.4g}{spread} ({estimate['how']}{drawn})"
