"""MovieLens-1M from small archives in its exact format, whole and damaged."""

from __future__ import annotations

import copy
import functools
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from ratings import Slow, check_rows, some_ratings, texts, write

from fedeve import FedAvg, FederatedData, FedeveError, LocalWork, Run, datasets, simulate, tasks
from fedeve.data import cache
from fedeve.data.movielens import HISTORY
from fedeve.models.din import DIN


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def small(folder: Path) -> FederatedData:
    write(folder, texts())
    return datasets.load("movielens1m", root=str(folder))


def test_counts_and_shapes(small):
    slow = Slow(texts())
    num_ratings = sum(map(len, slow.by_user.values()))
    assert small.num_clients == len(slow.users) == 9  # user 55 rates nothing
    assert small.x.shape == (5 * (num_ratings - 9), 2)
    assert small.x_test.shape == (900, 2)
    assert small.sizes.tolist() == [5 * (len(slow.by_user[user]) - 1) for user in slow.users]
    assert small.cardinalities == (9, 2, 7, 21, len(slow.zips), len(slow.ids) + 1)
    assert (small.task, small.num_classes, small.num_outputs) == ("ranking", 2, 1)
    assert small.y.sum() == num_ratings - 9
    assert small.y_test.reshape(9, 100).sum(0).tolist() == [9] + [0] * 99


def test_stored_rows_take_eight_bytes(small):
    assert small.x.nbytes == 8 * len(small.y)


def test_a_user_with_one_rating_is_a_client_without_data(small):
    client = Slow(texts()).users.index(9)
    assert small.sizes[client] == 0
    assert client not in small.with_data
    history = small.inputs(small.x_test[100 * client])[6:]
    assert history.tolist() == [0] * HISTORY


def test_every_training_row_is_what_a_slow_construction_says(small):
    check_rows(small, Slow(texts()))


def test_every_client_has_its_own_users_rows(small):
    for client in range(small.num_clients):
        assert set(small.inputs(small.x[small.rows(client)])[:, 0].tolist()) <= {client}


def test_the_last_rating_is_the_test_positive_and_first_of_its_hundred(small):
    slow = Slow(texts())
    for user in range(len(slow.users)):
        own, rows = slow.own(user), small.inputs(small.x_test[100 * user : 100 * user + 100])
        for row in rows.tolist():
            assert row == slow.features(user, len(own) - 1, row[5])
        candidates = rows[:, 5].tolist()
        assert candidates[0] == own[-1]
        assert len(set(candidates[1:])) == 99
        assert not set(candidates[1:]) & set(own)
        assert min(candidates) >= 1


def test_equal_times_keep_the_files_order(folder):
    people = {1: "F::1::10::48067", 2: "M::1::1::1"}
    mine = [(1, movie, 5, 100) for movie in (9, 3, 6)] + [(1, 12, 5, 99)]
    write(folder, texts([*mine, *((2, m, 1, 1) for m in range(20, 140))], people | {3: "F::1::1::1"}))
    with pytest.raises(FedeveError, match="fewer than 99"):
        datasets.load("movielens1m", root=str(folder))
    others = [(3, m, 1, 1) for m in range(140, 360)]
    write(folder, texts([*mine, *((2, m, 1, 1) for m in range(20, 140)), *others], people | {3: "F::1::1::1"}))
    data = datasets.load("movielens1m", root=str(folder))
    positives = data.inputs(data.x[data.rows(0)])[::5]
    assert positives[:, 5].tolist() == [4, 3, 1]  # movies 12, 9, 3 among 3, 6, 9, 12, 20, ...
    assert data.inputs(data.x_test[0])[5:].tolist() == [2] + [0] * 47 + [4, 3, 1]


def test_negatives_are_a_pure_function_of_the_seed_and_not_of_the_partition(folder, monkeypatch):
    write(folder, texts())
    load = functools.partial(datasets.load, "movielens1m", root=str(folder))
    first, other, iid = load(seed=3), load(seed=4), load(seed=3, partition="iid", num_clients=20)
    monkeypatch.setenv("FEDEVE_CACHE", str(folder / "another"))
    again = load(seed=3)
    for data in (again, iid):
        assert np.array_equal(first.x, data.x)
        assert np.array_equal(first.x_test, data.x_test)
    positive = first.y == 1
    assert np.array_equal(first.x[positive], other.x[positive])
    assert (first.x[~positive, 1] != other.x[~positive, 1]).mean() > 0.9
    assert (first.x_test[:, 1] != other.x_test[:, 1]).mean() > 0.9
    prints = {data.fingerprint for data in (first, other, iid)}
    assert len(prints) == 3
    assert again.fingerprint == first.fingerprint


