"""Federated EMNIST from files in TensorFlow Federated's and in LEAF's format, whole and damaged."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedeve import FedeveError, datasets
from fedeve.data.femnist import Femnist

Content = dict[str, tuple[np.ndarray, np.ndarray]]

# In no order, as LEAF lists them; f0900_22 has letters only.
SIZES = {"f3100_05": (12, 3), "f0000_14": (7, 2), "f0900_22": (5, 2), "f2000_40": (30, 4)}


def make(part: int, *, seed: int = 0) -> Content:
    """Ink [n, 28, 28] as bytes and labels [n] of every writer."""
    rng = np.random.default_rng([seed, part])
    content = {}
    for name, sizes in SIZES.items():
        lowest = 10 if name == "f0900_22" else 0
        images = rng.integers(0, 256, (sizes[part], 28, 28), dtype=np.uint8)
        images[rng.random(images.shape) < 0.8] = 0
        content[name] = images, rng.integers(lowest, 62, sizes[part])
        content[name][1][0] = 10 if lowest else 9  # the limits of what is a digit are met
    return content


def write_tff(path: Path, content: Content, **changes: Any) -> None:
    """As TensorFlow Federated wrote it: float32 pixels with paper at 1, int32 labels."""
    with h5py.File(path, "w") as file:
        for name, (images, labels) in content.items():
            group = file.create_group(f"examples/{name}")
            white = (255 - images).astype(np.float32) / np.float32(255)
            group.create_dataset("pixels", data=white, dtype=np.float32, **changes)
            group.create_dataset("label", data=labels.astype(np.int32), **changes)


def leaf_table(content: Content) -> dict[str, Any]:
    """As LEAF's data_to_json.py makes it: grey levels / 255 in a row of 784, paper at 1."""
    data = {
        name: {"x": ((255 - images.reshape(-1, 784)) / 255).tolist(), "y": labels.tolist()}
        for name, (images, labels) in content.items()
    }
    return {"users": list(data), "num_samples": [len(user["y"]) for user in data.values()], "user_data": data}


