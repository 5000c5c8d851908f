"""Your own data: a folder of arrays, a torch data set with client ids, Hugging Face data sets, Flower's partitioners.

All end in `FederatedData.from_arrays`. Images that are bytes stay bytes. Nothing is downloaded, nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import operator
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FedeveError, Words, unknown
from ..seeds import Indices
from ..settings import setting
from . import partition as ways
from .datasets import Arrays, Dataset
from .federated import FederatedData

_SAVE = "write it with np.savez(path, x=inputs, y=labels)"
_MOST_CLASSES = 1_000_000  # every class takes memory, whether there is an example of it or not
_ROWS = 65_536  # that are looked at in one piece


class Part(NamedTuple):
    """Examples that belong together, and how to call them in an error."""

    name: str
    x: NDArray[Any]
    y: NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Folder(Dataset):
    """Your own arrays: a folder of one .npz (x, y) or one pair NAME_x.npy, NAME_y.npy per client, and test.npz."""

    path: str = setting("", help="the folder")
    partition: str = setting("natural", help="a file is a client", choices=("natural",))

    source: ClassVar[str] = "your own files"

    def arrays(self) -> Arrays:
        data = self.load()
        owners = np.repeat(np.arange(data.num_clients), data.sizes)
        return Arrays(data.x, data.y, owners, data.x_test, data.y_test, data.num_classes, data.shift, data.scale)

    def load(self) -> FederatedData:
        """A client per file; also those without examples, which owners of rows could not tell of."""
        if not self.path:
            raise FedeveError("the data set folder needs a folder", got=self.path, do="set data.path to it")
        if self.num_clients is not None:
            raise FedeveError("natural clients cannot be counted", got=self.num_clients, do="leave num_clients out")
        return from_folder(self.path, name=self.name, options=dataclasses.asdict(self))


def from_folder(path: str | Path, **options: Any) -> FederatedData:
    """A client for every NAME.npz with x [n, ...] and y [n], or NAME_x.npy and NAME_y.npy, in the order of the names.

    `test.npz` or `test_x.npy` and `test_y.npy` are the test set. `options` are those of `FederatedData.from_arrays`.
    """
    folder = Path(path).expanduser()
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    except OSError as error:
        reason = Words(f"{folder}: {error.strerror}")
        raise FedeveError("this folder cannot be read", got=reason, do="give a folder of .npz files") from error
    found: dict[str, Part] = {}
    for name in names:
        if name.endswith("_y.npy") and f"{name[:-6]}_x.npy" in names:
            continue
        if not name.endswith((".npz", ".npy")):
            continue
        part = _pair(folder, name, names) if name.endswith(".npy") else _archive(folder / name)
        who = name.removesuffix(".npz").removesuffix("_x.npy")
        if who in found:
            raise FedeveError(f"{folder} holds a client twice", got=who, do="keep its .npz or its pair of .npy files")
        found[who] = part
    test = found.pop("test", None)
    if not found:
        raise FedeveError("there are no clients in this folder", got=str(folder), do="put one .npz per client into it")
    return _federation([found[who] for who in sorted(found)], test, options)


def from_dataset(
    dataset: Any, clients: Sequence[Any] | None = None, *, test: Any = None, **options: Any
) -> FederatedData:
    """A `torch.utils.data.Dataset` of items (x, y) with the client id of every item, or of items (x, y, client).

    Clients are in the sorted order of their ids. `test` is a data set of items (x, y). Pictures become [C, H, W] or
    [H, W] bytes; `options` are those of `FederatedData.from_arrays`.
    """
    part, owners = _items("dataset", dataset, with_clients=clients is None)
    if clients is not None:
        owners = list(clients)
    if len(owners) != len(part.y):
        raise FedeveError(
            "every item needs one client id",
            got=Words(f"{len(part.y)} items and {len(owners)} ids"),
            do="give a sequence as long as the data set",
        )
    return _dealt(part, owners, None if test is None else _items("test", test)[0], options)


def from_huggingface(
    data: Any, *, input: str, label: str, client: str | None = None, test: Any = None, **options: Any
) -> FederatedData:
    """Hugging Face's `datasets.Dataset` with a column of client ids, or what Flower's `flwr_datasets` made of one.

    `data` is a Dataset (then `client` names the column of ids), a list of Datasets, one per client, or a
    FederatedDataset or Partitioner of Flower's. `input` and `label` name columns; `test` is a Dataset with them.
    Image columns become [C, H, W] or [H, W] bytes; `options` are those of `FederatedData.from_arrays`.
    """
    parts = _partitions(data)
    first = data if parts is None else parts[0]
    classes = getattr(getattr(first, "features", {}).get(label), "num_classes", None)
    options = {"num_classes": classes, **options}
    last = None if test is None else _columns("test", test, input, label)
    if parts is None:
        if client is None:
            raise FedeveError("a Dataset does not say who its clients are", got=data, do="name the column: client=...")
        return _dealt(_columns("data", data, input, label), _column(data, client), last, options)
    if client is not None:
        raise FedeveError("these are partitions already", got=client, do="leave client out")
    return _federation(
        [_columns(f"partition {number}", part, input, label) for number, part in enumerate(parts)], last, options
    )


def _federation(parts: list[Part], test: Part | None, options: Mapping[str, Any]) -> FederatedData:
    """A client per part, also for those without examples."""
    for part in (*parts, *([test] if test else [])):
        _check_part(part)
    full = [part for part in parts if len(part.y)]
    if not full:
        raise FedeveError("no client has data", got=Words(f"{len(parts)} clients without examples"), do="add examples")
    for part in (*full, *([test] if test and len(test.y) else [])):
        if (part.x.shape[1:], part.x.dtype) != (full[0].x.shape[1:], full[0].x.dtype):
            kinds = " and ".join(f"{p.x.dtype} {list(p.x.shape[1:])} in {p.name}" for p in (full[0], part))
            raise FedeveError(
                "clients have different kinds of inputs", got=Words(kinds), do="give all one shape and type"
            )
    x, y = np.concatenate([part.x for part in full]), np.concatenate([part.y for part in full])
    ends = np.cumsum([len(part.y) for part in parts])
    tests: dict[str, Any] = {"x_test": test.x, "y_test": test.y} if test and len(test.y) else {}
    return FederatedData.from_arrays(x, y, np.split(np.arange(len(y)), ends[:-1]), **tests, **options)


def _dealt(
    part: Part, owners: Sequence[Any] | NDArray[Any], test: Part | None, options: Mapping[str, Any]
) -> FederatedData:
    """Examples of one part dealt by their owners' ids."""
    ids = np.asarray(owners)
    if ids.dtype.hasobject or ids.ndim != 1:
        raise FedeveError(
            "client ids must be plain", got=Words(f"{ids.dtype} {list(ids.shape)}"), do="use numbers or texts"
        )
    rows = ways.natural(ids)
    return _federation([Part(part.name, part.x[mine], part.y[mine]) for mine in rows], test, options)


