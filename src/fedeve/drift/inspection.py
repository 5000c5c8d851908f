"""Inspection: the federation a user names, wherever it lies, and its picture in lines and as a figure."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..data import datasets, own, partition
from ..data.federated import FederatedData
from ..errors import FedeveError, Words, unknown
from ..experiments import config as configs
from ..record import RECORD
from ..store import recorded_header
from . import labels
from .labels import Picture
from .style import COLOURS, Drawing

_SHOWN = 60  # clients whose label mix is drawn
_MOST_EXAMPLES = 100_000_000  # in a table of counts, each of which takes some bytes
_DIGITS = 18  # of a count, which no machine has memory for


def table_of(target: str, *, changes: Sequence[str] = (), root: str | None = None) -> dict[str, Any]:
    """The configuration a target stands for: a file of one, a preset, a run's folder, or a data set's name.

    Changes are as for `fedeve run --set`; for a data set's name `alpha=0.1` is short for `data.alpha=0.1`.
    """
    path = Path(target)
    if path.suffix == ".csv":
        do = f"look at it with 'fedeve drift inspect {target}'"
        raise FedeveError("a .csv has labels alone, and nothing to train on", got=target, do=do)
    if (path / RECORD).exists():
        table = recorded_header(path)["config"]
    elif path.suffix in (".toml", ".json") or target.startswith("paper/"):
        table = configs.read(target)
    else:
        known = datasets.all_datasets()
        if target not in known:
            raise unknown("data set", target, [*known, "or a .toml, a .csv, a folder of .npz files"])
        table, changes = {"data": {"name": target}}, [_within_data(change) for change in changes]
    return configs.override(table, [*changes, *([f"data.root={root}"] if root else [])])


def _within_data(change: str) -> str:
    return change if change.startswith(("data.", "model", "local.", "seed=")) else f"data.{change}"


def federation_of(target: str, *, changes: Sequence[str] = (), root: str | None = None) -> FederatedData:
    """The federation a target stands for: also a .csv with columns client and label, or a folder of arrays."""
    path = Path(target)
    if path.suffix == ".csv":
        return read_csv(path)
    if path.is_dir() and not (path / RECORD).exists():
        return own.from_folder(path)
    return configs.check(table_of(target, changes=changes, root=root)).dataset.load()


def read_csv(path: Path) -> FederatedData:
    """A federation of labels alone: a header with `client` and `label`, perhaps `count`, then a line per example."""
    owners: list[str] = []
    names: list[str] = []
    repeats: list[int] = []
    for owner, name, repeat in _lines_of(path):
        owners.append(owner)
        names.append(name)
        repeats.append(repeat)
    total = sum(repeats)
    if not total:
        raise FedeveError(f"{path} holds no examples", got=len(repeats), do="write a line per example")
    if total > _MOST_EXAMPLES:
        do = f"keep the counts below {_MOST_EXAMPLES:,} in all, for example by dividing them all"
        raise FedeveError(f"{path} counts more examples than can be looked at", got=Words(f"{total:,}"), do=do)
    classes, y = np.unique(names, return_inverse=True)
    times = np.array(repeats)
    everybody, who = np.unique(owners, return_inverse=True)  # also those whose counts are all zero
    rows = np.argsort(np.repeat(who, times), kind="stable")
    sizes = np.bincount(who, weights=times, minlength=len(everybody)).astype(np.int64)
    clients: partition.Partition = np.split(rows, np.cumsum(sizes)[:-1])
    labelled = np.repeat(y, times).astype(np.int64)
    return FederatedData.from_arrays(
        np.zeros((len(labelled), 0), np.float32), labelled, clients, num_classes=len(classes), name=path.name
    )


def _lines_of(path: Path) -> Iterator[tuple[str, str, int]]:
    """Client, label and count of every line; the first that is not so is refused with its number."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin with a mark of the encoding
            reader = csv.DictReader(file)
            missing = {"client", "label"} - set(reader.fieldnames or ())
            if missing:
                found = Words(f"columns {', '.join(reader.fieldnames or ()) or 'none'}")
                raise FedeveError(f"{path} lacks {' and '.join(sorted(missing))}", got=found, do="name them in line 1")
            for row in reader:
                where = f"line {reader.line_num} of {path}"
                yield _cell(row, "client", where), _cell(row, "label", where), _count(row.get("count"), where)
    except OSError as error:
        raise FedeveError("cannot read this file", got=Words(f"{path}: {error.strerror}"), do="check it") from error
    except UnicodeDecodeError as error:
        found = Words(f"the byte {error.object[error.start]:#04x}")
        raise FedeveError(f"{path} is not text in UTF-8", got=found, do="save it as UTF-8") from error
    except csv.Error as error:
        raise FedeveError(f"{path} is not a table", got=Words(str(error)), do="save it as CSV") from error


