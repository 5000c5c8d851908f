"""Federated EMNIST from files in TensorFlow Federated's and in LEAF's format."""

from __future__ import annotations

import tarfile

import h5py
import numpy as np
import pytest
from emnist_files import NAMES, make, pack, stacked, write_leaf, write_tff

from fedeve import FedeveError, datasets
from fedeve.data.femnist import Femnist

pytestmark = pytest.mark.usefixtures("cache")


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


def test_it_is_found_by_name_with_address_checksum_licence_and_citation():
    assert datasets.all_datasets()["femnist"] is Femnist
    (remote,) = Femnist.remotes
    assert remote.url.endswith(remote.name)
    assert len(remote.sha256 or "") == 64
    assert all((Femnist.source, Femnist.licence, Femnist.citation, Femnist.homepage))
