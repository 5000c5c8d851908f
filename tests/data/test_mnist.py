"""MNIST's idx files and QMNIST's label files, whole and damaged; and the real ones where they are at hand."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from fedeve import FedeveError, datasets
from fedeve.data.mnist import Mnist, read_idx

TRAIN, TEST, EXTRA = 60, 20, 15  # QMNIST's test file goes on after MNIST's ends
real = pytest.mark.skipif(not os.environ.get("FEDEVE_DATA"), reason="FEDEVE_DATA does not name the real files")


def idx(magic: int, values: np.ndarray) -> bytes:
    """Magic number, lengths and values, all big-endian."""
    return struct.pack(f">{1 + values.ndim}I", magic, *values.shape) + values.tobytes()


def digits(part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [n, 28, 28], labels [n] and QMNIST's rows [n or more, 8]; writers come in no order."""
    rng = np.random.default_rng(len(part))
    count, rows = (TRAIN, TRAIN) if part == "train" else (TEST, TEST + EXTRA)
    images, labels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, rows)
    writers = rng.choice([2101, 17, 300], rows) + (part == "test")
    table = np.stack([labels, 4 + 0 * labels, writers, np.arange(rows), 30 + labels, *3 * [0 * labels]], axis=1)
    return images, labels[:count].astype(np.uint8), table.astype(">i4")


def write(folder: Path, *, zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, theirs in (("train", "train"), ("test", "t10k")):
        images, labels, table = digits(part)
        files = {
            f"{theirs}-images-idx3-ubyte": idx(2051, images),
            f"{theirs}-labels-idx1-ubyte": idx(2049, labels),
            f"qmnist-{part}-labels-idx2-int": idx(3074, table),
        }
        for name, content in files.items():
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "mnist")
    return tmp_path / "data"


@pytest.mark.parametrize("zipped", [True, False])
def test_images_and_labels_are_those_of_the_files(tmp_path, zipped):
    write(tmp_path / "mnist", zipped=zipped)
    data = datasets.load("mnist", root=str(tmp_path))
    for part, x, y in (("train", data.x, data.y), ("test", data.x_test, data.y_test)):
        images, labels, _ = digits(part)
        assert np.array_equal(x, images)
        assert np.array_equal(y, labels)
    assert (data.x.dtype, data.num_classes) == (np.uint8, 10)


def test_a_model_sees_training_pixels_of_mean_zero_and_deviation_one(root):
    data = datasets.load("mnist", root=str(root))
    seen = data.inputs(data.x[data.order])
    assert (float(seen.mean()), float(seen.std())) == pytest.approx((0, 1), abs=1e-4)


def test_natural_clients_are_writers_in_order_of_their_numbers(root):
    data = datasets.load("mnist", root=str(root))
    writers = digits("train")[2][:, 2]
    assert data.num_clients == 3
    for client, writer in enumerate((17, 300, 2101)):
        assert np.array_equal(data.rows(client), np.flatnonzero(writers == writer))


def test_of_the_test_writers_only_those_of_mnists_images_are_given(root):
    train, test = Mnist(root=str(root)).writers()
    assert np.array_equal(train, digits("train")[2][:, 2])
    assert np.array_equal(test, digits("test")[2][:TEST, 2])


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_other_partitions_need_no_writers(root, partition):
    for path in (root / "mnist").glob("qmnist-*"):
        path.unlink()
    data = datasets.load("mnist", root=str(root), partition=partition, num_clients=7)
    assert data.num_clients == 7
    assert np.array_equal(np.sort(data.order), np.arange(TRAIN))
    with pytest.raises(FedeveError, match=r"qmnist-train-labels-idx2-int.*fedeve data get mnist"):
        datasets.load("mnist", root=str(root))


def test_torchvisions_folder_serves_as_well(tmp_path):
    write(tmp_path / "MNIST" / "raw", zipped=False)
    assert len(datasets.load("mnist", root=str(tmp_path), partition="iid", num_clients=5).y) == TRAIN


def test_the_files_and_the_writers_show_in_the_fingerprint(root, tmp_path):
    first = datasets.load("mnist", root=str(root), partition="iid").fingerprint
    assert datasets.load("mnist", root=str(root), partition="iid").fingerprint == first
    images = digits("train")[0].copy()
    images[3, 4, 5] ^= 1
    (root / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(2051, images)))
    assert datasets.load("mnist", root=str(root), partition="iid").fingerprint != first


def refused(root: Path, cache: Path, *words: str) -> None:
    """Loading fails in one line that names the words, and leaves no cache."""
    with pytest.raises(FedeveError) as caught:
        Mnist(root=str(root)).arrays()
    for word in (*words, "get the file again"):
        assert word in str(caught.value)
    assert not [path.name for path in cache.iterdir() if path.suffix == ".part"]
    caches = {path.name.rpartition("-")[0] for path in cache.iterdir() if path.is_dir()}
    assert caches <= ({"mnist"} if "qmnist" in words[0] else set())


