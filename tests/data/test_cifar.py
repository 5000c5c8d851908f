"""CIFAR from files in the layout of the official archives, whole and damaged, and dealt by Pachinko allocation."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedeve import FedAvg, FedeveError, LocalWork, Run, datasets, simulate
from fedeve.data.cifar import Cifar10, Cifar100, moments

TEN, HUNDRED = "cifar-10-batches-bin", "cifar-100-binary"
NAMES_10 = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
REAL = os.environ.get("FEDEVE_CIFAR")
needs_files = pytest.mark.skipif(not REAL, reason="FEDEVE_CIFAR does not say where the real CIFAR-100 lies")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Data and cache of their own for every test."""
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDEVE_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "data"


def ten_files(*, per_file: int = 20, seed: int = 0) -> dict[str, bytes]:
    """CIFAR-10's six files: rows of a label and 3072 pixels."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (6, per_file, 3073), dtype=np.uint8)
    rows[:, :, 0] = rng.integers(0, 10, (6, per_file))
    return {name: part.tobytes() for name, part in zip(NAMES_10, rows, strict=True)}


def hundred_files(*, num_train: int = 200, num_test: int = 30, seed: int = 0) -> dict[str, bytes]:
    """CIFAR-100's two files: rows of a coarse label, a fine label and 3072 pixels; five fine labels in a coarse one."""
    rng = np.random.default_rng(seed)
    files = {}
    for name, count in (("train.bin", num_train), ("test.bin", num_test)):
        rows = rng.integers(0, 256, (count, 3074), dtype=np.uint8)
        rows[:, 1] = rng.permutation(np.arange(count) % 100)
        rows[:, 0] = rows[:, 1] // 5
        files[name] = rows.tobytes()
    return files


def put_folder(place: Path, folder: str, files: dict[str, bytes]) -> None:
    (place / folder).mkdir(parents=True)
    for name, data in files.items():
        (place / folder / name).write_bytes(data)


