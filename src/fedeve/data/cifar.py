"""CIFAR-10 and CIFAR-100 from the official binary archives, or from the folders inside them; and Pachinko allocation.

An archive is read member by member: nothing is unpacked to disk, and no name in it is trusted.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import seeds
from ..errors import FedeveError, Words
from ..seeds import Indices
from ..settings import setting
from .cache import Builder, Cache, cached, source_error
from .datasets import Arrays
from .files import FileDataset, Remote
from .partition import Partition

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

SHAPE = (3, 32, 32)
PIXELS = 3072
PLANES = ("red", "green", "blue")
_AT_ONCE = 1000  # images counted at once: their temporaries are 25 MB


class Layout(NamedTuple):
    """What an archive holds: rows of some label bytes, each below its count, then red, green and blue planes."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: dict[str, int]
    """How many classes each label byte tells apart, in the order of the bytes; `y` is what models learn."""


@dataclass(frozen=True, kw_only=True)
class _Cifar(FileDataset):
    partition: str = setting(
        "dirichlet", help="how examples are dealt to clients", choices=("iid", "dirichlet", "shards")
    )

    layout: ClassVar[Layout]
    homepage: ClassVar[str] = "https://www.cs.toronto.edu/~kriz/cifar.html"
    licence: ClassVar[str] = "none stated; its authors ask to cite the report"
    citation: ClassVar[str] = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    default_clients: ClassVar[int] = 100

    def open(self) -> Cache:
        """The cache of the archive or folder: x [n, 3, 32, 32] bytes, labels [n], the same of the test set, and
        the mean and standard deviation [3, 1, 1] of the training bytes."""
        layout, archive = self.layout, self.remotes[0].name
        found = self.find(archive, f"{layout.folder}/{layout.train[0]}")
        if found.name == archive:
            return cached(self.name, [found], lambda builder: _convert(builder, layout, _in_archive(found, layout)))
        files = [found.parent / name for name in (*layout.train, *layout.test)]
        for path in files:
            if not path.is_file():
                raise source_error(found.parent, "is not complete", Words(f"no {path.name}"))
        return cached(self.name, files, lambda builder: _convert(builder, layout, _in_folder(files)))

    def arrays(self) -> Arrays:
        return self._arrays("y")

    def _arrays(self, labels: str) -> Arrays:
        cache = self.open()
        stored, deviation = cache.arrays, cache.arrays["std"]
        return Arrays(
            x=stored["x"],
            y=stored[labels].astype(np.int64),
            owners=None,
            x_test=stored["x_test"],
            y_test=stored[f"{labels}_test"].astype(np.int64),
            num_classes=self.layout.labels[labels],
            shift=np.array(stored["mean"]),
            scale=1 / np.where(deviation > 0, deviation, 1),
            source=f"{self.name} {labels} {cache.notes['content']}",
        )


@dataclass(frozen=True, kw_only=True)
class Cifar10(_Cifar):
    """50,000 + 10,000 colour photographs, 32x32, 10 classes."""

    source: ClassVar[str] = "cifar-10-binary.tar.gz, 170 MB"
    # The md5 is the homepage's; size and sha256 are those in TensorFlow Datasets' list of checksums, here and below.
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "cifar-10-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            size=170052171,
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
        ),
    )
    layout: ClassVar[Layout] = Layout(
        "cifar-10-batches-bin",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin",),
        {"y": 10},
    )


@dataclass(frozen=True, kw_only=True)
class Cifar100(_Cifar):
    """50,000 + 10,000 colour photographs, 32x32, 100 classes in 20 coarse ones.

    The partition `pachinko` is TensorFlow Federated's: 500 clients of 100 examples, alpha 0.1, leaf_alpha 10. The
    test set stays one; TensorFlow Federated deals it to 100 further clients.
    """

    partition: str = setting(
        "dirichlet", help="how examples are dealt to clients", choices=("iid", "dirichlet", "shards", "pachinko")
    )
    labels: str = setting("fine", help="which labels to learn, 100 or 20", choices=("fine", "coarse"))
    leaf_alpha: float = setting(10.0, help="pachinko: concentration in a coarse class; alpha is over these", above=0)

    source: ClassVar[str] = "cifar-100-binary.tar.gz, 169 MB"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "cifar-100-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            size=168513733,
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            md5="03b5dce01913d631647c71ecec9e9cb8",
        ),
    )
    layout: ClassVar[Layout] = Layout("cifar-100-binary", ("train.bin",), ("test.bin",), {"coarse": 20, "y": 100})
    pachinko_clients: ClassVar[int] = 500

    def arrays(self) -> Arrays:
        return self._arrays("y" if self.labels == "fine" else "coarse")

    def _deal(self, arrays: Arrays) -> Partition:
        if self.partition != "pachinko":
            return super()._deal(arrays)
        stored, count = self.open().arrays, self.num_clients or self.pachinko_clients
        return pachinko(
            stored["y"],
            stored["coarse"],
            num_clients=count,
            per_client=len(arrays.y) // count,
            alpha_root=self.alpha,
            alpha_leaf=self.leaf_alpha,
            seed=self.seed,
        )