def test_negatives_are_uniform_over_what_the_user_did_not_rate(folder):
    write(folder, texts())
    slow = Slow(texts())
    own = {user: set(slow.own(user)) for user in range(len(slow.users))}
    # Somebody with many ratings, the first and the last movie not among them: both must be drawn.
    client = next(user for user in own if len(own[user]) > 50 and not own[user] & {1, len(slow.ids)})
    free = len(slow.ids) - len(own[client])
    counts = np.zeros(len(slow.ids) + 1)
    for seed in range(40):
        data = datasets.load("movielens1m", root=str(folder), seed=seed)
        rows = data.rows(client)
        counts += np.bincount(data.x[rows[data.y[rows] == 0], 1], minlength=len(counts))
    drawn = counts[counts > 0]
    assert len(drawn) == free
    expected = 40 * 4 * (len(own[client]) - 1) / free
    statistic = ((drawn - expected) ** 2 / expected).sum()
    assert abs(statistic - (free - 1)) < 5 * np.sqrt(2 * (free - 1))  # chi-squared within five deviations


def test_iid_deals_all_rows_evenly_and_label_skew_is_refused(folder):
    write(folder, texts())
    data = datasets.load("movielens1m", root=str(folder), partition="iid", num_clients=10)
    assert np.ptp(data.sizes) <= 1
    assert np.array_equal(np.sort(data.order), np.arange(len(data.y)))
    for partition in ("dirichlet", "shards"):
        with pytest.raises(FedeveError, match=r"only say rated or not.*use natural"):
            datasets.load("movielens1m", root=str(folder), partition=partition)
    with pytest.raises(FedeveError, match="cannot be counted"):
        datasets.load("movielens1m", root=str(folder), num_clients=5)


def test_rows_are_gathered_alike_in_any_shape_and_in_lanes(small):
    gather, rows = small.gather, torch.from_numpy(small.x[:60])
    flat = gather(rows)
    assert flat.dtype == torch.int64
    assert flat.shape == (60, 56)
    assert torch.equal(gather(rows.reshape(3, 4, 5, 2)), flat.reshape(3, 4, 5, 56))
    assert torch.equal(torch.func.vmap(gather)(rows.reshape(6, 10, 2)), flat.reshape(6, 10, 56))
    assert torch.equal(torch.func.vmap(gather)(rows), flat)


def test_all_it_looks_up_lies_on_the_device_it_was_moved_to(small):
    elsewhere = copy.deepcopy(small.gather).to("meta")  # refuses, as a GPU does, to work with what lies on the CPU
    assert elsewhere(torch.from_numpy(small.x[:6]).to("meta")).device.type == "meta"