FILES = ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "qmnist-train-labels-idx2-int")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [3, 12, 0.5, -1])
def test_truncated_gzip_is_refused(root, cache, name, kept):
    path = root / "mnist" / f"{name}.gz"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    refused(root, cache, name, "cannot be read")


@pytest.mark.parametrize("where", ["first block", "middle", "checksum"])
def test_damaged_gzip_is_refused(root, cache, where):
    path = root / "mnist" / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[{"first block": 10, "middle": len(content) // 2, "checksum": -8}[where]] ^= 0x07
    path.write_bytes(content)
    refused(root, cache, path.name, "cannot be read")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change", ["magic", "little-endian", "more rows", "fewer rows", "short", "long", "header", "empty"]
)
def test_a_file_that_is_not_what_its_header_says_is_refused(root, cache, name, change):
    path = root / "mnist" / f"{name}.gz"
    content = gzip.decompress(path.read_bytes())
    magic, rows = struct.unpack(">2I", content[:8])
    damaged = {
        "magic": struct.pack(">I", magic + 1) + content[4:],
        "little-endian": content[3::-1] + content[4:],
        "more rows": content[:4] + struct.pack(">I", rows + 1) + content[8:],
        "fewer rows": content[:4] + struct.pack(">I", rows - 1) + content[8:],
        "short": content[:-1],
        "long": content + b"\0",
        "header": content[:6],
        "empty": b"",
    }
    path.write_bytes(gzip.compress(damaged[change]))
    refused(root, cache, name)


def test_images_of_another_size_are_refused(root, cache):
    images = digits("train")[0][:, :27]
    (root / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(2051, np.ascontiguousarray(images))))
    refused(root, cache, "train-images", "[60, 27, 28]")


def test_labels_out_of_range_are_refused(root, cache):
    labels = digits("train")[1].copy()
    labels[5] = 10
    (root / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(2049, labels)))
    refused(root, cache, "train-labels", "got 10")


def test_labels_of_other_images_are_refused(root, cache):
    labels = digits("train")[1][:-1]
    (root / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(2049, labels)))
    refused(root, cache, "train-labels", "59 labels of 60 images")


@pytest.mark.parametrize("part", ["train", "test"])
def test_writers_shifted_by_one_row_are_refused(root, cache, part):
    table = np.roll(digits(part)[2], 1, axis=0)
    (root / "mnist" / f"qmnist-{part}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(3074, table)))
    refused(root, cache, f"qmnist-{part}", "does not belong to")


def test_writers_of_too_few_or_too_many_images_are_refused(root, cache):
    for part, rows in (("train", slice(TRAIN - 1)), ("test", slice(TEST - 1))):
        table = digits(part)[2]
        path = root / "mnist" / f"qmnist-{part}-labels-idx2-int.gz"
        path.write_bytes(gzip.compress(idx(3074, table[rows])))
        refused(root, cache, f"qmnist-{part}", "does not have a row for each")
        path.write_bytes(gzip.compress(idx(3074, table)))
    more = np.concatenate([digits("train")[2]] * 2)
    (root / "mnist" / "qmnist-train-labels-idx2-int.gz").write_bytes(gzip.compress(idx(3074, more)))
    refused(root, cache, "qmnist-train", "does not have a row for each")


def test_a_file_that_cannot_be_opened_is_the_sources_fault(root, cache):
    path = root / "mnist" / "train-images-idx3-ubyte.gz"
    path.unlink()
    path.mkdir()
    refused(root, cache, path.name, "cannot be read")


def test_big_endian_numbers_are_read_as_such(tmp_path):
    table = np.arange(24).reshape(3, 8) * 1000
    (tmp_path / "labels").write_bytes(idx(3074, table.astype(">i4")))
    assert np.array_equal(read_idx(tmp_path / "labels", magic=3074, dtype=">i4", shape=(None, 8)), table)


def test_it_is_found_by_name_with_addresses_checksums_licence_and_citation():
    assert datasets.all_datasets()["mnist"] is Mnist
    assert len({remote.name for remote in Mnist.remotes}) == 6
    for remote in Mnist.remotes:
        assert remote.url.endswith("/" + remote.name)
        assert (len(remote.sha256 or ""), len(remote.md5 or "")) == (64, 32)
    assert all((Mnist.source, Mnist.licence, Mnist.citation, Mnist.homepage))


@real
def test_the_real_files_have_their_published_counts():
    data = datasets.load("mnist")
    assert (len(data.y), len(data.y_test), data.num_clients) == (60_000, 10_000, 539)
    assert (data.sizes.min(), np.median(data.sizes), data.sizes.max()) == (19, 116, 131)
    assert np.bincount(data.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(data.y_test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert (data.shift / 255, 1 / data.scale / 255) == pytest.approx((0.1307, 0.3081), abs=5e-5)
    assert not data.x[:, 0, 0].any()  # paper is 0


@real
def test_the_real_writers_of_training_and_test_images_are_different_people():
    train, test = Mnist().writers()
    assert (len(train), len(test)) == (60_000, 10_000)
    assert (len(np.unique(train)), len(np.unique(test))) == (539, 297)
    assert not np.intersect1d(train, test).size
