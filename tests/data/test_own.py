"""Your own data: folders and torch data sets become federations."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from own_examples import SIZES, assert_is, examples, parts
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedeve import FedAvg, FedeveError, LocalWork, Run, datasets, simulate
from fedeve.data.own import Folder, from_dataset, from_folder

pytestmark = pytest.mark.usefixtures("quiet")


def put_npz(folder: Path, *, test: bool = True) -> None:
    folder.mkdir()
    for name, (x, y) in zip("abc", parts(), strict=True):
        np.savez(folder / f"{name}.npz", x=x, y=y)
    if test:
        x, y = examples(5, seed=9)
        np.savez_compressed(folder / "test.npz", x=x, y=y)


def put_pairs(folder: Path) -> None:
    folder.mkdir()
    for name, (x, y) in zip(["a", "b", "c", "test"], [*parts(), examples(5, seed=9)], strict=True):
        np.save(folder / f"{name}_x.npy", x)
        np.save(folder / f"{name}_y.npy", y)


# Folders.


@pytest.mark.parametrize("put", [put_npz, put_pairs])
def test_a_folder_gives_a_client_per_file_in_the_order_of_names_also_without_data(tmp_path, put):
    put(tmp_path / "mine")
    data = from_folder(tmp_path / "mine")
    assert_is(data, parts())
    x, y = examples(5, seed=9)
    assert np.array_equal(data.x_test, x)
    assert np.array_equal(data.y_test, y)
    assert data.sizes.tolist() == SIZES
    assert data.num_classes == 3
    assert data.scale == 1 / 255


def test_a_folder_by_name_is_the_same_data_and_can_be_trained_on(tmp_path):
    put_npz(tmp_path / "mine")
    data = datasets.load("folder", path=str(tmp_path / "mine"))
    assert data.fingerprint == from_folder(tmp_path / "mine").fingerprint
    assert (data.name, data.options["path"]) == ("folder", str(tmp_path / "mine"))
    run = Run(method=FedAvg(), data=data, model="linear", rounds=2, cohort=2, local=LocalWork(lr=0.1))
    assert simulate(run, engine="reference", device="cpu").lines
    again = datasets.create(run.describe()["data"].pop("name"), **data.options).load()
    assert again.fingerprint == data.fingerprint


def test_the_arrays_of_a_folder_say_who_owns_each_row(tmp_path):
    put_npz(tmp_path / "mine")
    assert Folder(path=str(tmp_path / "mine")).arrays().owners.tolist() == [0] * 4 + [2] * 7


def test_files_of_other_kinds_and_folders_are_left_alone(tmp_path):
    put_npz(tmp_path / "mine", test=False)
    (tmp_path / "mine" / "README.txt").write_text("about")
    (tmp_path / "mine" / ".hidden.npz").write_text("no")
    (tmp_path / "mine" / "sub").mkdir()
    data = from_folder(tmp_path / "mine")
    assert_is(data, parts())
    assert len(data.y_test) == 0


def test_an_empty_client_may_have_any_shape(tmp_path):
    put_npz(tmp_path / "mine")
    np.savez(tmp_path / "mine" / "b.npz", x=np.zeros(0), y=np.zeros(0))
    assert from_folder(tmp_path / "mine").sizes.tolist() == SIZES


def test_floats_stay_floats_and_options_reach_the_federation(tmp_path):
    (tmp_path / "mine").mkdir()
    np.savez(tmp_path / "mine" / "a.npz", x=np.ones((2, 3), np.float32), y=np.array([0, 1]))
    data = from_folder(tmp_path / "mine", num_classes=5, shift=1.0, scale=2.0)
    assert (data.x.dtype, data.num_classes, data.shift, data.scale) == (np.float32, 5, 1.0, 2.0)


GOOD = {"x": np.zeros((2, 3)), "y": np.array([0, 1])}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": GOOD["x"]}, "lacks y"),
        ({"inputs": GOOD["x"], "labels": GOOD["y"]}, "lacks x and y"),
        ({"x": np.zeros((2, 4)), "y": GOOD["y"]}, r"different kinds of inputs: got float64 \[3\] in a.npz and float64"),
        ({"x": np.zeros((2, 3), np.uint8), "y": GOOD["y"]}, r"different kinds of inputs.*uint8 \[3\] in b.npz"),
        ({"x": GOOD["x"], "y": np.array([0, 1, 1])}, "x and y of b.npz have different lengths: got 2 inputs and 3"),
        ({"x": GOOD["x"], "y": np.array([0.5, 1])}, "y of b.npz must hold class numbers"),
        ({"x": GOOD["x"], "y": np.array([[0], [1]])}, "y of b.npz must hold class numbers"),
        ({"x": GOOD["x"], "y": np.array([0, -1])}, "class numbers: got the label -1"),
        ({"x": np.array(["a", "b"]), "y": GOOD["y"]}, "x of b.npz must hold numbers"),
        ({"x": np.float64(1.0), "y": GOOD["y"]}, "must hold rows"),
        ({"x": np.array([[0, 0, 0], [0, np.nan, 0]]), "y": GOOD["y"]}, "x of b.npz is not finite in row 1: got nan"),
        ({"x": np.array([[-np.inf, 0, 0], [0, 0, 0]]), "y": GOOD["y"]}, "x of b.npz is not finite in row 0: got -inf"),
        ({"x": GOOD["x"], "y": np.array([0, 2 * 10**9])}, "y of b.npz must count its classes from 0.*2000000000"),
    ],
)
def test_a_bad_client_file_is_refused_by_name(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **GOOD)
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(FedeveError, match=words):
        from_folder(tmp_path)


class Trap:
    """Would write a file if it were ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_pickled_arrays_are_refused_and_never_run(tmp_path, kind):
    folder, trap = tmp_path / "mine", tmp_path / "sprung"
    folder.mkdir()
    pickled = np.array([Trap(trap), None], dtype=object)
    if kind == "npz":
        np.savez(folder / "a.npz", x=pickled, y=GOOD["y"])
    else:
        np.save(folder / "a_x.npy", pickled, allow_pickle=True)
        np.save(folder / "a_y.npy", GOOD["y"])
    with pytest.raises(FedeveError, match=rf"a(_x)?\.{kind} holds no plain arrays.*allow_pickle"):
        from_folder(folder)
    assert not trap.exists()


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x03\x04 but no zip", b"\x93NUMPY\x01\x00"])
@pytest.mark.parametrize("name", ["a.npz", "a_x.npy"])
def test_a_file_that_holds_no_arrays_is_refused(tmp_path, data, name):
    np.save(tmp_path / "a_y.npy", GOOD["y"]) if name == "a_x.npy" else None
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FedeveError, match="holds no plain arrays"):
        from_folder(tmp_path)