def test_a_second_open_reads_only_the_cache(folder):
    path = write(folder, texts())
    first = datasets.load("movielens1m", root=str(folder))
    status = path.stat()
    path.write_bytes(b"\0" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert np.array_equal(datasets.load("movielens1m", root=str(folder)).x, first.x)


def test_another_archive_in_the_same_place_is_read_anew(folder):
    write(folder, texts())
    first = datasets.load("movielens1m", root=str(folder))
    write(folder, texts(some_ratings()[:-40]))
    second = datasets.load("movielens1m", root=str(folder))
    assert len(second.y) == len(first.y) - 200
    assert second.fingerprint != first.fingerprint


def test_windows_line_ends_and_a_missing_last_one_do_not_matter(folder):
    write(folder, texts())
    first = datasets.load("movielens1m", root=str(folder))
    write(folder, {name: text.replace(b"\n", b"\r\n").removesuffix(b"\r\n") for name, text in texts().items()})
    second = datasets.load("movielens1m", root=str(folder))
    assert np.array_equal(first.x, second.x)
    assert first.cardinalities == second.cardinalities


def swap(member: str, old: bytes, new: bytes) -> dict[str, bytes]:
    members = texts()
    assert old in members[f"ml-1m/{member}"]
    return members | {f"ml-1m/{member}": members[f"ml-1m/{member}"].replace(old, new, 1)}


LINE = texts()["ml-1m/ratings.dat"].splitlines()[16]
USER, MOVIE, _, WHEN = LINE.split(b"::")
BAD_TEXT = {
    "a field too few": (swap("ratings.dat", LINE, b"::".join([USER, MOVIE, WHEN])), "line 17 is no user::movie"),
    "a field too many": (swap("ratings.dat", LINE, LINE + b"::4"), "line 17 is no"),
    "no number": (swap("ratings.dat", LINE, b"::".join([USER, b"x", b"3", WHEN])), "line 17 is no"),
    "a fraction": (swap("ratings.dat", LINE, b"::".join([USER, MOVIE, b"3.5", WHEN])), "line 17 is no"),
    "a sign": (swap("ratings.dat", LINE, b"::".join([USER, b"-" + MOVIE, b"3", WHEN])), "line 17 is no"),
    "single colons": (swap("ratings.dat", LINE, LINE.replace(b"::", b":")), "line 17 is no"),
    "no stars": (swap("ratings.dat", LINE, b"::".join([USER, MOVIE, b"0", WHEN])), "line 17 is no"),
    "six stars": (swap("ratings.dat", LINE, b"::".join([USER, MOVIE, b"6", WHEN])), "line 17 is no"),
    "an endless number": (swap("ratings.dat", LINE, b"::".join([USER, MOVIE, b"3", b"9" * 30])), "malformed: ratings"),
    "a rating twice": (swap("ratings.dat", LINE, LINE + b"\n" + LINE), "rates a movie twice"),
    "nothing": (texts() | {"ml-1m/ratings.dat": b""}, "malformed: ratings.dat"),
    "an unknown user": (swap("users.dat", b"7::F", b"8::F"), "not in users.dat: got 7"),
    "a user twice": (swap("users.dat", b"55::F", b"7::F"), "a user twice"),
    "an unknown movie": (swap("movies.dat", b"\n780::", b"\n7800::"), "does not list: got 780"),
    "an unknown gender": (swap("users.dat", b"7::F::1", b"7::X::1"), "user 7 in users.dat: got 'X::1::10::48067'"),
    "an unknown age": (swap("users.dat", b"7::F::1", b"7::F::2"), "user 7 in users.dat"),
    "an unknown occupation": (swap("users.dat", b"7::F::1::10", b"7::F::1::21"), "user 7 in users.dat"),
    "a short line of a user": (swap("users.dat", b"::48067", b""), "users.dat, line 1 has not 5 fields"),
    "a short line of a movie": (swap("movies.dat", b"::Animation", b""), "movies.dat, line 1 has not 3 fields"),
    "no users": ({k: v for k, v in texts().items() if k != "ml-1m/users.dat"}, "has no ml-1m/users.dat"),
    "no ratings": ({k: v for k, v in texts().items() if k != "ml-1m/ratings.dat"}, "has no ml-1m/ratings.dat"),
    "a way out": (texts() | {"ml-1m/../../evil": b""}, "points outside: got 'ml-1m/../../evil'"),
    "a way out with backslashes": (texts() | {"..\\evil": b""}, "points outside"),
    "an absolute name": (texts() | {"/etc/evil": b""}, "points outside"),
    "a drive": (texts() | {"C:\\evil": b""}, "points outside"),
}


def refused(folder: Path, words: str) -> None:
    """Loading fails in one line that names the archive and leaves no cache behind."""
    with pytest.raises(FedeveError, match=words) as caught:
        datasets.load("movielens1m", root=str(folder))
    assert "\n" not in str(caught.value)
    assert str(folder / "ml-1m.zip") in str(caught.value)
    assert [path for path in cache.cache_root().iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(("members", "words"), BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_a_damaged_archive_is_refused(folder, members, words):
    write(folder, members)
    refused(folder, words)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_archive_is_refused(folder, share):
    path = write(folder, texts())
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refused(folder, "cannot be read as a zip")


def test_an_archive_with_a_flipped_bit_is_refused(folder):
    path = write(folder, texts())
    with zipfile.ZipFile(path) as archive:
        middle = archive.getinfo("ml-1m/ratings.dat").header_offset + 500
    content = bytearray(path.read_bytes())
    content[middle] ^= 16
    path.write_bytes(content)
    refused(folder, "cannot be read as a zip")


def test_without_the_archive_the_error_says_where_to_get_it(folder):
    with pytest.raises(FedeveError, match=r"no ml-1m.zip below .*grouplens.org.*put it into"):
        datasets.load("movielens1m", root=str(folder))


def test_a_federation_trains_on_it(small):
    torch.manual_seed(0)
    model = DIN(small.input_shape, small.num_outputs, cardinalities=small.cardinalities)
    local = LocalWork(optimizer="adam", lr=0.01, batch=100)
    run = Run(method=FedAvg(), data=small, model=model, rounds=6, cohort=4, eval_every=3, local=local, seed=1)
    record = simulate(run, device="cpu")
    assert record.metrics == ["auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10", "loss"]
    with torch.no_grad():
        untrained = tasks.loss("ranking", model(small.inputs(small.x_test)), torch.from_numpy(small.y_test)).item()
    assert record.metric("loss")[-1] < 0.6 * untrained
