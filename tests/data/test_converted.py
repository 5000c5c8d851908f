"""Your own data: Hugging Face data sets and Flower's partitioners become federations."""

from __future__ import annotations

import numpy as np
import pytest
from own_examples import assert_is, examples
from PIL import Image

from fedeve import FedeveError
from fedeve.data.own import from_huggingface

pytestmark = pytest.mark.usefixtures("quiet")


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
