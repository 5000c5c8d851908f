"""`fedeve drift`: figures, inspect, measure. Thin; what they do is in the modules beside this one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..experiments.sweep_commands import Options
from ..options import a_number, stoppable, with_options
from ..seeds import SEEDS

drift_app = typer.Typer(
    help="Measure period drift and client drift, and draw them.", no_args_is_help=True, rich_markup_mode=None
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Root = Annotated[
    str | None, typer.Option(help="Folder of the data files; FEDEVE_DATA or ~/.cache/fedeve/data unless set.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set an option, e.g. partition=dirichlet.")
]
Target = Annotated[
    str,
    typer.Argument(
        help="A data set's name, a configuration or preset, a run's folder, a .csv of client and label, or a folder "
        "of arrays."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the figures, and for the runs they need.")]


@dataclass(frozen=True)
class FigureOptions:
    """How figures are made, as options of a command; None leaves what the size has."""

    size: Annotated[
        str, typer.Option(help="tiny (seconds), quick (minutes to an hour), paper (its settings; use a GPU).")
    ] = "quick"
    data: Annotated[str | None, typer.Option(help="Another data set than the size's.")] = None
    rounds: Annotated[int | None, typer.Option(help="Other numbers of rounds, of runs and of traces.", min=1)] = None
    clients: Annotated[int | None, typer.Option(help="Clients of the Dirichlet and iid partitions.", min=1)] = None
    cohort: Annotated[int | None, typer.Option(help="Clients a round.", min=1)] = None
    epochs: Annotated[
        list[int] | None, typer.Option(help="Local epochs of the runs; may be given several times.", min=1)
    ] = None
    alpha: Annotated[
        list[float] | None, typer.Option(help="Dirichlet's alpha; may be given several times, largest first.")
    ] = None
    seeds: Annotated[
        int | None, typer.Option(help="So many of the paper's five seeds instead of the size's.", min=1, max=len(SEEDS))
    ] = None
    trace_clients: Annotated[
        int | None,
        typer.Option(help="Clients of the federation in which gradients are traced; each round takes them all.", min=2),
    ] = None
    trace_examples: Annotated[int | None, typer.Option(help="Examples each of these has at most.", min=1)] = None
    root: Root = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    as_json: AsJson = False

    def changes(self) -> dict[str, Any]:
        """What these change of a size."""
        return {
            "data": self.data, "rounds": self.rounds, "trace_rounds": self.rounds, "num_clients": self.clients,
            "cohort": self.cohort, "epochs": tuple(self.epochs) if self.epochs else None,
            "alphas": tuple(self.alpha) if self.alpha else None, "seeds": SEEDS[: self.seeds] if self.seeds else None,
            "trace_clients": self.trace_clients, "trace_examples": self.trace_examples,
        }  # fmt: skip


@dataclass(frozen=True)
class GridOptions(Options, FigureOptions):
    """Of figures that come from runs: also how these are played, as those of any sweep."""


@drift_app.command()
@with_options(GridOptions)
def figures(
    out: Out,
    only: Annotated[list[str] | None, typer.Option(help="Only this figure; may be given several times.")] = None,
    *,
    options: GridOptions,
) -> None:
    """Make the figures of the paper's analysis: each as SVG, PNG and CSV, and figures.json for the report page.

    Runs lie in DIR/fig2b and DIR/gain, which are sweeps' folders, and traces in DIR/traces; stopped and started again,
    the command goes on where it was.

    Example: fedeve drift figures --out figures --only fig2a --only law
    """
    from .figures import FIGURES

    make(list(only or FIGURES), out, options)


def make(names: list[str], out: Path, options: FigureOptions) -> None:
    """Make these figures and say so; what `fedeve drift figures` and `fedeve paper NAME` share."""
    from ..errors import unknown
    from ..experiments import sweep_commands
    from ..lock import refuse_unwritable
    from . import figures, grids, lab

    for name in names:
        if name not in figures.FIGURES:
            raise unknown("figure", name, figures.FIGURES)
    place = lab.Lab(
        lab.size(options.size, **options.changes()), out, root=options.root, device=options.device,
        tell=_teller(options.as_json),
    )  # fmt: skip
    if isinstance(options, GridOptions):
        place.play = functools.partial(sweep_commands.play, options=options)
        if options.dry_run:
            for name in names:
                if name in grids.GRIDS:
                    grid = grids.GRIDS[name](place)
                    place.play(grid.sweep(place.size.last), grids.place(place, grid))
                else:
                    place.tell(f"{name}: no runs")
            return
    refuse_unwritable(out)
    with stoppable("stopped; the same command goes on where it was"):
        entries = figures.make(place, names)
    if options.as_json:
        print(_json({"done": True, "out": str(out), "figures": entries}))
        return
    for entry in entries:
        print(f"\n{entry['title']}: {out / entry['svg']}\n  {entry['reading']}")


def _teller(as_json: bool) -> Callable[[str], None]:
    def tell(line: str) -> None:
        print(json.dumps({"progress": line}) if as_json else line, flush=True)

    return tell


@drift_app.command()
def inspect(
    target: Target,
    cohort: Annotated[int | None, typer.Option(help="Clients a round; 10, or all if there are fewer.", min=1)] = None,
    changes: Changes = None,
    root: Root = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the picture as SVG, PNG and CSV.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a federation: client sizes, label mix, H, the drift to expect by cohort size, what cohort would halve it.

    Example: fedeve drift inspect digits --set partition=dirichlet --set alpha=0.1 --cohort 10
    """
    from ..lock import refuse_unwritable
    from . import inspection, labels, style

    if out is not None:
        refuse_unwritable(out)
    if not as_json:
        print(f"Looking at {target} ...", flush=True)
    with stoppable():
        data = inspection.federation_of(target, changes=changes or (), root=root)
        picture = labels.inspect(data, cohort=cohort or max(1, min(10, len(data.with_data))))
        saved = None if out is None else style.save(inspection.drawing(data, picture), out)
    if as_json:
        print(_json(picture.as_dict()))
        return
    print("\n".join(inspection.lines(picture)))
    if saved is not None and out is not None:
        print(f"\npicture: {out / saved['svg']}")