def write_leaf(folder: Path, content: Content, *, files: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(content)
    for number in range(files):
        part = {name: content[name] for name in names[number::files]}
        path = folder / f"all_data_{number}_niid_0_keep_0_train_9.json"
        path.write_text(json.dumps(leaf_table(part)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDEVE_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def tff(tmp_path: Path) -> Path:
    root = tmp_path / "tff"
    root.mkdir()
    write_tff(root / "fed_emnist_train.h5", make(0))
    write_tff(root / "fed_emnist_test.h5", make(1))
    return root


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    write_leaf(tmp_path / "leaf" / "train", make(0))
    write_leaf(tmp_path / "leaf" / "test", make(1))
    return tmp_path / "leaf"


def stacked(content: Content) -> tuple[np.ndarray, np.ndarray]:
    parts = [content[name] for name in sorted(content)]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


@pytest.mark.parametrize("format", ["tff", "leaf"])
def test_images_are_ink_in_bytes_and_rows_are_sorted_by_writer(format, request):
    data = datasets.load("femnist", root=str(request.getfixturevalue(format)))
    for part, (x, y) in enumerate([(data.x, data.y), (data.x_test, data.y_test)]):
        images, labels = stacked(make(part))
        assert x.dtype == np.uint8
        assert np.array_equal(x, images)
        assert np.array_equal(y, labels)
    assert (data.num_classes, data.input_shape, data.num_clients) == (62, (28, 28), 4)


def test_every_grey_level_survives_both_formats(tmp_path):
    images = np.arange(784, dtype=np.uint16).astype(np.uint8).reshape(1, 28, 28)
    content = {"a": (images, np.array([3]))}
    for name in ("train", "test"):
        write_tff(tmp_path / f"fed_emnist_{name}.h5", content)
        write_leaf(tmp_path / "leaf" / name, content, files=1)
    for root in (tmp_path, tmp_path / "leaf"):
        assert np.array_equal(datasets.load("femnist", root=str(root)).x, images)


def test_clients_are_writers_in_order_of_their_names(tff):
    data, content = datasets.load("femnist", root=str(tff)), make(0)
    for client, name in enumerate(sorted(content)):
        assert np.array_equal(data.x[data.rows(client)], content[name][0])
        assert np.array_equal(data.y[data.rows(client)], content[name][1])


def test_a_model_sees_training_ink_of_mean_zero_and_deviation_one(tff):
    data = datasets.load("femnist", root=str(tff))
    images, _ = stacked(make(0))
    assert data.shift == pytest.approx(images.mean(), rel=1e-12)
    assert 1 / data.scale == pytest.approx(images.std(), rel=1e-12)
    seen = data.inputs(data.x[data.order])
    assert (float(seen.mean()), float(seen.std())) == pytest.approx((0, 1), abs=1e-4)


def test_blank_paper_can_be_normalised(tmp_path):
    for name in ("train", "test"):
        write_tff(tmp_path / f"fed_emnist_{name}.h5", {"a": (np.zeros((2, 28, 28), np.uint8), np.array([1, 2]))})
    data = datasets.load("femnist", root=str(tmp_path))
    assert not data.inputs(data.x[data.order]).any()


@pytest.mark.parametrize("format", ["tff", "leaf"])
def test_only_digits_keeps_digits_and_the_writers_that_have_them(format, request):
    data = datasets.load("femnist", root=str(request.getfixturevalue(format)), only_digits=True)
    images, labels = stacked(make(0))
    assert np.array_equal(data.x, images[labels < 10])
    assert np.array_equal(data.y, labels[labels < 10])
    assert data.shift == pytest.approx(images[labels < 10].mean())
    assert data.num_classes == 10
    assert data.num_clients == 3
    tests, test_labels = stacked(make(1))
    assert np.array_equal(data.x_test, tests[test_labels < 10])


def test_only_digits_and_all_are_told_apart_by_their_fingerprints(tff):
    prints = {datasets.load("femnist", root=str(tff), only_digits=digits).fingerprint for digits in (True, False)}
    again = datasets.load("femnist", root=str(tff)).fingerprint
    assert len(prints) == 2
    assert again in prints


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_other_partitions_have_as_many_clients_as_writers_unless_told_otherwise(tff, partition):
    data = datasets.load("femnist", root=str(tff), partition=partition, alpha=0.1)
    assert data.num_clients == 4
    assert np.array_equal(np.sort(data.order), np.arange(54))
    assert datasets.load("femnist", root=str(tff), partition=partition, num_clients=9).num_clients == 9


def test_a_writer_without_images_is_left_out(tmp_path):
    empty = (np.zeros((0, 28, 28), np.uint8), np.zeros(0, np.int64))
    for root, write in ((tmp_path / "h5", None), (tmp_path / "json", write_leaf)):
        root.mkdir()
        for part, name in enumerate(("train", "test")):
            content = make(part) | {"f1000_00": empty}
            if write:
                write(root / name, content)
            else:
                write_tff(root / f"fed_emnist_{name}.h5", content)
        data = datasets.load("femnist", root=str(root))
        assert data.num_clients == 4
        assert data.sizes.min() == 5
        assert np.array_equal(data.x, stacked(make(0))[0])


def test_labels_in_a_column_are_read_as_well(tff):
    with h5py.File(tff / "fed_emnist_train.h5", "a") as file:
        for group in file["examples"].values():
            column = group["label"][()][:, None]
            del group["label"]
            group["label"] = column
    assert np.array_equal(datasets.load("femnist", root=str(tff)).y, stacked(make(0))[1])


def test_compressed_datasets_are_read_as_well(tff):
    write_tff(tff / "fed_emnist_train.h5", make(0), compression="gzip", chunks=True)
    assert np.array_equal(datasets.load("femnist", root=str(tff)).x, stacked(make(0))[0])


def test_a_writer_of_many_images_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("fedeve.data.femnist.ROWS", 4)
    for part, name in enumerate(("train", "test")):
        write_tff(tmp_path / f"fed_emnist_{name}.h5", make(part))
        write_leaf(tmp_path / "leaf" / name, make(part))
    for root in (tmp_path, tmp_path / "leaf"):
        for digits in (False, True):
            data = datasets.load("femnist", root=str(root), only_digits=digits)
            images, labels = stacked(make(0))
            assert np.array_equal(data.x, images[labels < (10 if digits else 62)])


def test_unsplit_json_of_leaf_gives_every_tenth_image_of_a_writer_to_the_test_set(tmp_path):
    write_leaf(tmp_path / "femnist" / "data" / "all_data", make(0))
    data = datasets.load("femnist", root=str(tmp_path))
    content, (images, labels) = make(0), stacked(make(0))
    position = np.concatenate([np.arange(len(content[name][1])) for name in sorted(content)])
    assert np.array_equal(data.x_test, images[position % 10 == 9])
    assert np.array_equal(data.y, labels[position % 10 != 9])
    assert len(data.y_test) == 4


@pytest.mark.parametrize("place", [".", "femnist", "fed_emnist"])
def test_files_are_found_in_the_root_and_in_its_folders(tff, place):
    (tff / place).mkdir(exist_ok=True)
    for path in list(tff.glob("*.h5")):
        path.rename(tff / place / path.name)
    assert len(datasets.load("femnist", root=str(tff)).y) == 54


def test_without_files_the_error_names_them_and_says_where_to_get_and_put_them(tmp_path):
    with pytest.raises(FedeveError, match=r"fed_emnist_train\.h5.*tar\.bz2.*json.*fedeve data get femnist.*femnist"):
        datasets.load("femnist", root=str(tmp_path))


def test_without_the_test_file_the_error_names_it(tff):
    (tff / "fed_emnist_test.h5").unlink()
    with pytest.raises(FedeveError, match=r"fed_emnist_test\.h5"):
        datasets.load("femnist", root=str(tff))


def pack(tff: Path, path: Path, names: dict[str, str]) -> None:
    with tarfile.open(path, "w:bz2") as tar:
        for name, inside in names.items():
            tar.add(tff / name, arcname=inside)


NAMES = {name: name for name in ("fed_emnist_test.h5", "fed_emnist_train.h5")}


def test_the_archive_gives_what_its_files_give(tff, tmp_path, cache):
    (tmp_path / "root").mkdir()
    pack(tff, tmp_path / "root" / "fed_emnist.tar.bz2", NAMES)
    packed = datasets.load("femnist", root=str(tmp_path / "root"))
    plain = datasets.load("femnist", root=str(tff))
    for name in ("x", "y", "order", "offsets", "x_test", "y_test"):
        assert np.array_equal(getattr(packed, name), getattr(plain, name))
    assert not list(cache.rglob("*.h5"))
    assert not list(cache.rglob("spare"))


def test_names_in_the_archive_cannot_lead_out_of_its_folder(tff, tmp_path):
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    escaping = {name: f"../../../{name}" for name in NAMES}
    pack(tff, root / "fed_emnist.tar.bz2", escaping)
    before = set(tmp_path.glob("*.h5"))
    data = datasets.load("femnist", root=str(root))
    assert len(data.y) == 54
    assert set(tmp_path.glob("*.h5")) == before
    assert not list((tmp_path / "cache").rglob("*.h5"))


def test_a_link_in_the_archive_is_not_followed(tff, tmp_path):
    with tarfile.open(tmp_path / "fed_emnist.tar.bz2", "w:bz2") as tar:
        tar.add(tff / "fed_emnist_test.h5", arcname="fed_emnist_test.h5")
        link = tarfile.TarInfo("fed_emnist_train.h5")
        link.type, link.linkname = tarfile.SYMTYPE, str(tff / "fed_emnist_train.h5")
        tar.addfile(link)
    with pytest.raises(FedeveError, match=r"does not hold fed_emnist_train\.h5"):
        datasets.load("femnist", root=str(tmp_path))


def refused(root: Path, cache: Path, *words: str) -> None:
    """Loading fails in one line that names the words, and leaves no cache."""
    with pytest.raises(FedeveError) as caught:
        datasets.load("femnist", root=str(root))
    for word in (*words, "get the file again"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_a_truncated_archive_is_refused(tff, tmp_path, cache, kept):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:bz2") as tar:
        for name in NAMES:
            tar.add(tff / name, arcname=name)
    content = whole.getvalue()
    (tmp_path / "fed_emnist.tar.bz2").write_bytes(content[: int(kept * len(content))])
    refused(tmp_path, cache, "fed_emnist.tar.bz2")


@pytest.mark.parametrize("kept", [0, 100, 5000, 40_000])
def test_a_truncated_hdf5_is_refused(tff, cache, kept):
    path = tff / "fed_emnist_train.h5"
    path.write_bytes(path.read_bytes()[:kept])
    refused(tff, cache, "fed_emnist_train.h5", "cannot be read")


def edit(root: Path, change: Any, *, name: str = "fed_emnist_train.h5") -> None:
    with h5py.File(root / name, "a") as file:
        change(file["examples"])


def replace(group: Any, name: str, values: Any) -> None:
    del group[name]
    group[name] = values


PIXELS = np.ones((7, 28, 28), np.float32)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda group: replace(group, "label", np.arange(6, dtype=np.int32)), "7 images and 6 labels"),
        (lambda group: replace(group, "label", np.full(7, 62, np.int32)), "got 62"),
        (lambda group: replace(group, "label", np.full(7, -1, np.int32)), "got -1"),
        (lambda group: replace(group, "label", np.full(7, 0.5)), "no class numbers"),
        (lambda group: replace(group, "label", np.zeros((7, 2), np.int32)), "no class numbers"),
        (lambda group: replace(group, "label", np.int32(3)), "cannot be read"),
        (lambda group: replace(group, "pixels", PIXELS[:, :27]), "not 28x28"),
        (lambda group: replace(group, "pixels", PIXELS.reshape(7, 784)), "not 28x28"),
        (lambda group: replace(group, "pixels", PIXELS * 255), "outside 0 to 1"),
        (lambda group: replace(group, "pixels", PIXELS * 1.01), "outside 0 to 1"),
        (lambda group: replace(group, "pixels", PIXELS * np.nan), "outside 0 to 1"),
        (lambda group: replace(group, "pixels", -PIXELS), "outside 0 to 1"),
        (lambda group: group.pop("pixels"), "lacks pixels or label"),
        (lambda group: group.pop("label"), "lacks pixels or label"),
    ],
)
@pytest.mark.parametrize("name", ["fed_emnist_train.h5", "fed_emnist_test.h5"])
def test_a_damaged_writer_in_hdf5_is_refused_by_name(tff, cache, change, word, name):
    if name.endswith("test.h5"):
        write_tff(tff / name, make(0))
    edit(tff, lambda examples: change(examples["f0000_14"]), name=name)
    if word == "cannot be read":
        refused(tff, cache, name, word)
    else:
        refused(tff, cache, name, word, "f0000_14")


def test_an_hdf5_without_examples_is_refused(tff, cache):
    with h5py.File(tff / "fed_emnist_train.h5", "w") as file:
        file["images"] = np.zeros(3)
    refused(tff, cache, "has no group 'examples'", "images")


def test_examples_that_are_no_groups_are_refused(tff, cache):
    edit(tff, lambda examples: examples.create_dataset("f5000_00", data=np.zeros(3)))
    refused(tff, cache, "f5000_00")


def test_files_without_any_image_are_refused(tff, cache):
    write_tff(tff / "fed_emnist_train.h5", {"a": (np.zeros((0, 28, 28), np.uint8), np.zeros(0, np.int64))})
    refused(tff, cache, "no images to train on")


def damage(table: dict[str, Any], what: str) -> None:
    user = table["users"][0]
    mine = table["user_data"][user]
    if what == "num_samples":
        table["num_samples"][0] += 1
    elif what == "short num_samples":
        table["num_samples"].pop()
    elif what == "labels":
        mine["y"].pop()
    elif what == "label":
        mine["y"][0] = 62
    elif what == "text label":
        mine["y"][0] = "7"
    elif what == "row":
        mine["x"][0] = mine["x"][0][:-1]
    elif what == "rows":
        mine["x"] = [row[:-1] for row in mine["x"]]
    elif what == "bytes":
        mine["x"][0][0] = 255
    elif what == "null":
        mine["x"][0][0] = None
    elif what == "x":
        del mine["x"]
    elif what == "stranger":
        table["users"][0] = "somebody"
    elif what == "twice":
        table["users"].append(user)
        table["num_samples"].append(len(mine["y"]))
    else:
        del table[what]


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("num_samples", "num_samples 13"),
        ("short num_samples", "cannot be read"),
        ("labels", "12 images, 11 labels"),
        ("label", "got 62"),
        ("text label", "no class numbers"),
        ("row", "cannot be read"),
        ("rows", "cannot be read"),
        ("bytes", "outside 0 to 1"),
        ("null", "outside 0 to 1"),
        ("x", "lacks x or y of f3100_05"),
        ("stranger", "other users"),
        ("twice", "other users"),
        ("users", "users"),
        ("user_data", "user_data"),
    ],
)
def test_damaged_json_is_refused(leaf, cache, what, word):
    path = sorted((leaf / "train").iterdir())[0]
    table = json.loads(path.read_text())
    damage(table, what)
    path.write_text(json.dumps(table))
    refused(leaf, cache, path.name, word)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b'{"users": ["a"', b"\xff\xfe\x00", b"[" * 100_000])
