"""Federated EMNIST from files that are damaged: each is refused by name, and leaves no cache."""

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
from emnist_files import NAMES, make, write_tff

from fedeve import FedeveError, datasets

pytestmark = pytest.mark.usefixtures("cache")


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