Members = Iterator[tuple[Path, str, bytes]]


def _in_folder(files: list[Path]) -> Members:
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise source_error(path, "cannot be read", Words(error.strerror or str(error))) from error
        yield path, path.name, data


def _in_archive(path: Path, layout: Layout) -> Members:
    wanted, found = {*layout.train, *layout.test}, set()
    try:
        with gzip.open(path) as unzipped:
            with tarfile.open(fileobj=unzipped, mode="r|") as archive:
                for member in archive:
                    place = _place(path, member)
                    if str(place.parent) != layout.folder or place.name not in wanted:
                        continue
                    file = archive.extractfile(member)
                    if file is None or place.name in found:
                        raise source_error(path, f"holds {place.name} twice or not as a file", Words(member.name))
                    found.add(place.name)
                    yield path, place.name, file.read()
            while unzipped.read(1 << 20):  # gzip compares its own checksum only at the very end
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise source_error(path, "is damaged or not a .tar.gz archive", Words(str(error))) from error
    if missing := sorted(wanted - found):
        raise source_error(path, f"lacks files of {layout.folder}", Words(", ".join(missing)))


def _place(path: Path, member: tarfile.TarInfo) -> PurePosixPath:
    place = PurePosixPath(member.name)
    if place.is_absolute() or ".." in place.parts or not (member.isfile() or member.isdir()):
        raise source_error(path, "is no archive of data: a member leads elsewhere", member.name)
    return place


def _convert(builder: Builder, layout: Layout, members: Members) -> None:
    rows = {name: _rows(path, name, data, layout) for path, name, data in members}
    content, width = hashlib.sha256(), len(layout.labels)
    for suffix, names in (("", layout.train), ("_test", layout.test)):
        parts = [rows.pop(name) for name in names]
        x = builder.create(f"x{suffix}", (sum(map(len, parts)), *SHAPE), np.uint8)
        np.concatenate([part[:, width:] for part in parts], out=x.reshape(-1, PIXELS))
        labels = np.concatenate([part[:, :width] for part in parts])
        for column, name in enumerate(layout.labels):
            builder.put(f"{name}{suffix}", labels[:, column].copy())
        for part in parts:
            content.update(part.data)
        if not suffix:
            mean, deviation = moments(x)
            builder.put("mean", mean)
            builder.put("std", deviation)
    # The same of an archive and of its folder, so that a run may go on with either.
    builder.notes["content"] = content.hexdigest()


def _rows(path: Path, name: str, data: bytes, layout: Layout) -> Bytes:
    width = len(layout.labels) + PIXELS
    if not data or len(data) % width:
        raise source_error(
            path, f"is damaged: {name} is not made of rows of {width} bytes", Words(f"{len(data)} bytes")
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    for column, count in enumerate(layout.labels.values()):
        if rows[:, column].max() >= count:
            row = int(np.argmax(rows[:, column] >= count))
            label = Words(f"label {rows[row, column]} in row {row}")
            raise source_error(path, f"is damaged: {name} has labels that are not below {count}", label)
    return rows


def moments(x: Bytes) -> tuple[Floats, Floats]:
    """Mean and standard deviation [3, 1, 1] of images [n, 3, 32, 32], from counts of every byte, so exact."""
    counts = np.zeros((len(PLANES), 256), dtype=np.int64)
    for start in range(0, len(x), _AT_ONCE):
        for plane in range(len(PLANES)):
            counts[plane] += np.bincount(x[start : start + _AT_ONCE, plane].ravel(), minlength=256)
    shares, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256)
    mean = shares @ values
    variance = (shares * (values - mean[:, None]) ** 2).sum(axis=1)
    return mean.reshape(-1, 1, 1), np.sqrt(variance).reshape(-1, 1, 1)


