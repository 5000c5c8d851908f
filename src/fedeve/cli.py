"""The command line: thin, every command a few lines around the library.

An error is one line on stderr and exit code 2; `--debug` shows where it came from.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from . import __version__
from .drift import paper_figures
from .drift.commands import drift_app
from .errors import FedeveError
from .experiments.pack_commands import pack
from .experiments.paper_commands import paper_app
from .experiments.sweep_commands import sweep
from .report.commands import report

if TYPE_CHECKING:
    from .record import Record

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
Threads = Annotated[int, typer.Option(help="CPU threads; the last bits of the numbers may depend on it.", min=1)]
Width = Annotated[
    int | None,
    typer.Option(help="Lanes: clients that train at once. Chosen from cohort, model and memory unless set.", min=1),
]
Precision = Annotated[str, typer.Option(help="float32; tf32 or bf16: faster on a GPU, fewer bits of the factors.")]
ShowProfile = Annotated[bool, typer.Option("--profile", help="Say where the time went and how full the lanes were.")]
Every = Annotated[float, typer.Option(help="Seconds between checkpoints; 0 writes one after every round.", min=0)]


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
    from .seeds import SEEDS

    _writable(out)
    if not as_json:
        print("Making 300 clients' data ...", flush=True)
    with _stoppable():
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
    table = configs.override(configs.read(config), changes)
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

    with _stoppable(), commands.watching(as_json=as_json) as progress:
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
    with _stoppable():
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


def _play(table: dict[str, Any], out: Path, *, as_json: bool, resume: bool, show_profile: bool, **options: Any) -> None:
    """Check a configuration, prepare its data, simulate it into a folder; `options` are those of `simulate`."""
    from .engines.loop import simulate
    from .engines.profile import Profile
    from .experiments import config as configs
    from .experiments.watching import watching
    from .store import refuse_occupied

    plan = configs.check(table)
    if not resume:
        refuse_occupied(out)
        _writable(out)
    if not as_json:
        print(f"Preparing {plan.dataset.name} ...", flush=True)
    chosen = plan.build()
    profile = Profile() if show_profile else None
    with _stoppable(), watching(as_json=as_json) as watch:
        record = simulate(chosen, out=out, resume=resume, watch=watch, profile=profile, **options)
    if profile is not None:
        print(json.dumps({"profile": profile.describe()}) if as_json else "\n".join(profile.lines()))
    _print_end(record, out, as_json)


def _print_end(record: Record, out: Path, as_json: bool) -> None:
    finals = {name: record.final(name) for name in record.metrics}
    if as_json:
        print(json.dumps({"done": True, "out": str(out), "final": finals}))
        return
    for name, value in finals.items():
        last = record.metric(name)[-1]
        print(f"{name} {last:.4f} after the last round, {value:.4f} over the evaluations of the last 100 rounds")
    if record.lost:
        print(f"{len(record.lost)} rounds were lost, since nobody answered: {_few(record.lost)}")
    if record.left_out:
        clients = sorted({client for part in record.left_out.values() for client in part})
        print(
            f"updates that were not finite were left out in {len(record.left_out)} rounds, of clients {_few(clients)}"
        )
    print(f"record: {out / 'record.jsonl'}")


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")


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


def _writable(out: Path) -> None:
    """Find out now, not after minutes of work, that a folder cannot be written."""
    from .record import cannot_write

    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise cannot_write(out, error) from error


def main() -> None:
    """Entry point: errors become one line and exit code 2."""
    typer.core.HAS_RICH = False  # which escapes the brackets of a help text, \[required], even where nothing is rich
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except FedeveError as error:
        if "--debug" in sys.argv:
            raise
        print(f"fedeve: {error}", file=sys.stderr)
        sys.exit(2)
    except _COMMAND_LINE_ERROR as error:
        words, _, _ = error.format_message().partition(" (Did you mean")
        if "Did you mean" not in words:  # Typer has guessed what was meant, then Click guesses once more
            words = error.format_message()
        print(f"fedeve: {words} See 'fedeve --help'.", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C says how to go on and ends with exit code 130; a polite kill does the same."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as stop:
        print(f"fedeve: {str(stop) or 'stopped'}", file=sys.stderr)
        raise typer.Exit(130) from None
