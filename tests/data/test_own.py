"""Your own data: folders, torch data sets, Hugging Face data sets and Flower's partitioners become federations."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedeve import FedAvg, FederatedData, FedeveError, LocalWork, Run, datasets, simulate
from fedeve.data.own import Folder, from_dataset, from_folder, from_huggingface

SIZES = [4, 0, 7]


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """Nothing outside of the test's folder is touched or reached."""
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")


def examples(count: int, *, seed: int = 0, shape: tuple[int, ...] = (5, 6)) -> tuple[np.ndarray, np.ndarray]:
    """Byte images [count, *shape] and labels [count] of three classes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 3


def parts(sizes: list[int] = SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    return [examples(size, seed=number) for number, size in enumerate(sizes)]


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


def assert_is(data: FederatedData, expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Every client has these examples, in this order, in the type they had."""
    assert data.num_clients == len(expected)
    for client, (x, y) in enumerate(expected):
        rows = data.rows(client)
        assert np.array_equal(data.y[rows], y)
        if len(y):
            assert np.array_equal(data.x[rows], x)
            assert data.x.dtype == x.dtype


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


# Hugging Face and Flower.


@pytest.fixture
def hf():
    return pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed (extra convert)")


@pytest.fixture
def flower(hf):
    return pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed (extra convert)")


def table(hf, count: int = 12, *, pictures: bool = False):
    """A Dataset of 12 examples by three writers, and its arrays."""
    x, y = examples(count, shape=(5, 6, 3) if pictures else (5, 6))
    image = hf.Image() if pictures else hf.Array2D((5, 6), "uint8")
    features = hf.Features({"image": image, "label": hf.ClassLabel(names=[*"abcd"]), "writer": hf.Value("string")})
    rows = [Image.fromarray(one) for one in x] if pictures else x.tolist()
    writers = [f"w{number % 3}" for number in range(count)]
    made = hf.Dataset.from_dict({"image": rows, "label": y.tolist(), "writer": writers}, features=features)
    return made, x, y


def test_a_hugging_face_data_set_is_dealt_by_a_column(hf):
    made, x, y = table(hf)
    data = from_huggingface(made, input="image", label="label", client="writer", test=made.select([0, 5]))
    assert_is(data, [(x[client::3], y[client::3]) for client in range(3)])
    assert np.array_equal(data.x_test, x[[0, 5]])
    assert data.num_classes == 4


def test_hugging_face_pictures_become_bytes_with_channels_first(hf):
    made, x, y = table(hf, pictures=True)
    data = from_huggingface(made, input="image", label="label", client="writer")
    assert_is(data, [(x[client::3].transpose(0, 3, 1, 2), y[client::3]) for client in range(3)])


def test_columns_of_lists_and_numbers_keep_their_type(hf):
    features = hf.Features({"x": [[hf.Value("float32")]], "y": hf.Value("int32"), "client": hf.Value("int16")})
    rows = {"x": [[[1.5, 2.0]], [[3.0, 4.0]]], "y": [1, 0], "client": [5, 3]}
    data = from_huggingface(
        hf.Dataset.from_dict(rows, features=features).with_format("torch"), input="x", label="y", client="client"
    )
    assert_is(data, [(np.array([[[3.0, 4.0]]], np.float32), [0]), (np.array([[[1.5, 2.0]]], np.float32), [1])])


def test_a_list_of_data_sets_is_a_client_each_also_without_data(hf):
    made, x, y = table(hf)
    data = from_huggingface([made.select([2, 3]), made.select([]), made.select([7])], input="image", label="label")
    assert_is(data, [(x[[2, 3]], y[[2, 3]]), (x[:0], y[:0]), (x[[7]], y[[7]])])


def test_what_hugging_face_data_lacks_is_said(hf):
    made, _, _ = table(hf)
    ragged = hf.Dataset.from_dict({"x": [[1.0], [1.0, 2.0]], "y": [0, 1], "client": [0, 1]})
    cases = [
        (made, {"input": "img", "label": "label", "client": "writer"}, "unknown column.*did you mean 'image'"),
        (made, {"input": "image", "label": "label"}, "name the column: client="),
        (made, {"input": "image", "label": "writer", "client": "writer"}, "must hold class numbers"),
        ([made], {"input": "image", "label": "label", "client": "writer"}, "partitions already"),
        ([], {"input": "image", "label": "label"}, "needs clients"),
        (hf.DatasetDict(train=made), {"input": "image", "label": "label"}, "several splits"),
        (3, {"input": "image", "label": "label"}, "no Hugging Face data set: got int"),
        ([made, None], {"input": "image", "label": "label"}, "no Hugging Face data set: got NoneType"),
        (made.to_iterable_dataset(), {"input": "image", "label": "label", "client": "writer"}, "not streamed"),
        (ragged, {"input": "x", "label": "y", "client": "client"}, "all rows of one shape"),
    ]
    for data, options, words in cases:
        with pytest.raises(FedeveError, match=words):
            from_huggingface(data, **options)


def test_flowers_partitioners_are_a_client_per_partition(flower, hf):
    from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner

    made, x, y = table(hf)
    iid = IidPartitioner(num_partitions=4)
    iid.dataset = made
    data = from_huggingface(iid, input="image", label="label")
    expected = [iid.load_partition(number) for number in range(4)]
    assert_is(data, [(np.array(part[:]["image"], np.uint8), np.array(part[:]["label"])) for part in expected])
    by_writer = NaturalIdPartitioner(partition_by="writer")
    by_writer.dataset = made
    assert_is(from_huggingface(by_writer, input="image", label="label"), [(x[k::3], y[k::3]) for k in range(3)])


def test_flowers_federated_data_set_is_read_through_its_partitioner(flower, hf, tmp_path):
    made, x, y = table(hf)
    made.to_parquet(tmp_path / "train.parquet")
    made.select([1]).to_parquet(tmp_path / "test.parquet")
    files = {"train": str(tmp_path / "train.parquet"), "test": str(tmp_path / "test.parquet")}
    options = {"dataset": "parquet", "data_files": files, "shuffle": False, "cache_dir": str(tmp_path / "hf")}
    single = flower.FederatedDataset(partitioners={"train": 3}, **options)
    data = from_huggingface(single, input="image", label="label", test=single.load_split("test"))
    assert sorted(data.sizes.tolist()) == [4, 4, 4]
    assert np.array_equal(np.sort(data.y), np.sort(y))
    assert np.array_equal(data.x_test, x[[1]])
    both = flower.FederatedDataset(partitioners={"test": 1, "train": 3}, **options)
    assert from_huggingface(both, input="image", label="label").sizes.tolist() == [4, 4, 4]
