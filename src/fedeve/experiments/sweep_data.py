"""Whether the data is there that a sweep's runs are made of: asked once for all of them, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data.datasets import Dataset
from ..data.files import FileDataset
from ..data.own import Folder
from ..errors import FedeveError, Words
from .sweep import Point


def in_files(points: Sequence[Point]) -> list[FileDataset]:
    """The data sets of these runs that live in public files, each once, however they are dealt to clients."""
    found: dict[tuple[str, str | None, str], FileDataset] = {}
    for point in points:
        dataset = point.plan.dataset
        if isinstance(dataset, FileDataset):
            found.setdefault((dataset.name, dataset.root, dataset.partition), dataset)  # writers have their own files
    return list(found.values())


def refuse_missing(points: Sequence[Point], *, only: Mapping[str, str] | None = None) -> None:
    """Raise one error that names all data sets that are not here.

    `only` is what a command calls the data sets that its option --only can choose; without, it has no such option.
    """
    for point in points:
        _refuse_missing_folder(point.plan.dataset)
    missing: dict[str, FedeveError] = {}
    for dataset in in_files(points):
        if (error := _absence(dataset)) is not None:
            missing.setdefault(dataset.name, error)
    if not missing:
        return
    here = [name for name in dict.fromkeys(point.plan.dataset.name for point in points) if name not in missing]
    if not here and len(missing) == 1:
        raise next(iter(missing.values()))
    it, are = ("it", "is") if len(missing) == 1 else ("them", "are")
    get = " and ".join(f"'fedeve data get {name}'" for name in missing)
    kept = list(dict.fromkeys(only[name] for name in here if name in only)) if only else []
    out = f"leave {it} out with --only {','.join(kept)}" if kept else f"take {it} out of the sweep"
    raise FedeveError(
        f"{' and '.join(missing)} {are} not here",
        got=Words("; ".join(str(error.got) for error in missing.values())),
        do=f"run {get}" + (f", or {out}" if here else ""),
    )


def _absence(dataset: FileDataset) -> FedeveError | None:
    """The error that a data set's files are not here; whatever else is wrong with them is told when a run is made."""
    try:
        dataset.arrays()
    except FedeveError as error:
        return error if error.what == f"{dataset.name} is not here" else None
    return None


def _refuse_missing_folder(dataset: Dataset) -> None:
    if isinstance(dataset, Folder) and dataset.path and not Path(dataset.path).expanduser().is_dir():
        raise FedeveError("the folder of the data is not here", got=dataset.path, do="set data.path to it")