def _cell(row: dict[str | None, Any], column: str, where: str) -> str:
    text = row[column]
    if None in row:
        do = "put what has a comma in it into quotes"
        raise FedeveError(f"{where} has more cells than line 1", got=Words(",".join(row[None])), do=do)
    if text is None or not text.strip():
        raise FedeveError(f"{where} has no {column}", got=text, do="write client and label into every line")
    return str(text)


def _count(text: str | None, where: str) -> int:
    if text is None or text == "":
        return 1
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise FedeveError(f"the count in {where} is not a number of examples", got=text, do="write 0, 1, 2, ...")
    return int(text)


def lines(picture: Picture) -> list[str]:
    """The picture in words."""
    sizes, classes = picture.sizes, picture.classes
    empty = f", {picture.num_empty:,} of them without data" if picture.num_empty else ""
    now = next(step for step in picture.law if step["cohort"] == picture.cohort)
    head = [
        f"{picture.name}: {picture.num_clients:,} clients{empty}; {picture.num_examples:,} examples of "
        f"{picture.num_classes} classes",
        f"examples a client   {_five(sizes)}",
        f"classes a client    {_five(classes)}; {100 * classes['one']:.0f} % have one class only",
        f"heterogeneity H     {picture.heterogeneity:.4g}"
        f" ({picture.by_chance:.4g} if examples were dealt at random to clients of these sizes)",
        "",
        "  cohort   expected D_S   a class's share is typically off by",
    ]
    law = [
        f"{step['cohort']:>8,}   {step['distance']:>12.3g}   {100 * step['typical']:>6.2f} points"
        for step in picture.law
    ]
    if picture.heterogeneity == 0:
        said = "All clients have the same label mix: no cohort differs from the population."
    elif now["distance"] == 0:
        said = "Everybody takes part in every round: there is no period drift."
    else:
        said = (
            f"With {picture.cohort:,} clients a round, a class's share in a cohort is typically off by "
            f"{100 * now['typical']:.2f} points; {picture.halving:,} clients a round would halve D_S."
        )
    pooled = picture.pooled
    by_size = (
        f"Weighted by examples, as FedAvg averages, D_S is {pooled['distance']:.3g} ± {pooled['error']:.1g} "
        f"({pooled['num_cohorts']:,.0f} cohorts drawn)."
    )
    return [*head, *law, "", said, by_size]


def _five(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {values[name]:,.6g}" for name in ("min", "lower", "median", "upper", "max"))


def drawing(data: FederatedData, picture: Picture, *, seed: int = 0) -> Drawing:
    """Client sizes, the label mix of some clients, and the expected distance by cohort size, side by side."""
    rng = np.random.default_rng(seed)
    some = rng.choice(data.with_data, size=min(_SHOWN, len(data.with_data)), replace=False)
    mix = labels.counts(data, some) / data.sizes[some][:, None]
    order = np.lexsort((-mix.max(1), mix.argmax(1)))
    some, mix = some[order], mix[order]
    rows: list[list[Any]] = [["size", int(k), "", int(n)] for k, n in enumerate(data.sizes.tolist())]
    rows += [
        ["share", int(k), label, float(share)]
        for k, line in zip(some, mix, strict=True)
        for label, share in enumerate(line)
        if share
    ]
    rows += [["expected distance", "", int(step["cohort"]), step["distance"]] for step in picture.law]
    return Drawing(
        name="inspect",
        title=f"The federation {picture.name}",
        caption=f"{picture.num_clients:,} clients, {picture.num_empty:,} without data; {picture.num_examples:,} "
        f"examples of {picture.num_classes} classes. Left: examples a client. Middle: label mix of {len(some)} "
        "clients, a row each, sorted by their largest class. Right: expected squared distance of a cohort's "
        "label mix from the population's.",
        reading="Rows with one dark square are clients of one class, and the line on the right says how far from the "
        f"population a cohort has to be expected. What {picture.cohort:,} clients a round have of it, "
        f"{picture.halving:,} would halve.",
        width=9.0,
        height=3.2,
        draw=lambda figure: _draw(figure, data, mix, picture),
        columns=["quantity", "client", "class_or_cohort", "value"],
        rows=rows,
    )


def _draw(figure: Figure, data: FederatedData, mix: Any, picture: Picture) -> None:
    sizes, heat, law = figure.subplots(1, 3)
    present = data.sizes[data.with_data]
    bins = np.unique(np.geomspace(1, present.max() + 1, 25).round())
    sizes.hist(present, bins=bins if len(bins) > 1 else 1, color=COLOURS[0])
    sizes.set(xscale="log", xlabel="examples", ylabel="clients", title="client sizes")
    image = heat.imshow(mix, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    heat.set(xlabel="class", ylabel="client", title="label mix", yticks=[])
    heat.grid(visible=False)
    figure.colorbar(image, ax=heat, label="share")
    steps = [step for step in picture.law if step["distance"] > 0]
    if steps:
        law.plot([s["cohort"] for s in steps], [s["distance"] for s in steps], "o-", color=COLOURS[1], markersize=3)
        law.set(xscale="log", yscale="log")
    law.set(xlabel="cohort size", title="expected distance D_S")
