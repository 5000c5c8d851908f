"""The command line: thin, every command a few lines around the library.

An error is one line on stderr and exit code 2; `--debug` shows where it came from.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from . import __version__
from .drift import paper_figures
from .drift.commands import drift_app
from .errors import FedeveError
from .experiments.pack_commands import pack
from .experiments.paper_commands import paper_app
from .experiments.sweep_commands import sweep
from .options import MOST_LANES, MOST_THREADS, Argument, a_number, ending_at_once, stoppable
from .report.commands import report

app = typer.Typer(
    name="fedeve",
    help="Cross-device federated learning: compare server methods and see the drifts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="The data sets that fedeve knows.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(drift_app, name="drift")
app.command()(sweep)
app.add_typer(paper_app, name="paper")
app.command()(pack)
app.command(name="report")(report)
paper_figures.add(paper_app)

CITATION = """\
@misc{shen2025fedeve,
  title  = {FedEve: On Bridging the Client Drift and Period Drift for Cross-device Federated Learning},
  author = {Tao Shen and Zexi Li and Didi Zhu and Ziyu Zhao and Chao Wu and Fei Wu},
  year   = {2025}
}"""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Root = Annotated[
    str | None, typer.Option(help="Folder of the data files; FEDEVE_DATA or ~/.cache/fedeve/data unless set.")
]
Threads = Annotated[
    int, typer.Option(help="CPU threads; the last bits of the numbers may depend on it.", min=1, max=MOST_THREADS)
]
Width = Annotated[
    int | None,
    typer.Option(
        help="Lanes: clients that train at once. Chosen from cohort, model and memory unless set.",
        min=1,
        max=MOST_LANES,
    ),
]
Precision = Annotated[str, typer.Option(help="float32; tf32 or bf16: faster on a GPU, fewer bits of the factors.")]
ShowProfile = Annotated[bool, typer.Option("--profile", help="Say where the time went and how full the lanes were.")]
Every = Annotated[
    float,
    typer.Option(help="Seconds between checkpoints; 0 writes one after every round.", min=0, callback=a_number),
]


def _version(value: bool) -> None:
    if value:
        print(f"fedeve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None: ...


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("demo"),
    rounds: Annotated[int, typer.Option(help="Rounds per run.", min=1)] = 200,
    seeds: Annotated[int, typer.Option(help="How many seeds; each takes half a minute to a minute.", min=1, max=5)] = 1,
    as_json: AsJson = False,
) -> None:
    """Compare FedAvg, FedAvgM and FedEve on embedded data in a minute or two, and write a page.

    Example: fedeve demo --out demo
    """
    from .experiments import demo, demo_page, watching
    from .lock import refuse_unwritable
    from .seeds import SEEDS

    refuse_unwritable(out)
    if not as_json:
        print("Making 300 clients' data ...", flush=True)
    with stoppable():
        chosen = demo.runs(rounds=rounds, seeds=SEEDS[:seeds])
        if not as_json:
            print(demo.describe(chosen[0][1]) + "\n", flush=True)
        groups = demo.play(chosen, out=out, watching=partial(watching.watching, as_json=as_json))
    last = demo.last_rounds(rounds)
    if as_json:
        finals = {label: [record.final("accuracy", last=last) for record in part] for label, part in groups.items()}
        print(json.dumps({"done": True, "report": str(out / "report.html"), "accuracy": finals}))
        return
    head = next(iter(groups))
    print()
    _print_table(
        ["method", "accuracy", "best", f"rounds to {head}'s accuracy"],
        [
            [r.label, demo_page.accuracy_words(r), f"{r.best:.1f} %", r.reached]
            for r in demo_page.rows(groups, last=last)
        ],
    )
    print("\n" + "\n".join(demo_page.sentences(groups, last=last)))
    print(f"\nThe page with the curves, the gain and the drifts: {out / 'report.html'}")


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="A TOML file, or a preset: paper/movielens1m, ...")],
    out: Annotated[Path, typer.Option(help="Folder for the record and the checkpoint.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. local.lr=0.05.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Override the seed.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Override the number of rounds.")] = None,
    root: Root = None,
    engine: Annotated[str, typer.Option(help="auto, reference or lanes.")] = "auto",
    device: Device = "auto",
    threads: Threads = 1,
    width: Width = None,
    precision: Precision = "float32",
    profile: ShowProfile = False,
    checkpoint_every: Every = 10.0,
    as_json: AsJson = False,
) -> None:
    """Run a configuration and keep its record and checkpoints in a folder.

    Example: fedeve run examples/glyphs.toml --out runs/first --set local.lr=0.05 --seed 192
    """
    from .experiments import config as configs

    short = {"seed": seed, "rounds": rounds, "data.root": root}
    changes = [*(assignments or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]
    table = configs.read(config)
    if not table:
        raise FedeveError("the configuration says nothing", got=config, do="write some of its keys; examples/ has some")
    table = configs.override(table, changes)
    options = {"engine": engine, "device": device, "threads": threads, "checkpoint_every": checkpoint_every}
    options |= {"width": width, "precision": precision}
    _play(table, out, resume=False, as_json=as_json, show_profile=profile, **options)


@app.command()
def resume(
    out: Annotated[Path, typer.Argument(help="The folder of an unfinished run.")],
    device: Device = "auto",
    threads: Threads = 1,
    width: Width = None,
    profile: ShowProfile = False,
    checkpoint_every: Every = 10.0,
    as_json: AsJson = False,
) -> None:
    """Continue a run where its last checkpoint left it; the numbers are those of a run that never stopped.

    Example: fedeve resume runs/first
    """
    from .store import recorded_header

    header = recorded_header(out)
    # The engine it was started with: another would give the same numbers but for their last bits.
    options = {"engine": header["engine"], "device": device, "threads": threads, "checkpoint_every": checkpoint_every}
    options |= {"width": width, "precision": header.get("precision", "float32")}
    _play(header["config"], out, resume=True, as_json=as_json, show_profile=profile, **options)


@app.command(name="methods")
def list_methods(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
) -> None:
    """List the server methods with their hyper-parameters.

    Example: fedeve methods
    """
    from .experiments import catalogue

    if as_json:
        print(json.dumps(catalogue.methods()))
    elif markdown:
        print(catalogue.methods_markdown())
    else:
        for name, about in catalogue.methods().items():
            print(f"{name}: {about['summary']}")
            _print_settings(about["settings"])


@data_app.command("list")
def list_data(as_json: AsJson = False) -> None:
    """List the data sets with their options, source and licence.

    Example: fedeve data list
    """
    from .experiments import catalogue

    if as_json:
        print(json.dumps(catalogue.datasets()))
        return
    common = catalogue.common_data_settings()
    for name, about in catalogue.datasets().items():
        print(f"{name}: {about['summary']}")
        for key in ("source", "licence", "citation", "homepage"):
            if about[key]:
                print(f"    {key}: {about[key]}")
        for file in about["files"]:
            known = [f"{file['size']:,} bytes"] if file["size"] else []
            known += [f"{kind} {file[kind]}" for kind in ("sha256", "md5") if file[kind]][:1]
            print(f"    file: {file['url']} ({', '.join(known) or 'checksum recorded at the first download'})")
        _print_settings({k: v for k, v in about["settings"].items() if common.get(k) != v})
    print("all of them:")
    _print_settings(common)


def _print_settings(settings: dict[str, tuple[Any, str]]) -> None:
    for key, (default, words) in settings.items():
        print(f"    {f'{key} = {default!r}':<28}{words}")


@data_app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="A data set.")], root: Root = None, as_json: AsJson = False
) -> None:
    """Download a data set's public files, go on where an earlier download stopped, and check them.

    Example: fedeve data get movielens1m
    """
    from .data import commands

    with stoppable(), commands.watching(as_json=as_json) as progress:
        report = commands.get(name, root=root, progress=progress)
    print(json.dumps(report) if as_json else "\n".join(commands.get_lines(report)))


@data_app.command("check")
def check_data(
    name: Annotated[str, typer.Argument(help="A data set.")], root: Root = None, as_json: AsJson = False
) -> None:
    """Compare a data set's files with their checksums, load it and count what is in it.

    Example: fedeve data check digits
    """
    from .data import commands

    if not as_json:
        print(f"Checking {name} ...", flush=True)
    with stoppable():
        report = commands.check(name, root=root)
    print(json.dumps(report) if as_json else "\n".join(commands.check_lines(report)))


@app.command()
def cite() -> None:
    """Print how to cite the method.

    Example: fedeve cite >> references.bib
    """
    print(CITATION)


# The common base of typer's errors; it is click's or typer's own, by version.
_COMMAND_LINE_ERROR: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
_UNREAD = 141  # as of who is killed by SIGPIPE


def _play(table: dict[str, Any], out: Path, *, as_json: bool, resume: bool, show_profile: bool, **options: Any) -> None:
    """Check a configuration, prepare its data, simulate it into a folder; `options` are those of `simulate`."""
    from .engines.loop import check_precision, choose_engine, simulate
    from .engines.profile import Profile
    from .experiments import config as configs
    from .experiments.watching import end_lines, watching
    from .lock import refuse_unwritable
    from .run import choose_device
    from .store import refuse_occupied

    plan = configs.check(table)
    choose_engine(options["engine"])
    check_precision(options["precision"], choose_device(options["device"]))
    if not resume:
        refuse_occupied(out)
        refuse_unwritable(out)
    if not as_json:
        print(f"Preparing {plan.dataset.name} ...", flush=True)
    chosen = plan.build()
    profile = Profile() if show_profile else None
    with stoppable(), watching(as_json=as_json) as watch:
        record = simulate(chosen, out=out, resume=resume, watch=watch, profile=profile, **options)
    if profile is not None:
        print(json.dumps({"profile": profile.describe()}) if as_json else "\n".join(profile.lines()))
    if as_json:
        finals = {name: record.final(name) for name in record.metrics}
        print(json.dumps({"done": True, "out": str(out), "final": finals}))
    else:
        print("\n".join(end_lines(record, out)))


def _print_table(head: list[str], body: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for number, title in enumerate(head):
        table.add_column(title, justify="left" if number == 0 else "right")
    for row in body:
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    """Entry point: errors become one line and exit code 2, and what is stopped ends with one line and 130."""
    typer.core.HAS_RICH = False  # which escapes the brackets of a help text, \[required], even where nothing is rich
    typer.main.TyperArgument = Argument  # type: ignore[attr-defined]
    code = _UNREAD
    with ending_at_once():
        try:
            code = _call([argument for argument in sys.argv[1:] if argument != "--debug"])
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        sys.exit(code)


def _call(arguments: list[str]) -> int:
    """What the commands give back as exit code, with their errors told."""
    try:
        _refuse_no_folder(arguments)
        return app(arguments, prog_name="fedeve", standalone_mode=False) or 0
    except FedeveError as error:
        if "--debug" in sys.argv:
            raise
        print(f"fedeve: {error}", file=sys.stderr)
    except _COMMAND_LINE_ERROR as error:
        _tell_usage(error)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which Typer takes for an error
            raise end.__context__ from None
        raise
    return 2


def _refuse_no_folder(arguments: list[str]) -> None:
    """An empty --out, as of a shell's variable that was never set, would be the current folder."""
    if "--out=" in arguments or ("--out", "") in itertools.pairwise(arguments):
        raise FedeveError("--out has no folder", got="", do="name one; . is the current folder")


def _tell_usage(error: Any) -> None:
    """Print a mistake on the command line in one line, or the help of a group that was given no command."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help())
        return
    words, *guesses = error.format_message().split("Did you mean")
    guess = f"Did you mean{guesses[0].split('?')[0]}? " if guesses else ""  # Typer guesses, then Click once more
    where = context.command_path if context else "fedeve"
    print(f"fedeve: {words.rstrip(' (')} {guess}See '{where} --help'.", file=sys.stderr)