@pytest.mark.parametrize("share", [0.2, 0.6, 0.98])
def test_a_truncated_or_damaged_archive_is_refused(tmp_path, share):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 3)), y=np.arange(50))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(FedeveError, match="holds no plain arrays"):
        from_folder(tmp_path)
    spoilt = bytearray(whole)
    spoilt[len(whole) // 3] ^= 255
    path.write_bytes(spoilt)
    with pytest.raises(FedeveError, match="holds no plain arrays"):
        from_folder(tmp_path)


def test_an_array_under_the_name_of_an_archive_is_refused(tmp_path):
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(FedeveError, match=r"a\.npz is no \.npz file"):
        from_folder(tmp_path)


def test_text_members_of_an_archive_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x", "text")
        archive.writestr("y", "text")
    with pytest.raises(FedeveError, match="must hold rows"):
        from_folder(tmp_path)


@pytest.mark.parametrize("name", ["a_x.npy", "a_y.npy", "a.npy"])
def test_half_of_a_pair_is_refused(tmp_path, name):
    np.save(tmp_path / name, np.zeros((2, 3)))
    with pytest.raises(FedeveError, match="is half of a pair"):
        from_folder(tmp_path)


def test_a_client_in_both_forms_is_refused(tmp_path):
    put_pairs(tmp_path / "mine")
    np.savez(tmp_path / "mine" / "a.npz", **GOOD)
    with pytest.raises(FedeveError, match="holds a client twice: got 'a'"):
        from_folder(tmp_path / "mine")


def test_a_folder_without_clients_or_without_data_is_refused(tmp_path):
    with pytest.raises(FedeveError, match="no clients in this folder"):
        from_folder(tmp_path)
    np.savez(tmp_path / "test.npz", **GOOD)
    with pytest.raises(FedeveError, match="no clients in this folder"):
        from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros((0, 3)), y=np.zeros(0, int))
    with pytest.raises(FedeveError, match="no client has data"):
        from_folder(tmp_path)


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(FedeveError, match=r"cannot be read: got .*No such file"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(FedeveError, match=r"set data\.path"):
        datasets.load("folder")
    with pytest.raises(FedeveError, match="leave num_clients out"):
        datasets.load("folder", path=str(tmp_path), num_clients=3)
    with pytest.raises(FedeveError, match=r"data\.partition.*natural"):
        datasets.create("folder", path=str(tmp_path), partition="iid")


# torch data sets.


class Pictures(Dataset):
    """Items (picture, label) as torchvision's data sets give them."""

    def __init__(self, x: np.ndarray, y: np.ndarray, mode: str = "RGB") -> None:
        self.x, self.y, self.mode = x, y, mode

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int):
        return Image.fromarray(self.x[number]).convert(self.mode), int(self.y[number])