def _check_part(part: Part) -> None:
    if len(part.x) != len(part.y):
        raise FedeveError(
            f"x and y of {part.name} have different lengths",
            got=Words(f"{len(part.x)} inputs and {len(part.y)} labels"),
            do="give one label per input",
        )
    if len(part.y) and (part.y.ndim != 1 or not np.issubdtype(part.y.dtype, np.integer)):
        raise FedeveError(
            f"y of {part.name} must hold class numbers",
            got=Words(f"{part.y.dtype} {list(part.y.shape)}"),
            do="give one whole number per example, counting from 0",
        )
    if len(part.y) and int(part.y.max()) >= _MOST_CLASSES:
        raise FedeveError(
            f"y of {part.name} must count its classes from 0",
            got=Words(f"the label {part.y.max()}"),
            do="number the labels of all clients anew: np.unique(labels, return_inverse=True)[1]",
        )
    if part.x.dtype.kind not in "buif":
        raise FedeveError(
            f"x of {part.name} must hold numbers",
            got=Words(str(part.x.dtype)),
            do="give bytes or floats, all rows of one shape",
        )
    _refuse_not_finite(part)


def _refuse_not_finite(part: Part) -> None:
    """A NaN makes every update of its client NaN, which is then left out, round after round."""
    if part.x.dtype.kind != "f":
        return
    for first in range(0, len(part.x), _ROWS):
        some = part.x[first : first + _ROWS]
        if not (whole := np.isfinite(some)).all():
            row = int(np.flatnonzero(~whole.reshape(len(some), -1).all(1))[0])
            bad = some[row][~whole[row]].flat[0]
            do = "mend or leave out that row, counting from 0"
            raise FedeveError(f"x of {part.name} is not finite in row {first + row}", got=Words(str(bad)), do=do)


def _load(path: Path) -> Any:
    """An array, or the members of an archive by name, of which only x and y are read."""
    try:
        with path.open("rb") as file:  # numpy leaves it open where the archive is damaged
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                return loaded
            return {name: loaded[name] if name in ("x", "y") else None for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FedeveError(f"{path} holds no plain arrays", got=Words(str(error)), do=_SAVE) from error


def _archive(path: Path) -> Part:
    members = _load(path)
    if not isinstance(members, dict):
        raise FedeveError(f"{path} is no .npz file", got=Words("a single array"), do=_SAVE)
    if missing := sorted({"x", "y"} - set(members)):
        raise FedeveError(f"{path} lacks {' and '.join(missing)}", got=sorted(members), do=_SAVE)
    return _part(path, members["x"], members["y"])


def _pair(folder: Path, name: str, names: list[str]) -> Part:
    other = f"{name[:-6]}_y.npy"
    if not name.endswith("_x.npy") or other not in names:
        raise FedeveError(f"{folder / name} is half of a pair", got=name, do="put NAME_x.npy and NAME_y.npy there")
    return _part(folder / name, _load(folder / name), _load(folder / other))


def _part(path: Path, x: Any, y: Any) -> Part:
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.ndim and y.ndim):
        raise FedeveError(f"{path} must hold rows", got=Words("a single number or no array"), do=_SAVE)
    return Part(path.name, x, y)


