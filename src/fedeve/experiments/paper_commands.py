"""`fedeve paper`: the paper's tables and those beside them, each one command. What they are is in `paper_tables.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import FedeveError
from ..options import with_options
from .sweep_commands import EXIT_CODES, Assignments, Options, play

paper_app = typer.Typer(
    help="The paper's tables, each as a sweep, and figures of its analysis.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@paper_app.command("list")
def list_tables(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the tables that can be made, with how much there is to run.

    Example: fedeve paper list
    """
    from . import paper_tables

    listed: list[dict[str, Any]] = []
    for table in paper_tables.TABLES.values():
        sweep = paper_tables.build(table)
        runs, rounds = len(sweep.points), sum(point.rounds for point in sweep.points)
        needs = list(dict.fromkeys(column.data for column in table.columns))
        rows = list(dict.fromkeys(point.row for point in sweep.points))
        columns = list(dict.fromkeys(point.column for point in sweep.points))
        about = {"name": table.name, "title": table.title, "about": table.about, "rows": rows, "columns": columns}
        listed.append({**about, "runs": runs, "rounds": rounds, "data": needs, "notes": sweep.notes})
    if as_json:
        print(json.dumps(listed))
        return
    for entry in listed:
        print(f"{entry['name']}: {entry['title']}; {entry['about']}")
        print(f"    {entry['runs']} runs of {entry['rounds']:,} rounds in all, on {', '.join(entry['data'])}")
        print(f"    rows: {'; '.join(entry['rows'])}")
        print(f"    columns: {'; '.join(entry['columns'])}")
        for note in entry["notes"]:
            print(f"    note: {note}")
    print("Try one on embedded data first: fedeve paper table1 --tiny --out paper/tiny")


Seeds = Annotated[
    int | None, typer.Option(help="How many of the paper's five seeds; as `paper list` says unless set.", min=1, max=5)
]
Seed = Annotated[
    list[int] | None,
    typer.Option(help="This seed, the paper's or any other, instead of its first few; repeated, each.", min=0),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="Only these: fedeve for its variants, FedEve for that row alone; with commas or repeated."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these columns: cifar100, natural, dirichlet-0.1, E=3, lr=0.001, ...; natural,E=3 is one cell a row; "
        "repeated, the columns of each."
    ),
]
Clients = Annotated[
    int | None, typer.Option(help="CIFAR-100's columns alone, dealt to so many clients; 500 is cross-device.", min=1)
]
Data = Annotated[
    str | None, typer.Option(help="A data set in place of FEMNIST, e.g. mnist or glyphs; labelled as what it is.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="The same table on embedded data, in under a minute.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds of every run, instead of the paper's.", min=1)]
Root = Annotated[str | None, typer.Option(help="Folder of the data files; FEDEVE_DATA unless set.")]


def _command(name: str) -> Callable[..., None]:
    @with_options(Options)
    def make(
        out: Annotated[Path, typer.Option(help="Folder of the sweep.")] = Path("paper") / name,
        seeds: Seeds = None,
        seed: Seed = None,
        methods: Methods = None,
        only: Only = None,
        clients: Clients = None,
        data: Data = None,
        tiny: Tiny = False,
        rounds: Rounds = None,
        root: Root = None,
        assignments: Assignments = None,
        *,
        options: Options,
    ) -> None:
        from . import paper_tables

        table = paper_tables.TABLES[name]
        sweep = paper_tables.build(
            table,
            seeds=_chosen_seeds(seeds, seed, tiny_of=table.seeds if tiny else None),
            methods=_split(methods, whole=[row.name.lower() for row in table.rows]),
            only=only or (),
            clients=clients,
            data=data,
            tiny=tiny,
            root=root,
            assignments=[*(assignments or ()), *([] if rounds is None else [f"rounds={rounds}"])],
        )
        # A stand-in has the columns of what it stands for.
        names = {column.data: column.data for column in table.columns} | ({data: "femnist"} if data else {})
        play(sweep, out, options, only=names)

    return make


def _chosen_seeds(count: int | None, chosen: list[int] | None, *, tiny_of: int | None) -> int | list[int] | None:
    """How many or which; two at most of a tiny table that would have `tiny_of`."""
    if count is not None and chosen:
        raise FedeveError(
            "--seeds is how many, --seed is which; not both",
            got=f"--seeds {count} and --seed {' --seed '.join(map(str, chosen))}",
            do="leave one of them out",
        )
    if chosen:
        return chosen
    return count if tiny_of is None else min(count or tiny_of, 2)


def _split(values: list[str] | None, *, whole: Sequence[str] = ()) -> list[str]:
    """Parts between commas, but names that have a comma themselves as they are."""
    parts = [[value] if value.lower() in whole else value.split(",") for value in values or ()]
    return [part.strip() for several in parts for part in several if part.strip()]


_HELP = {
    "table1": "Table 1: every method on FEMNIST and CIFAR-100, by partition.",
    "table2": "Table 2: every method on MovieLens-1M.",
    "table3": "Table 3: every method on FEMNIST, by partition and local epochs.",
    "gains": "The gain of FedEve by partition and local epochs, in both variants; `paper gain` draws boxes of it.",
    "tuned": "Beyond the paper: small grids of every method that has something to tune.",
    "ablation": "Beyond the paper: FedEve taken apart, one part changed at a time.",
}
for _name, _help in _HELP.items():
    _example = f"Example: fedeve paper {_name} --seeds 1 --budget 25m --out paper/{_name}"
    paper_app.command(_name, help=f"{_help}\n\n{EXIT_CODES}\n\n{_example}")(_command(_name))
