"""MNIST from its idx files, with the writer of every image from QMNIST's label files: a natural partition."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import Words
from ..seeds import Indices
from .cache import Builder, Cache, cached, source_error
from .datasets import Arrays
from .files import FileDataset, Remote

SIDE, NUM_CLASSES = 28, 10
CLASS, WRITER, COLUMNS = 0, 2, 8  # of QMNIST's labels

IMAGES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
LABELS = ("train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte")
WRITERS = ("qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"


@dataclass(frozen=True, kw_only=True)
class Mnist(FileDataset):
    """70,000 real handwritten digits, 28x28; with QMNIST's label files also by writer: 539 of them in training."""

    source: ClassVar[str] = "MNIST's idx files; QMNIST's label files for the natural partition"
    homepage: ClassVar[str] = "http://yann.lecun.com/exdb/mnist and https://github.com/facebookresearch/qmnist"
    licence: ClassVar[str] = "CC BY-SA 3.0 (as Keras states it); QMNIST's labels: BSD"
    citation: ClassVar[str] = "LeCun et al., MNIST, 1998; Yadav & Bottou, Cold Case: The Lost MNIST Digits, 2019"
    # Addresses and md5 as in torchvision's datasets/mnist.py.
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            name=f"{IMAGES[0]}.gz",
            url=f"{MIRROR}{IMAGES[0]}.gz",
            size=9_912_422,
            sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            md5="f68b3c2dcbeaaa9fbdd348bbdeb94873",
            content_md5="6bbc9ace898e44ae57da46a324031adb",
        ),
        Remote(
            name=f"{LABELS[0]}.gz",
            url=f"{MIRROR}{LABELS[0]}.gz",
            size=28_881,
            sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            md5="d53e105ee54ea40749a09fcbcd1e9432",
            content_md5="a25bea736e30d166cdddb491f175f624",
        ),
        Remote(
            name=f"{IMAGES[1]}.gz",
            url=f"{MIRROR}{IMAGES[1]}.gz",
            size=1_648_877,
            sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            md5="9fb629c4189551a2d022fa330f9573f3",
            content_md5="2646ac647ad5339dbf082846283269ea",
        ),
        Remote(
            name=f"{LABELS[1]}.gz",
            url=f"{MIRROR}{LABELS[1]}.gz",
            size=4_542,
            sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            md5="ec29112dd5afa0611ce80d1b7f02629c",
            content_md5="27ae3e4e09519cfbb04c329615203637",
        ),
        Remote(
            name=f"{WRITERS[0]}.gz",
            url=f"{QMNIST}{WRITERS[0]}.gz",
            size=463_024,
            sha256="2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
            md5="0058f8dd561b90ffdd0f734c6a30e5e4",
        ),
        Remote(
            name=f"{WRITERS[1]}.gz",
            url=f"{QMNIST}{WRITERS[1]}.gz",
            size=526_800,
            sha256="9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
            md5="5b5b05890a5e13444e108efe57b788aa",
        ),
    )

    def arrays(self) -> Arrays:
        """Images as bytes [n, 28, 28], labels [n], the writer of each [n] if clients are natural, and the test set."""
        images, labels = [self._file(name) for name in IMAGES], [self._file(name) for name in LABELS]
        cache = cached("mnist", [*images, *labels], lambda builder: _convert(builder, images, labels))
        stored, owners, source = cache.arrays, None, cache.checksum
        if self.partition == "natural":
            writers = self._writers()
            owners, source = writers.arrays["train"], f"{source} {writers.checksum}"
        return Arrays(
            stored["x"],
            stored["y"],
            owners,
            stored["x_test"],
            stored["y_test"],
            NUM_CLASSES,
            shift=cache.notes["mean"],
            scale=1 / cache.notes["std"],
            source=source,
        )

    def writers(self) -> tuple[Indices, Indices]:
        """NIST's number of the writer of every training [n] and every test image [m]."""
        stored = self._writers().arrays
        return stored["train"], stored["test"]

    def _writers(self) -> Cache:
        files, labels = [self._file(name) for name in WRITERS], [self._file(name) for name in LABELS]
        return cached("mnist-writers", [*files, *labels], lambda builder: _convert_writers(builder, files, labels))

    def _file(self, name: str) -> Path:
        # torchvision keeps them in a folder of its own.
        theirs = f"{'QMNIST' if name in WRITERS else 'MNIST'}/raw/{name}"
        return self.find(f"{name}.gz", name, theirs, f"{theirs}.gz")


def read_idx(path: Path, *, magic: int, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """An idx file, gzipped or not, that must have this magic number and shape; None stands for any length."""
    content = _bytes(path)
    words = min(1 + len(shape), len(content) // 4)
    header = np.frombuffer(content, dtype=">u4", count=words).tolist() if words else []
    if header[:1] != [magic]:
        raise source_error(path, f"does not begin with the magic number {magic}", header[:1] or Words("nothing"))
    dims, wanted = header[1:], ["any" if size is None else size for size in shape]
    if len(dims) != len(shape) or any(size not in (None, got) for size, got in zip(shape, dims, strict=True)):
        raise source_error(path, f"does not hold an array of shape {wanted}", dims)
    expected = 4 * len(header) + math.prod(dims) * np.dtype(dtype).itemsize
    if len(content) != expected:
        raise source_error(path, f"does not have the {expected} bytes that its header says", len(content))
    return np.frombuffer(content, dtype=dtype, offset=4 * len(header)).reshape(dims)


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise source_error(path, "cannot be read", Words(f"{type(error).__name__}: {error}")) from error


def _read_labels(path: Path) -> NDArray[np.uint8]:
    labels = read_idx(path, magic=0x801, dtype="u1", shape=(None,))
    if len(labels) and labels.max() >= NUM_CLASSES:
        raise source_error(path, f"has a label outside 0 to {NUM_CLASSES - 1}", int(labels.max()))
    return labels


def _convert(builder: Builder, images: list[Path], labels: list[Path]) -> None:
    for suffix, image_file, label_file in zip(("", "_test"), images, labels, strict=True):
        x = read_idx(image_file, magic=0x803, dtype="u1", shape=(None, SIDE, SIDE))
        y = _read_labels(label_file)
        if len(x) != len(y):
            found = Words(f"{len(y)} labels of {len(x)} images")
            raise source_error(label_file, "has another number of labels than there are images", found)
        if not suffix:
            if not len(x):
                raise source_error(image_file, "holds no images to train on", Words("none"))
            builder.notes.update(mean=float(x.mean()), std=float(x.std()) or 1.0)
        builder.put(f"x{suffix}", x)
        builder.put(f"y{suffix}", y.astype(np.int64))


def _convert_writers(builder: Builder, files: list[Path], labels: list[Path]) -> None:
    for name, writer_file, label_file in zip(("train", "test"), files, labels, strict=True):
        rows = read_idx(writer_file, magic=0xC02, dtype=">i4", shape=(None, COLUMNS))
        y = _read_labels(label_file)
        # QMNIST's test file goes on with 50,000 digits that MNIST does not have.
        rows = rows[: len(y)] if name == "test" else rows
        if len(rows) != len(y):
            raise source_error(writer_file, f"does not have a row for each of {len(y)} images", len(rows))
        differ = np.flatnonzero(rows[:, CLASS] != y)
        if len(differ):
            first = int(differ[0])
            found = Words(f"{rows[first, CLASS]} where MNIST has {y[first]}, in row {first} of {len(differ)} such")
            raise source_error(writer_file, f"does not belong to {label_file.name}: other classes", found)
        builder.put(name, rows[:, WRITER].astype(np.int64))