def test_a_torch_data_set_with_client_ids_is_dealt_by_them():
    x, y = examples(6)
    data = from_dataset(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), ["b", "a", "b", "c", "a", "b"])
    assert_is(data, [(x[rows], y[rows]) for rows in ([1, 4], [0, 2, 5], [3])])
    assert data.scale == 1 / 255


def test_a_torch_data_set_may_name_the_client_in_its_items():
    x, y = examples(6)
    ids = torch.tensor([10, 2, 10, 2, 2, 7])
    data = from_dataset(TensorDataset(torch.from_numpy(x), torch.from_numpy(y), ids))
    assert_is(data, [(x[rows], y[rows]) for rows in ([1, 3, 4], [5], [0, 2])])


def test_pictures_become_bytes_with_channels_first_and_a_test_set_is_taken_along():
    x, y = examples(4, shape=(5, 6, 3))
    grey = Pictures(x, y, "L")
    data = from_dataset(Pictures(x, y), [0, 0, 1, 1], test=Pictures(x[:2], y[:2]), num_classes=9)
    assert data.x.dtype == np.uint8
    assert np.array_equal(data.x, x.transpose(0, 3, 1, 2))
    assert np.array_equal(data.x_test, x[:2].transpose(0, 3, 1, 2))
    assert data.num_classes == 9
    assert from_dataset(grey, [0] * 4).input_shape == (5, 6)
    palette = from_dataset(Pictures(x, y, "P"), [0] * 4)
    assert palette.input_shape == (3, 5, 6)
    black_and_white = from_dataset(Pictures(x, y, "1"), [0] * 4)
    assert set(np.unique(black_and_white.x)) <= {0, 255}


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


@pytest.mark.parametrize(
    ("items", "clients", "words"),
    [
        ([(np.zeros(2), 0)] * 3, [0, 1], "every item needs one client id: got 3 items and 2 ids"),
        ([(np.zeros(2), 0)] * 3, None, r"item 0 of dataset is not \(x, y, client\)"),
        ([np.zeros(2)] * 3, [0, 1, 2], r"item 0 of dataset is not \(x, y\)"),
        ([(np.zeros(2), 0), (np.zeros(3), 0)], [0, 1], r"different kinds of inputs.*in item 1, float64 \[3\]"),
        ([(np.zeros(2, np.uint8), 0), (np.zeros(2), 0)], [0, 1], "different kinds of inputs"),
        ([(np.zeros(2), 0.5)], [0], "the label of item 0 of dataset is no class number: got 0.5"),
        ([(np.zeros(2), "cat")], [0], "is no class number"),
        ([(np.zeros(2), -1)], [0], "the label -1"),
        ([(np.zeros(2), 10**9)], [0], "must count its classes from 0"),
        ([(np.zeros(2), 0), (np.array([1, np.inf]), 0)], [0, 0], "x of dataset is not finite in row 1: got inf"),
        ([(np.zeros(2), 0)], [None], "client ids must be plain"),
        ([(np.zeros(2), 0)], [[1, 2]], "client ids must be plain"),
        ([({"a": 1}, 0)], [0], "must hold numbers"),
        ([], [], "no client has data|needs clients"),
        (Endless(), [0], "must have a length"),
    ],
)
def test_a_data_set_that_does_not_fit_is_refused(items, clients, words):
    with pytest.raises(FedeveError, match=words):
        from_dataset(items, clients)