def put_archive(path: Path, folder: str, files: dict[str, bytes], *extra: tarfile.TarInfo) -> None:
    """An archive as published: the folder, a text file, the data files, and what is to be smuggled in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        home = tarfile.TarInfo(folder)
        home.type = tarfile.DIRTYPE
        archive.addfile(home)
        for name, data in {"batches.meta.txt": b"names\n", **files}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in extra:
            archive.addfile(member, io.BytesIO(bytes(member.size)))


def put_hundred(root: Path, **options) -> dict[str, bytes]:
    files = hundred_files(**options)
    put_folder(root, HUNDRED, files)
    return files


def test_cifar10_rows_are_a_label_and_three_planes_in_the_order_of_the_files(root):
    files = ten_files()
    put_folder(root, TEN, files)
    data = datasets.load("cifar10")
    rows = np.frombuffer(b"".join(files[name] for name in NAMES_10[:5]), np.uint8).reshape(100, 3073)
    assert data.x.dtype == np.uint8
    assert data.x.shape == (100, 3, 32, 32)
    assert np.array_equal(data.y, rows[:, 0])
    # Byte 1 + 1024 c + 32 i + j is channel c, row i, column j.
    for channel, row, column in [(0, 0, 0), (0, 0, 31), (1, 5, 7), (2, 31, 31)]:
        assert np.array_equal(data.x[:, channel, row, column], rows[:, 1 + 1024 * channel + 32 * row + column])
    test = np.frombuffer(files["test_batch.bin"], np.uint8).reshape(20, 3073)
    assert np.array_equal(data.y_test, test[:, 0])
    assert np.array_equal(data.x_test.reshape(20, -1), test[:, 1:])
    assert data.num_classes == 10


def test_cifar100_has_fine_and_coarse_labels(root):
    rows = np.frombuffer(put_hundred(root)["train.bin"], np.uint8).reshape(200, 3074)
    fine, coarse = datasets.load("cifar100"), datasets.load("cifar100", labels="coarse")
    assert np.array_equal(fine.y, rows[:, 1])
    assert np.array_equal(coarse.y, rows[:, 0])
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert np.array_equal(fine.x.reshape(200, -1), rows[:, 2:])
    assert np.array_equal(fine.y_test // 5, coarse.y_test)
    assert fine.source != coarse.source


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_an_archive_and_its_folder_are_the_same_data(tmp_path, name):
    folder, files = (TEN, ten_files()) if name == "cifar10" else (HUNDRED, hundred_files())
    put_folder(tmp_path / "unpacked", folder, files)
    remote = datasets.all_datasets()[name].remotes[0]
    put_archive(tmp_path / "packed" / remote.name, folder, dict(reversed(files.items())))
    one = datasets.load(name, root=str(tmp_path / "unpacked"))
    two = datasets.load(name, root=str(tmp_path / "packed"))
    for part in ("x", "y", "x_test", "y_test", "order", "offsets", "shift", "scale"):
        assert np.array_equal(getattr(one, part), getattr(two, part))
    assert one.fingerprint == two.fingerprint


def test_files_may_lie_in_a_folder_of_the_data_sets_name(root):
    put_folder(root / "cifar100", HUNDRED, hundred_files())
    assert len(datasets.load("cifar100").y) == 200


def test_pixels_are_normalised_by_the_mean_and_deviation_of_each_channel_of_the_training_set(root):
    put_hundred(root)
    data = datasets.load("cifar100")
    assert data.shift.shape == data.scale.shape == (3, 1, 1)
    seen = data.inputs(np.array(data.x)).double().numpy()
    assert np.allclose(seen.mean((0, 2, 3)), 0, atol=1e-6)
    assert np.allclose(seen.std((0, 2, 3)), 1, atol=1e-6)
    assert np.allclose(data.shift.ravel(), data.x.mean((0, 2, 3)), rtol=1e-12)


def test_moments_are_those_of_numpy_whatever_is_counted_at_once():
    x = np.random.default_rng(0).integers(0, 200, (2100, 3, 32, 32), dtype=np.uint8)
    mean, deviation = moments(x)
    assert np.allclose(mean.ravel(), x.mean((0, 2, 3), dtype=np.float64), rtol=1e-12)
    assert np.allclose(deviation.ravel(), x.std((0, 2, 3), dtype=np.float64), rtol=1e-12)


def test_a_channel_that_never_changes_is_only_shifted(root):
    rows = np.zeros((2, 3074), np.uint8)
    rows[:, 2:] = 7
    put_folder(root, HUNDRED, {"train.bin": rows.tobytes(), "test.bin": rows.tobytes()})
    data = datasets.load("cifar100", num_clients=1)
    assert not data.inputs(np.array(data.x)).any()


def test_the_default_is_dirichlet_among_a_hundred_clients(root):
    put_hundred(root)
    data = datasets.load("cifar100")
    assert data.num_clients == 100
    assert data.options["partition"] == "dirichlet"
    assert np.array_equal(np.sort(data.order), np.arange(200))


def test_a_second_opening_reads_the_cache_and_changed_files_make_a_new_one(root):
    put_hundred(root)
    before = datasets.load("cifar100")
    (root / HUNDRED / "train.bin").write_bytes(hundred_files(seed=1)["train.bin"])
    after = datasets.load("cifar100")
    assert not np.array_equal(before.x, after.x)
    assert before.fingerprint != after.fingerprint


def test_the_reference_engine_trains_on_the_mapped_bytes(root):
    put_hundred(root)
    run = Run(method=FedAvg(), data=datasets.load("cifar100", num_clients=5), model="linear", rounds=2, cohort=2,
              local=LocalWork(lr=0.01))  # fmt: skip
    record = simulate(run, engine="reference", device="cpu")
    assert record.lines


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_missing_files_are_named_with_where_to_get_and_put_them(name, root):
    with pytest.raises(FedeveError) as caught:
        datasets.load(name)
    words = str(caught.value)
    archive = datasets.all_datasets()[name].remotes[0].name
    assert all(part in words for part in (archive, str(root / name), "cs.toronto.edu", f"fedeve data get {name}"))


def nothing_kept(tmp_path: Path) -> bool:
    return not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


def test_a_folder_without_one_of_its_files_is_refused(root, tmp_path):
    put_hundred(root)
    (root / HUNDRED / "test.bin").unlink()
    with pytest.raises(FedeveError, match=r"not complete: got no test\.bin"):
        datasets.load("cifar100")
    assert nothing_kept(tmp_path)


@pytest.mark.parametrize("change", [-1, 1, 3072])
def test_a_size_that_is_no_multiple_of_a_row_is_refused(root, tmp_path, change):
    data = hundred_files()["train.bin"]
    changed = data[:change] if change < 0 else data + bytes(change)
    put_folder(root, HUNDRED, hundred_files() | {"train.bin": changed})
    with pytest.raises(FedeveError, match=r"train\.bin is not made of rows of 3074 bytes: got \d+ bytes"):
        datasets.load("cifar100")
    assert nothing_kept(tmp_path)


def test_an_empty_file_is_refused(root):
    put_folder(root, TEN, ten_files() | {"data_batch_3.bin": b""})
    with pytest.raises(FedeveError, match=r"data_batch_3\.bin is not made of rows of 3073 bytes: got 0 bytes"):
        datasets.load("cifar10")


@pytest.mark.parametrize(("byte", "label", "limit"), [(0, 20, 20), (1, 100, 100), (1, 255, 100)])
def test_a_label_out_of_range_is_refused_with_its_row(root, tmp_path, byte, label, limit):
    rows = np.frombuffer(hundred_files()["test.bin"], np.uint8).reshape(-1, 3074).copy()
    rows[17, byte] = label
    put_folder(root, HUNDRED, hundred_files() | {"test.bin": rows.tobytes()})
    with pytest.raises(
        FedeveError, match=rf"test\.bin has labels that are not below {limit}: got label {label} in row 17"
    ):
        datasets.load("cifar100")
    assert nothing_kept(tmp_path)


def test_a_python_archive_unpacked_under_the_binary_name_is_refused(root):
    put_folder(root, TEN, dict.fromkeys(NAMES_10, b"\x80\x02}q\x01"))
    with pytest.raises(FedeveError, match="not made of rows"):
        datasets.load("cifar10")


@pytest.mark.parametrize("keep", [0, 5, 0.3, 0.9, -9, -4])
def test_a_truncated_archive_is_refused(root, tmp_path, keep):
    path = root / Cifar100.remotes[0].name
    put_archive(path, HUNDRED, hundred_files())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(FedeveError, match=r"tar\.gz (is damaged|lacks)"):
        datasets.load("cifar100")
    assert nothing_kept(tmp_path)


def test_a_flipped_bit_in_an_archive_is_noticed_by_its_checksum(root, tmp_path):
    path = root / Cifar100.remotes[0].name
    put_archive(path, HUNDRED, hundred_files())
    unzipped = bytearray(gzip.decompress(path.read_bytes()))
    honest = path.read_bytes()
    unzipped[len(unzipped) // 2] ^= 1
    path.write_bytes(gzip.compress(bytes(unzipped))[:-8] + honest[-8:])
    with pytest.raises(FedeveError, match=r"is damaged.*CRC"):
        datasets.load("cifar100")
    assert nothing_kept(tmp_path)


@pytest.mark.parametrize("data", [b"<html>not found</html>", gzip.compress(b"no tar, only text" * 100, mtime=0)])
def test_what_is_no_archive_is_refused(root, data):
    (root / Cifar10.remotes[0].name).write_bytes(data)
    with pytest.raises(FedeveError, match=r"cifar-10-binary\.tar\.gz (is damaged|lacks)"):
        datasets.load("cifar10")


def test_an_archive_without_one_of_its_files_is_refused(root, tmp_path):
    files = ten_files()
    del files["data_batch_4.bin"]
    put_archive(root / Cifar10.remotes[0].name, TEN, files)
    with pytest.raises(FedeveError, match=r"lacks files of cifar-10-batches-bin: got data_batch_4\.bin"):
        datasets.load("cifar10")
    assert nothing_kept(tmp_path)


def test_files_of_the_right_name_in_another_folder_do_not_count(root):
    put_archive(root / Cifar100.remotes[0].name, "elsewhere", hundred_files())
    with pytest.raises(FedeveError, match=r"lacks .*: got test\.bin, train\.bin"):
        datasets.load("cifar100")


@pytest.mark.parametrize("name", ["../train.bin", f"{HUNDRED}/../../x", "/etc/passwd", f"{HUNDRED}/.."])
def test_an_archive_that_leads_elsewhere_is_refused(root, tmp_path, name):
    put_archive(root / Cifar100.remotes[0].name, HUNDRED, hundred_files(), tarfile.TarInfo(name))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FedeveError, match="a member leads elsewhere"):
        datasets.load("cifar100")
    assert nothing_kept(tmp_path)
    assert [path for path in sorted(tmp_path.rglob("*")) if "cache" not in path.parts] == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_or_a_device_in_an_archive_is_refused(root, kind):
    link = tarfile.TarInfo(f"{HUNDRED}/train.bin")
    link.type, link.linkname = kind, "/etc/passwd"
    put_archive(root / Cifar100.remotes[0].name, HUNDRED, {"test.bin": hundred_files()["test.bin"]}, link)
    with pytest.raises(FedeveError, match="a member leads elsewhere"):
        datasets.load("cifar100")


def test_a_file_that_stands_in_an_archive_twice_is_refused(root):
    again = tarfile.TarInfo(f"{HUNDRED}/test.bin")
    again.size = 3074
    put_archive(root / Cifar100.remotes[0].name, HUNDRED, hundred_files(), again)
    with pytest.raises(FedeveError, match=r"holds test\.bin twice"):
        datasets.load("cifar100")


def test_both_are_found_by_name_with_source_licence_citation_and_checksums():
    for name, cls in (("cifar10", Cifar10), ("cifar100", Cifar100)):
        assert datasets.all_datasets()[name] is cls
        assert all((cls.source, cls.licence, cls.homepage)) and "Krizhevsky" in cls.citation
        (remote,) = cls.remotes
        assert remote.url == f"https://www.cs.toronto.edu/~kriz/{remote.name}"
        assert len(remote.md5) == 32 and len(remote.sha256) == 64 and remote.size > 168_000_000


def test_only_cifar100_has_a_pachinko_partition_and_neither_has_natural_clients():
    for options in ({"partition": "natural"}, {"partition": "pachinko"}):
        with pytest.raises(FedeveError, match=r"data\.partition"):
            datasets.create("cifar10", **options)
    with pytest.raises(FedeveError, match=r"data\.labels.*coarse, fine"):
        datasets.create("cifar100", labels="both")


def test_the_data_set_is_dealt_by_pachinko_evenly_and_whichever_labels_are_learned(root):
    put_hundred(root)
    fine = datasets.load("cifar100", partition="pachinko", num_clients=40)
    coarse = datasets.load("cifar100", partition="pachinko", num_clients=40, labels="coarse")
    assert fine.sizes.tolist() == [5] * 40
    assert np.array_equal(fine.order, coarse.order)
    assert np.array_equal(np.sort(fine.order), np.arange(200))
    other = datasets.load("cifar100", partition="pachinko", num_clients=40, leaf_alpha=0.01)
    assert not np.array_equal(fine.order, other.order)


def test_pachinko_has_500_clients_unless_told_otherwise(root):
    put_hundred(root, num_train=1000)
    data = datasets.load("cifar100", partition="pachinko")
    assert (data.num_clients, set(data.sizes.tolist())) == (500, {2})


def test_pachinko_with_more_clients_than_examples_is_refused(root):
    put_hundred(root)
    with pytest.raises(FedeveError, match="200 examples cannot be dealt like this: got 500 clients of 0"):
        datasets.load("cifar100", partition="pachinko")


# The real files.


@needs_files
def test_the_real_cifar100_has_the_published_counts_and_moments():
    data = datasets.load("cifar100", root=REAL)
    assert (data.x.shape, data.x_test.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert np.bincount(data.y).tolist() == [500] * 100
    assert np.bincount(data.y_test).tolist() == [100] * 100
    assert np.allclose(data.shift.ravel() / 255, [0.50707516, 0.48654887, 0.44091784], rtol=0, atol=1e-6)
    assert np.allclose(1 / data.scale.ravel() / 255, [0.26733429, 0.25643846, 0.27615047], rtol=0, atol=1e-6)


@needs_files
def test_the_real_cifar100_has_five_fine_labels_in_each_coarse_one():
    fine, coarse = (datasets.create("cifar100", root=REAL, labels=labels).arrays() for labels in ("fine", "coarse"))
    pairs = {*zip(fine.y.tolist(), coarse.y.tolist(), strict=True)}
    assert pairs == {*zip(fine.y_test.tolist(), coarse.y_test.tolist(), strict=True)}
    assert len(pairs) == 100
    assert np.bincount([group for _, group in pairs]).tolist() == [5] * 20
    # The first of aquatic mammals (0), and of people (14), whose fine labels are alphabetical numbers.
    assert sorted(label for label, group in pairs if group == 0) == [4, 30, 55, 72, 95]
    assert sorted(label for label, group in pairs if group == 14) == [2, 11, 35, 46, 98]


@needs_files
def test_the_real_cifar100_is_dealt_by_pachinko_as_tensorflow_federated_does():
    data = datasets.load("cifar100", root=REAL, partition="pachinko")
    assert (data.num_clients, set(data.sizes.tolist())) == (500, {100})
    assert np.array_equal(np.sort(data.order), np.arange(50_000))