def pachinko(
    fine: ArrayLike,
    coarse: ArrayLike,
    *,
    num_clients: int,
    per_client: int,
    alpha_root: float = 0.1,
    alpha_leaf: float = 10.0,
    seed: int = 0,
) -> Partition:
    """Hierarchical label skew: `per_client` examples each, no example twice, from labels `fine` [n] in `coarse` [n].

    Pachinko allocation (Li & McCallum 2006) as Reddi et al. 2021, appendix F: a client draws odds of the coarse
    labels from Dirichlet(alpha_root) and, in each, of its fine labels from Dirichlet(alpha_leaf). Every example takes
    a coarse label, then a fine one, then any example left of it; labels that are used up leave their odds to the rest.
    """
    labels, inverse = np.unique(np.asarray(fine), return_inverse=True)
    groups, group_of_row = np.unique(np.asarray(coarse), return_inverse=True)
    group_of = np.zeros(len(labels), dtype=np.int64)
    group_of[inverse] = group_of_row
    _check_pachinko(group_of[inverse] == group_of_row, num_clients, per_client, (alpha_root, alpha_leaf))
    rng = seeds.generator(seed, "partition", "pachinko")
    left = np.bincount(inverse, minlength=len(labels))
    queues = [rng.permutation(np.flatnonzero(inverse == label)).astype(np.int64) for label in range(len(labels))]
    clients = []
    for _ in range(num_clients):
        # Gamma draws divided by their sum are a Dirichlet draw, and `_odds` divides.
        root, leaf = rng.standard_gamma(alpha_root, len(groups)), rng.standard_gamma(alpha_leaf, len(labels))
        mine = np.zeros(len(labels), dtype=np.int64)
        while (missing := per_client - int(mine.sum())) > 0:
            odds = _odds(root, leaf, group_of, left - mine, rng)
            mine += _until_used_up(rng.choice(len(labels), size=missing, p=odds), left - mine)
        starts = [len(queue) - count for queue, count in zip(queues, left, strict=True)]
        clients.append(np.concatenate([q[s : s + m] for q, s, m in zip(queues, starts, mine, strict=True)]))
        left = left - mine
    return clients


def _until_used_up(drawn: Indices, left: Indices) -> Indices:
    """How often each label was drawn up to the first draw that takes the last example of one: odds change there."""
    counts = np.bincount(drawn, minlength=len(left))
    ends = [
        np.flatnonzero(drawn == label)[left[label] - 1] for label in np.flatnonzero((counts >= left) & (counts > 0))
    ]
    return np.bincount(drawn[: min(ends) + 1], minlength=len(left)) if ends else counts


def _odds(root: Floats, leaf: Floats, group_of: Indices, left: Indices, rng: np.random.Generator) -> Floats:
    """The odds of every fine label that has examples left: the coarse label's times its own among what remains."""
    remaining = np.bincount(group_of, weights=left, minlength=len(root)) > 0
    among = _renormalised(root, remaining, rng)
    odds = np.zeros(len(leaf))
    for group in np.flatnonzero(among):
        members = group_of == group
        odds[members] = among[group] * _renormalised(leaf[members], left[members] > 0, rng)
    return odds / odds.sum()


def _renormalised(weights: Floats, remaining: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    kept = np.where(remaining, weights, 0)
    if kept.sum() > 0:
        return kept / kept.sum()
    # All that remains was so unlikely that it underflowed; the limit is that one of it has all the odds.
    return np.eye(len(weights))[rng.choice(np.flatnonzero(remaining))]


def _check_pachinko(nested: NDArray[np.bool_], num_clients: int, per_client: int, alphas: tuple[float, float]) -> None:
    if not nested.all():
        found = Words(f"{int((~nested).sum())} examples elsewhere than others of their fine label")
        raise FedeveError("every fine label must lie in one coarse label", got=found, do="check the labels")
    if not all(np.isfinite(alpha) and alpha > 0 for alpha in alphas):
        raise FedeveError(
            "both alphas must be above 0", got=alphas, do="write e.g. 0.1 (label skew) or 100 (almost iid)"
        )
    if num_clients < 1 or per_client < 1 or num_clients * per_client > len(nested):
        raise FedeveError(
            f"{len(nested)} examples cannot be dealt like this",
            got=Words(f"{num_clients} clients of {per_client} examples"),
            do=f"set num_clients from 1 to {len(nested)}",
        )