def _items(name: str, dataset: Any, *, with_clients: bool = False) -> tuple[Part, list[Any]]:
    """The items of a data set with `len` and numbered items, and the third of each if it is a client id."""
    try:
        count = len(dataset)
    except TypeError:
        found = Words(type(dataset).__name__)
        raise FedeveError(f"{name} must have a length", got=found, do="give a map-style data set or a list") from None
    x: NDArray[Any] = np.empty((0,))
    y: Indices = np.empty(count, dtype=np.int64)
    owners = []
    for number in range(count):
        item = dataset[number]
        if not isinstance(item, (tuple, list)) or len(item) not in ((3,) if with_clients else (2, 3)):
            form = "(x, y, client)" if with_clients else "(x, y)"
            raise FedeveError(f"item {number} of {name} is not {form}", got=item, do="give such items, or client ids")
        value = _array(item[0])
        if number == 0:
            x = np.empty((count, *value.shape), dtype=value.dtype)
        if (value.shape, value.dtype) != (x.shape[1:], x.dtype):
            kinds = f"{x.dtype} {list(x.shape[1:])} and, in item {number}, {value.dtype} {list(value.shape)}"
            raise FedeveError(
                f"{name} has different kinds of inputs", got=Words(kinds), do="give all one shape and type"
            )
        x[number], y[number] = value, _class_number(name, number, item[1])
        owners.append(_plain(item[2]) if with_clients else None)
    return Part(name, x, y), owners


def _class_number(name: str, number: int, value: Any) -> int:
    try:
        return operator.index(_plain(value))
    except TypeError:
        do = "give whole numbers, counting from 0"
        raise FedeveError(f"the label of item {number} of {name} is no class number", got=value, do=do) from None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _array(value: Any) -> NDArray[Any]:
    if not hasattr(value, "getbands"):
        return np.asarray(value)
    # A picture: a palette is no brightness, and channels come first in models.
    pixels = np.asarray(value.convert({"1": "L", "P": "RGB"}.get(value.mode, value.mode)))
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels


def _partitions(data: Any) -> list[Any] | None:
    """The clients' data sets, or None if `data` is a single one."""
    if isinstance(data, Mapping):
        do = 'give one of them, and e.g. test=data["test"]'
        raise FedeveError("these are several splits", got=sorted(map(str, data)), do=do)
    if hasattr(data, "partitioners"):
        partitioners = data.partitioners
        if len(partitioners) > 1 and "train" not in partitioners:
            do = 'give one of them: data.partitioners["..."]'
            raise FedeveError("these are several partitioners", got=sorted(partitioners), do=do)
        data = partitioners["train"] if "train" in partitioners else next(iter(partitioners.values()))
    if hasattr(data, "load_partition") and hasattr(data, "num_partitions"):
        parts = [data.load_partition(number) for number in range(data.num_partitions)]
    elif isinstance(data, (list, tuple)):
        parts = list(data)
    elif _is_table(data):
        return None
    else:
        parts = [data]
    if not parts:
        raise FedeveError("a federation needs clients", got=Words("no partitions"), do="give one data set per client")
    for part in parts:
        if not _is_table(part):
            do = "give a datasets.Dataset (not streamed), a list of them, or what Flower's flwr_datasets made of one"
            raise FedeveError("this is no Hugging Face data set", got=Words(type(part).__name__), do=do)
    return parts


def _is_table(data: Any) -> bool:
    return all(hasattr(data, name) for name in ("column_names", "features", "with_format", "__len__"))


def _columns(name: str, dataset: Any, input: str, label: str) -> Part:
    return Part(name, _column(dataset, input), _column(dataset, label))


def _column(dataset: Any, name: str) -> NDArray[Any]:
    """One column as an array in the type it is stored in."""
    if name not in dataset.column_names:
        raise unknown("column", name, dataset.column_names)
    feature = dataset.features[name]
    if type(feature).__name__ == "Image":
        plain = dataset.select_columns([name]).with_format(None)
        pictures = [_array(row[name]) for row in plain]
        if len({(picture.shape, picture.dtype) for picture in pictures}) > 1:
            shapes = sorted({str(picture.shape) for picture in pictures})
            raise FedeveError(f"column {name} has pictures of different shapes", got=shapes, do="resize them first")
        return np.stack(pictures) if pictures else np.empty(0, np.uint8)
    while not hasattr(feature, "dtype") or feature.dtype == "list":
        feature = getattr(feature, "feature", None) or feature[0]
    kind = np.dtype(feature.dtype) if feature.dtype in np.sctypeDict else None
    rows = dataset.select_columns([name]).with_format("numpy", **({"dtype": kind} if kind else {}))[:][name]
    return np.asarray(rows)
