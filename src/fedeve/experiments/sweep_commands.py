"""`fedeve sweep`: shows what is to be done, calibrates, plays, and says how it ended. `fedeve paper` ends here too."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import MOST_LANES, MOST_THREADS, a_number, stoppable, with_options

if TYPE_CHECKING:
    from .sweep import Point, Sweep
    from .sweep_folder import SweepFolder

EXIT_CODES = (
    "Exit code: 0 all runs are finished, 1 some failed, 2 the command was refused or the disk is full, 3 the budget "
    "ended first, 130 it was stopped; after 2, 3 and 130 the same command goes on."
)

Out = Annotated[Path, typer.Option(help="Folder of the sweep.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of every run, e.g. local.lr=0.05.")
]


@dataclass(frozen=True)
class Options:
    """How a sweep is played, as options of its command; nothing here changes its numbers but their last bits."""

    budget: Annotated[
        str | None, typer.Option(help="Stop cleanly before this time is up, e.g. 25m; the same command goes on.")
    ] = None
    engine: Annotated[str, typer.Option(help="auto, reference, lanes, or ray for the machines of a cluster.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    threads: Annotated[
        int, typer.Option(help="CPU threads; last bits of the numbers may depend on it.", min=1, max=MOST_THREADS)
    ] = 1
    processes: Annotated[
        int, typer.Option(help="Processes on this device that play runs at once; see docs/sweeps.md.", min=1)
    ] = 1
    checkpoint_every: Annotated[
        float, typer.Option(help="Seconds between checkpoints of a run.", min=0, callback=a_number)
    ] = 10.0
    width: Annotated[
        int | None, typer.Option(help="Lanes of a pool; fixed when a sweep begins.", min=1, max=MOST_LANES)
    ] = None
    precision: Annotated[
        str, typer.Option(help="float32; tf32 or bf16: faster on a GPU, fewer bits of the factors.")
    ] = "float32"
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time went and how full the lanes were.")] = (
        False
    )
    retry: Annotated[bool, typer.Option("--retry", help="Try failed runs again.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False
    no_calibration: Annotated[
        bool, typer.Option("--no-calibration", help="Start at once; the time left is guessed from the rounds played.")
    ] = False
    track: Annotated[
        list[str] | None, typer.Option(help="Send curves to tensorboard, wandb or mlflow; may be given repeatedly.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False


@with_options(Options)
def sweep(
    config: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="What to vary; see docs/sweeps.md.")],
    out: Out,
    assignments: Assignments = None,
    *,
    options: Options,
) -> None:
    """Play every run of a grid, go on where an earlier session stopped, and keep all records in one folder.

    Exit code: 0 all runs are finished, 1 some failed, 2 the command was refused or the disk is full, 3 the budget
    ended first, 130 it was stopped; after 2, 3 and 130 the same command goes on.

    Example: fedeve sweep examples/sweep.toml --out sweeps/first --budget 25m
    """
    from . import sweep as sweeps

    play(sweeps.read(config, assignments=assignments or ()), out, options)


def play(chosen: Sweep, out: Path, options: Options, *, only: Mapping[str, str] | None = None) -> None:
    """Show a sweep, play what is left of it, and end with the exit code that tells how it went.

    `only` is what the command calls data sets in its option --only, where it has one.
    """
    from ..lock import locked
    from . import session, trackers
    from .sweep_clock import parse_seconds
    from .sweep_folder import SweepFolder

    started = time.monotonic()
    until = None if options.budget is None else started + _usable(parse_seconds(options.budget), len(chosen.points))
    say = _silent if options.as_json else _say
    folder = SweepFolder(out, chosen)
    trackers.check(options.track or ())
    _refuse_several(options)
    _refuse_folder(folder, options)
    if options.dry_run:
        _show(folder, say, as_json=options.as_json)
        return
    with ExitStack() as stack:
        stack.enter_context(stoppable(f"stopped; the same command goes on with what is in {out}"))
        if options.engine != "ray":  # Ray's devices and files are elsewhere
            _refuse_unplayable(_left(folder, options), options, only, say)
        held = stack.enter_context(locked(out))
        folder.open(engine=_engine(folder, options), width=options.width)
        if options.retry:
            for point in chosen.points:
                if folder.status(point).state == "failed":
                    folder.forgive(point)
        _show(folder, say, as_json=False)
        if not folder.unfinished():
            say("All runs that have not failed are finished.")
        else:
            machine = "a Ray cluster" if options.engine == "ray" else session.machine(options.device)
            with folder.session(session.begun(sys.argv[1:], machine)):
                _play(folder, options, until, say, held=held)
        folder.save()  # its metrics are known now
    _end(folder, say, as_json=options.as_json)


def _refuse_folder(folder: SweepFolder, options: Options) -> None:
    """What would be refused of a folder, and of an engine for it, before anything is written there."""
    from ..engines.loop import ENGINES
    from ..errors import unknown
    from ..lock import refuse_unwritable

    if options.engine not in (*ENGINES, "ray"):
        raise unknown("engine", options.engine, (*ENGINES, "ray"))
    refuse_unwritable(folder.out)
    if options.engine == "ray":  # which decides when it is there
        folder.stored_engine()
    else:
        folder.take_over(engine=_engine(folder, options), width=options.width)


def _left(folder: SweepFolder, options: Options) -> list[Point]:
    """The runs that will be played."""
    states = {"waiting", "begun"} | ({"failed"} if options.retry else set())
    return [point for point in folder.sweep.points if folder.status(point).state in states]


def _refuse_unplayable(
    points: list[Point], options: Options, only: Mapping[str, str] | None, say: Callable[[str], None]
) -> None:
    """Refuse what no run here can be played with: the device, the precision, data that is not here."""
    from ..engines.loop import check_precision
    from ..run import choose_device
    from . import sweep_data

    if not points:
        return
    check_precision(options.precision, choose_device(options.device))
    if names := list(dict.fromkeys(dataset.name for dataset in sweep_data.in_files(points))):
        say(f"Preparing {', '.join(names)} ...")
    sweep_data.refuse_missing(points, only=only)


def _play(folder: SweepFolder, options: Options, until: float | None, say: Callable[[str], None], *, held: int) -> None:
    from ..engines.profile import Profile
    from . import trackers
    from .sweep_clock import words
    from .sweep_play import Player
    from .sweep_view import Board, watching

    ray = options.engine == "ray"
    player = Player(folder, _silent, options.device, options.threads, options.checkpoint_every, until)
    player.precision, player.profile = options.precision, Profile() if options.profile and not ray else None
    points = folder.unfinished()
    per_round: dict[str, float] = {}
    if options.processes > 1:
        say(f"{options.processes} processes and no calibration: the time left is guessed from the rounds played.")
    elif not options.no_calibration and not ray:
        say("Calibrating ...")
        per_round = player.calibrate(points)
        board = Board(folder, folder.statuses(), per_round)
        if board.time_left is not None:
            say(f"Expected: {words(board.time_left)} on this machine.")
    board = Board(folder, folder.statuses(), per_round)
    with trackers.tracking(options.track or (), folder) as track, watching(board, as_json=options.as_json) as watch:

        def tell(event: dict[str, object]) -> None:
            watch(event)
            track(event)

        player.tell = tell
        if ray:
            from .sweep_ray import play_on_cluster

            with redirect_stdout(sys.stderr):  # where Ray's own messages belong; the view has its stream already
                play_on_cluster(player, points)
        elif options.processes > 1:
            from .sweep_processes import play_in_processes

            play_in_processes(player, points, processes=options.processes, held=held)
        else:
            player.play(points)
    for line in player.profile.lines() if player.profile is not None else ():
        say(line)


def _refuse_several(options: Options) -> None:
    """Several processes do not go together with everything."""
    from ..errors import FedeveError, Words

    if options.processes > 1 and options.engine == "ray":
        got = Words(f"--processes {options.processes} --engine ray")
        raise FedeveError("a cluster decides itself how many processes play", got=got, do="leave one of the two out")
    if options.processes > 1 and options.profile:
        got = Words(f"--processes {options.processes} --profile")
        raise FedeveError("a profile is of one process", got=got, do="leave one of the two out")


def _usable(budget: float, num_runs: int) -> float:
    """What is left of a budget for playing: looking at all records once more at the end takes time too."""
    return budget - min(1 + 0.005 * num_runs, budget / 10)


def _engine(folder: SweepFolder, options: Options) -> str:
    """The engine that plays: what an earlier session had, unless one is asked for."""
    from ..engines.loop import choose_engine

    stored = folder.stored_engine()
    if options.engine == "ray":
        from .sweep_ray import connect

        return stored or connect(options.device)
    if options.engine == "auto" and stored is not None:
        return stored
    return choose_engine(options.engine)


def _show(folder: SweepFolder, say: Callable[[str], None], *, as_json: bool) -> None:
    """How many runs there are and in what state; as JSON, every run."""
    from .sweep_folder import count

    points, statuses = folder.sweep.points, folder.statuses()
    found = count(statuses)
    if as_json:
        for point, status in zip(points, statuses, strict=True):
            place = {"row": point.row, "column": point.column, "seed": point.seed}
            print(json.dumps({"run": point.name, **place, "state": status.state, "reason": status.reason}))
        return
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*((p.row, p.column) for p in points), strict=True))
    seeds = list(dict.fromkeys(point.seed for point in points))
    say(f"{folder.sweep.title}: {len(points)} run{'s' * (len(points) > 1)}")
    say(f"  rows     {_list(rows)}")
    say(f"  columns  {_list(columns)}")
    say(f"  seeds    {_list([str(seed) for seed in seeds])}")
    say("  " + ", ".join(f"{number} {state}" for state, number in found.items() if number))
    for reason, names in folder.failures().items():
        say(f"  failed: {_list(names)}: {reason}")


def _list(names: list[str]) -> str:
    shown = "; ".join(names[:12])
    return shown + (f"; ... ({len(names)} in all)" if len(names) > 12 else "")


def _end(folder: SweepFolder, say: Callable[[str], None], *, as_json: bool) -> None:
    """Say how the sweep stands, and leave with the code that tells."""
    from .sweep_folder import count

    found = count(folder.statuses())
    if as_json:
        print(json.dumps({"event": "end", "out": str(folder.out), **found}))
    say(", ".join(f"{number} {state}" for state, number in found.items() if number))
    for reason, names in folder.failures().items():
        say(f"failed: {_list(names)}: {reason}")
    if found["failed"]:
        say("Mend the cause and add --retry to try failed runs again.")
    if found["begun"] or found["waiting"]:
        say("The time is up; the same command goes on from here.")
        raise typer.Exit(3)
    if found["failed"]:
        raise typer.Exit(1)
    say(f"Records: {folder.out / 'runs'}; make a page of them with: fedeve report {folder.out}")


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(_: object) -> None: ...
