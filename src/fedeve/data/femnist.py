"""FEMNIST: characters by 3,400 writers, from TensorFlow Federated's HDF5 or from LEAF's JSON.

Both store paper as 1 and a full stroke as 0; here an image is ink, bytes from 0 (paper) to 255. Rows are sorted by
writer, so the same content gives the same arrays from either format.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import FedeveError, Words
from ..seeds import Indices
from ..settings import setting
from .cache import Builder, cached, source_error
from .datasets import Arrays
from .files import FileDataset, Remote, data_root

Images = NDArray[np.uint8]

SIDE = 28
NUM_CLASSES, NUM_DIGITS = 62, 10  # digits, then capitals, then small letters
ROWS = 4096  # images in memory at once
TEST_EVERY = 10  # of LEAF's unsplit files every tenth image of a writer is for testing

TRAIN, TEST, ARCHIVE = "fed_emnist_train.h5", "fed_emnist_test.h5", "fed_emnist.tar.bz2"


class _Found(NamedTuple):
    """Which files were found: HDF5, the archive of both, or JSON, which may not be split into train and test."""

    kind: str
    train: list[Path]
    test: list[Path]


@dataclass(frozen=True, kw_only=True)
class Femnist(FileDataset):
    """62 classes of handwritten characters, 28x28, by 3,400 writers: 671,585 to train and 77,483 to test."""

    only_digits: bool = setting(False, help="keep the ten digits only; writers without digits are left out")

    source: ClassVar[str] = "fed_emnist of TensorFlow Federated (.h5 or .tar.bz2), or LEAF's JSON"
    homepage: ClassVar[str] = "https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/emnist"
    licence: ClassVar[str] = "from NIST Special Database 19, https://www.nist.gov/open/license"
    citation: ClassVar[str] = "Caldas et al., LEAF, 2018; Cohen et al., EMNIST, 2017"
    # Address and checksum as in TensorFlow Federated's simulation/datasets/emnist/load_data.py (2019).
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            name=ARCHIVE,
            url=f"https://storage.googleapis.com/tff-datasets-public/{ARCHIVE}",
            sha256="fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
        ),
    )

    def arrays(self) -> Arrays:
        """Ink as bytes [n, 28, 28], labels and writers [n], and the test set; a writer without images is left out."""
        found, digits = self._found(), self.only_digits
        cache = cached(
            "femnist",
            [*found.train, *found.test],
            lambda builder: _convert(builder, found, only_digits=digits),
            options={"only_digits": digits},
        )
        stored, mean, deviation = cache.arrays, cache.notes["mean"], cache.notes["std"]
        return Arrays(
            stored["x"],
            stored["y"],
            stored["writers"],
            stored["x_test"],
            stored["y_test"],
            NUM_DIGITS if digits else NUM_CLASSES,
            shift=mean,
            scale=1 / deviation,
            # The checksum is of all files in a row; the count tells where training ends.
            source=f"{cache.checksum} {len(stored['y'])} only_digits={digits}",
        )

    def _found(self) -> _Found:
        if train := self._look(TRAIN):
            return _Found("tff", [train], [self.find(TEST)])
        if archive := self._look(ARCHIVE):
            return _Found("archive", [archive], [])
        root = data_root(self.root)
        for place in (root, root / "data", self.folder, self.folder / "data"):
            train_files, test_files = _json_in(place / "train"), _json_in(place / "test")
            if train_files and test_files:
                return _Found("leaf", train_files, test_files)
            if whole := _json_in(place / "all_data"):
                return _Found("leaf", whole, [])
        self.find(TRAIN, ARCHIVE, "train/*.json and test/*.json", "all_data/*.json")
        raise AssertionError("find raises, since none of these is there")

    def _look(self, name: str) -> Path | None:
        try:
            return self.find(name)
        except FedeveError:
            return None


class _Part(Protocol):
    """A part of the data: the labels [n] of every writer, and images to be had some rows at a time."""

    @property
    def labels(self) -> dict[str, Indices]: ...

    def ink(self, writer: str, start: int, stop: int) -> Images: ...


Keep = Callable[[Indices], NDArray[np.bool_]]


def _convert(builder: Builder, found: _Found, *, only_digits: bool) -> None:
    """Fill the cache: x, y, writers and the same of the test set, the writers' names, the ink's mean and deviation."""

    def wanted(labels: Indices) -> NDArray[np.bool_]:
        return labels < (NUM_DIGITS if only_digits else NUM_CLASSES)

    def tested(labels: Indices) -> NDArray[np.bool_]:
        return np.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1

    spare = builder.folder / "spare"
    spare.mkdir()
    with ExitStack() as stack:
        train: _Part
        test: _Part
        if found.kind == "leaf":
            train = _Leaf(found.train, spare / "train.bin")
            test = _Leaf(found.test, spare / "test.bin") if found.test else train
        else:
            archive = found.train[0] if found.kind == "archive" else None
            files = _unpack(archive, spare) if archive else (found.train[0], found.test[0])
            train, test = (stack.enter_context(_tff(path, shown=archive or path)) for path in files)
        if train is test:
            names, counts = _write(builder, train, keep=lambda labels: wanted(labels) & ~tested(labels))
            _write(builder, test, suffix="_test", keep=lambda labels: wanted(labels) & tested(labels))
        else:
            names, counts = _write(builder, train, keep=wanted)
            _write(builder, test, suffix="_test", keep=wanted)
    if not names:
        raise source_error(found.train[0], "holds no images to train on", Words("none"))
    levels = np.arange(256)
    mean = float(counts @ levels / counts.sum())
    spread = float(np.sqrt(counts @ (levels - mean) ** 2 / counts.sum()))
    builder.notes.update(writers=names, mean=mean, std=spread or 1.0)  # blank paper has no spread to divide by
    shutil.rmtree(spare)


def _write(builder: Builder, part: _Part, *, keep: Keep, suffix: str = "") -> tuple[list[str], NDArray[np.int64]]:
    """Write the kept rows in order of the writers' names; the names, and how often each level of ink [256] occurs."""
    kept = {name: np.flatnonzero(keep(labels)) for name, labels in sorted(part.labels.items())}
    kept = {name: rows for name, rows in kept.items() if len(rows)}
    sizes = [len(rows) for rows in kept.values()]
    labels = [part.labels[name][rows] for name, rows in kept.items()]
    builder.put(f"y{suffix}", np.concatenate([np.empty(0, np.int64), *labels]))
    builder.put(f"writers{suffix}", np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    x = builder.create(f"x{suffix}", (sum(sizes), SIDE, SIDE), np.uint8)
    counts, row = np.zeros(256, np.int64), 0
    for name, rows in kept.items():
        for start in range(0, len(part.labels[name]), ROWS):
            mine = rows[(rows >= start) & (rows < start + ROWS)] - start
            images = part.ink(name, start, start + ROWS)[mine]
            x[row : row + len(images)] = images
            counts += np.bincount(images.reshape(-1), minlength=256)
            row += len(images)
    return list(kept), counts


class _Tff:
    """One of TensorFlow Federated's files, open: `examples/<writer>/pixels` [n, 28, 28] and `label` [n]."""

    def __init__(self, file: Any, *, shown: Path) -> None:
        self._shown = shown
        if "examples" not in file:
            raise source_error(shown, "has no group 'examples'", sorted(file))
        self._examples = file["examples"]
        self.labels = {name: self._labels(name) for name in self._examples}

    def _labels(self, writer: str) -> Indices:
        try:
            pixels, label = self._examples[writer]["pixels"], self._examples[writer]["label"]
        except (KeyError, TypeError, ValueError) as error:
            raise source_error(self._shown, f"lacks pixels or label of {writer}", Words(error)) from error
        if pixels.shape[1:] != (SIDE, SIDE):
            raise source_error(self._shown, f"has images that are not 28x28 of {writer}", pixels.shape)
        if len(pixels) != len(label):
            found = Words(f"{len(pixels)} images and {len(label)} labels")
            raise source_error(self._shown, f"has other numbers of images and labels of {writer}", found)
        return _labels(label[()], path=self._shown, writer=writer)

    def ink(self, writer: str, start: int, stop: int) -> Images:
        with _reading(self._shown):
            return _ink(self._examples[writer]["pixels"][start:stop], path=self._shown, writer=writer)


@contextmanager
def _tff(path: Path, *, shown: Path) -> Iterator[_Tff]:
    try:
        import h5py
    except ImportError:
        raise FedeveError(
            "femnist's .h5 files need h5py", got=Words("no h5py"), do="pip install 'fedeve[data]'"
        ) from None
    with _reading(shown):
        file = h5py.File(path, "r")
    with file:
        with _reading(shown):
            part = _Tff(file, shown=shown)
        yield part


@dataclass
class _Leaf:
    """LEAF's JSON files of one part, read one at a time; their images wait in the spare file for their turn."""

    paths: Sequence[Path]
    spare: Path
    labels: dict[str, Indices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._first: dict[str, int] = {}
        rows = 0
        with self.spare.open("wb") as spare:
            for path in self.paths:
                for writer, (images, labels) in _leaf_file(path).items():
                    if writer in self.labels:
                        raise source_error(path, "names a writer of another file again", writer)
                    spare.write(images.tobytes())
                    self.labels[writer], self._first[writer] = labels, rows
                    rows += len(labels)

    def ink(self, writer: str, start: int, stop: int) -> Images:
        first, count = self._first[writer] + start, min(stop, len(self.labels[writer])) - start
        flat = np.fromfile(self.spare, np.uint8, count * SIDE * SIDE, offset=first * SIDE * SIDE)
        return flat.reshape(-1, SIDE, SIDE)


def _leaf_file(path: Path) -> dict[str, tuple[Images, Indices]]:
    """Every writer's ink [n, 28, 28] and labels [n] in one file."""

    def shrink(table: dict[str, Any]) -> Any:
        # Called for every object as it closes: a writer's numbers become bytes before the next one is read.
        if not ("x" in table and "y" in table):
            return table
        values = np.asarray(table["x"], dtype=np.float64).reshape(len(table["x"]), SIDE * SIDE)
        return _ink(values, path=path, writer="a writer"), _labels(table["y"], path=path, writer="a writer")

    with _reading(path):
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=shrink)
        users, sizes, data = (content[key] for key in ("users", "num_samples", "user_data"))
        if sorted(users) != sorted(data):
            raise source_error(path, "lists other users than it has data of", Words(f"{len(users)} and {len(data)}"))
        for writer, size in zip(users, sizes, strict=True):
            if not isinstance(data[writer], tuple):
                raise source_error(path, f"lacks x or y of {writer}", sorted(data[writer]))
            images, labels = data[writer]
            if not len(images) == len(labels) == size:
                found = Words(f"{len(images)} images, {len(labels)} labels, num_samples {size}")
                raise source_error(path, f"has other numbers of images, labels and samples of {writer}", found)
    return dict(data)


def _unpack(archive: Path, folder: Path) -> tuple[Path, Path]:
    """The archive's two .h5 files, written into the folder under our own names whatever the archive calls them."""
    with ExitStack() as stack:
        with _reading(archive):
            tar = stack.enter_context(tarfile.open(archive, "r|bz2"))
        while True:
            with _reading(archive):
                member = tar.next()
            if member is None:
                break
            name = PurePosixPath(member.name).name
            if name in (TRAIN, TEST) and member.isfile():
                _copy_member(tar, member, folder / name, archive=archive)
    for name in (TRAIN, TEST):
        if not (folder / name).exists():
            raise source_error(archive, f"does not hold {name}", Words("an archive without it"))
    return folder / TRAIN, folder / TEST


def _copy_member(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path, *, archive: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None  # it is a plain file
    with place.open("wb") as file:
        while True:
            with _reading(archive):  # reading may fail for the archive's sake, writing for the disk's
                block = content.read(1 << 20)
            if not block:
                return
            file.write(block)


def _ink(values: NDArray[Any], *, path: Path, writer: str) -> Images:
    """Stored values, 1 for paper and 0 for ink, as bytes [n, 28, 28] of ink."""
    if values.size and not (values.min() >= 0 and values.max() <= 1):  # not a number is neither
        found = Words(f"{values.min()} to {values.max()}")
        raise source_error(path, f"has pixels outside 0 to 1 of {writer}", found)
    return np.rint(255 * (1 - values)).astype(np.uint8).reshape(-1, SIDE, SIDE)


def _labels(values: Any, *, path: Path, writer: str) -> Indices:
    labels = np.asarray(values)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.size and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        found = Words(f"{labels.dtype} of shape {labels.shape}")
        raise source_error(path, f"has labels that are no class numbers of {writer}", found)
    outside = labels[(labels < 0) | (labels >= NUM_CLASSES)]
    if len(outside):
        raise source_error(path, f"has a label outside 0 to {NUM_CLASSES - 1} of {writer}", int(outside[0]))
    return labels.astype(np.int64)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a source is read is the source's fault, not the cache's."""
    try:
        yield
    except FedeveError:
        raise
    except (OSError, EOFError, KeyError, ValueError, TypeError, RuntimeError, tarfile.TarError) as error:
        raise source_error(path, "cannot be read", Words(f"{type(error).__name__}: {error}")) from error


def _json_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))