@drift_app.command()
def measure(
    target: Target,
    cohort: Annotated[int, typer.Option(help="Clients a round.", min=1)] = 10,
    average: Annotated[
        str, typer.Option(help="Who counts how much: definition, plain or examples; see docs/drift.md.")
    ] = "definition",
    cohorts: Annotated[
        int, typer.Option(help="Cohorts for client drift, each of which trains models; 0 leaves it out.", min=0)
    ] = 3,
    tolerance: Annotated[
        float, typer.Option(help="A model is trained until its gradient is this share.", callback=a_number)
    ] = 0.01,
    max_steps: Annotated[int, typer.Option(help="Steps at most in such a training.", min=1)] = 200,
    max_clients: Annotated[
        int | None, typer.Option(help="Look at so many clients, drawn at random, instead of all.", min=2)
    ] = None,
    changes: Changes = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Measure both drifts of Definition 1, at a new model or, for a run's folder, where its checkpoint stands.

    Example: fedeve drift measure digits --set partition=dirichlet --set model=linear --cohort 10
    """
    from . import definition

    with stoppable():
        report = definition.measure(
            target, cohort=cohort, average=average, cohorts=cohorts, tolerance=tolerance, max_steps=max_steps,
            max_clients=max_clients, changes=changes or (), root=root, tell=_teller(as_json),
        )  # fmt: skip
    print(_json(report) if as_json else "\n".join(definition.lines(report)))


def _json(value: Any) -> str:
    from ..record import finite

    return json.dumps(finite(value), allow_nan=False)