def test_broken_json_is_refused(leaf, cache, content):
    path = sorted((leaf / "test").iterdir())[1]
    path.write_bytes(content)
    refused(leaf, cache, path.name, "cannot be read")


def test_truncated_json_is_refused(leaf, cache):
    path = sorted((leaf / "train").iterdir())[1]
    path.write_bytes(path.read_bytes()[:-100])
    refused(leaf, cache, path.name, "JSONDecodeError")


def test_a_writer_in_two_json_files_is_refused(leaf, cache):
    first = sorted((leaf / "train").iterdir())[0]
    shutil.copy(first, first.with_name("copy.json"))
    refused(leaf, cache, "names a writer of another file again")


def test_a_full_disk_is_told_from_a_damaged_file_and_leaves_no_cache(tff, cache):
    program = """
import resource, sys
from fedeve import FedeveError, datasets
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    datasets.load("femnist", root=sys.argv[1])
except FedeveError as error:
    print(error)
"""
    environment = os.environ | {"FEDEVE_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", program, str(tff)], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("cannot write")
    assert "File too large" in done.stdout
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []
    assert len(datasets.load("femnist", root=str(tff)).y) == 54


def test_it_is_found_by_name_with_address_checksum_licence_and_citation():
    assert datasets.all_datasets()["femnist"] is Femnist
    (remote,) = Femnist.remotes
    assert remote.url.endswith(remote.name)
    assert len(remote.sha256 or "") == 64
    assert all((Femnist.source, Femnist.licence, Femnist.citation, Femnist.homepage))
