"""The handwriting that is made on the spot: its bytes, its sizes, its writers."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from fedeve import datasets
from fedeve.data import glyphs

FEMNIST = {"num_writers": 3400, "num_images": 671_585, "num_test": 77_483}


def small(seed: int = 3) -> glyphs.AllWriters:
    return glyphs.draw(12, num_images=600, num_test=80, seed=seed)


def test_the_classes_are_digits_capitals_and_small_letters_in_this_order() -> None:
    assert glyphs.NUM_CLASSES == 62
    assert glyphs.CHARACTERS[:10] == "0123456789"
    assert glyphs.CHARACTERS[10:36] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert glyphs.CHARACTERS[36:] == "abcdefghijklmnopqrstuvwxyz"


def test_shapes_and_types_are_those_promised() -> None:
    x, y, writers, x_test, y_test, writers_test = small()
    assert x.shape == (600, 28, 28) and x_test.shape == (80, 28, 28)
    assert x.dtype == x_test.dtype == np.uint8
    assert y.shape == writers.shape == (600,) and y_test.shape == writers_test.shape == (80,)
    assert {array.dtype for array in (y, writers, y_test, writers_test)} == {np.dtype(np.int64)}


def test_ink_is_bright_on_a_dark_background() -> None:
    x = small()[0]
    assert x.max() > 200
    assert np.median(x) < 30
    assert x[:, 8:20, 8:20].mean() > 3 * x[:, [0, -1]].mean()


def test_the_same_seed_gives_the_same_bytes_on_every_machine() -> None:
    digest = hashlib.sha256()
    for array in small():
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    assert digest.hexdigest() == "82beb5e9cc1a70627f3034d857040c83e0b9adef9ef28c6a952198e0f046ad30"


def test_another_seed_gives_other_images() -> None:
    assert not np.array_equal(small(3)[0], small(4)[0])
    assert not np.array_equal(small(3)[1], small(4)[1])


def test_the_batch_size_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small()
    monkeypatch.setattr(glyphs, "BATCH", 7)
    for one, other in zip(whole, small(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_writer_is_the_same_however_many_writers_there_are() -> None:
    for num_writers in (6, 20):
        x, y, writers, *_ = glyphs.draw(num_writers, num_images=50 * num_writers, num_test=0, seed=5)
        mine = writers == 4
        alone, labels, *_ = glyphs.draw_writer(4, num_train=int(mine.sum()), num_test=0, seed=5)
        np.testing.assert_array_equal(x[mine], alone)
        np.testing.assert_array_equal(y[mine], labels)


def test_a_writer_who_writes_more_begins_with_the_same_images() -> None:
    few = glyphs.draw_writer(2, num_train=9, num_test=3, seed=1)
    many = glyphs.draw_writer(2, num_train=300, num_test=40, seed=1)
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one, other[: len(one)])


def test_the_stream_equals_the_arrays() -> None:
    x, y, writers, x_test, y_test, writers_test = small()
    for writer, parts in enumerate(glyphs.stream(12, num_images=600, num_test=80, seed=3)):
        mine, mine_test = writers == writer, writers_test == writer
        for one, other in zip(parts, (x[mine], y[mine], x_test[mine_test], y_test[mine_test]), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("num_writers", "num_images", "num_test"),
    [(1, 2, 0), (7, 14, 3), (10, 157, 18), (100, 19_700, 2_273), (300, 50_000, 6_001), FEMNIST.values()],
)
def test_sizes_add_up_exactly(num_writers: int, num_images: int, num_test: int) -> None:
    train, test = glyphs.writer_sizes(num_writers, num_images=num_images, num_test=num_test, seed=0)
    assert train.shape == test.shape == (num_writers,)
    assert (train.sum(), test.sum()) == (num_images, num_test)
    assert train.min() >= (16 if num_images >= 32 * num_writers else 2)
    assert test.min() >= 0


def test_sizes_have_a_long_tail_at_full_size() -> None:
    train, test = glyphs.writer_sizes(**FEMNIST, seed=0)
    assert 16 <= train.min() <= 20
    assert train.max() > 450
    assert np.median(train) < train.mean()
    assert test.min() >= 1


def test_all_classes_appear() -> None:
    _, y, *_ = glyphs.draw(30, num_images=6000, num_test=0, seed=0)
    assert set(y.tolist()) == set(range(62))


def test_every_character_of_every_font_has_its_own_strokes() -> None:
    templates = glyphs._templates().reshape(-1, glyphs.CELLS, glyphs.CELLS)
    drawn = (templates == 0).sum(axis=(1, 2))
    assert drawn.min() >= 30
    assert templates[:, [0, -1]].min() >= 240 and templates[:, :, [0, -1]].min() >= 240


def test_no_dot_is_lost_in_thinning() -> None:
    templates = glyphs._templates().reshape(-1, glyphs.NUM_CLASSES, glyphs.CELLS, glyphs.CELLS)
    for character in "ij":
        rows = (templates[:, glyphs.CHARACTERS.index(character)] == 0).any(axis=2)
        # A dot is apart from its stem: the rows with ink begin twice.
        assert ((rows[:, 1:] & ~rows[:, :-1]).sum(axis=1) == 2).all()


def test_train_and_test_share_no_image() -> None:
    x, _, _, x_test, *_ = glyphs.draw(40, num_images=6000, num_test=700, seed=2)
    seen = {image.tobytes() for image in x}
    assert len(seen) == 6000
    assert not seen & {image.tobytes() for image in x_test}


def test_writers_differ_more_from_each_other_than_from_themselves() -> None:
    means = np.full((2, 12, 10, 784), np.nan)
    for writer in range(12):
        x, y, x_test, y_test = glyphs.draw_writer(writer, num_train=500, num_test=500, seed=0)
        for part, (images, labels) in enumerate([(x, y), (x_test, y_test)]):
            for digit in set(labels[labels < 10].tolist()):
                means[part, writer, digit] = images[labels == digit].mean(axis=0).ravel()
    # A writer may leave a digit out: its distances are not a number and do not count.
    distance = np.nanmean(np.linalg.norm(means[0][:, None] - means[1][None], axis=-1), axis=-1)
    own, others = np.diag(distance), distance[~np.eye(12, dtype=bool)]
    assert own.max() < others.min()
    assert 2 * own.mean() < others.mean()


def test_each_writer_has_a_taste_of_its_own_for_the_classes() -> None:
    counts = np.empty((2, 12, 62))
    for writer in range(12):
        _, y, _, y_test = glyphs.draw_writer(writer, num_train=400, num_test=400, seed=0)
        counts[:, writer] = [np.bincount(labels, minlength=62) for labels in (y, y_test)]
    distance = np.abs(counts[0][:, None] - counts[1][None]).sum(axis=-1)
    assert np.diag(distance).max() < distance[~np.eye(12, dtype=bool)].min()


def test_a_sheet_has_a_row_per_writer_and_a_column_per_character() -> None:
    picture = glyphs.sheet(3, seed=1, columns="aZ09")
    assert picture.shape == (3 * 28, 4 * 28) and picture.dtype == np.uint8
    np.testing.assert_array_equal(picture[:28], glyphs.sheet(1, seed=1, columns="aZ09"))
    assert not np.array_equal(picture[:28], picture[28:56])


def test_partitions_of_one_drawing_share_its_images_which_nobody_can_change() -> None:
    natural = datasets.load("glyphs", num_writers=5, seed=3)
    by_label = datasets.load("glyphs", num_writers=5, seed=3, partition="dirichlet", alpha=0.1)
    assert np.shares_memory(natural.x, by_label.x) and natural.fingerprint != by_label.fingerprint
    with pytest.raises(ValueError, match="read-only"):
        natural.x[0] = 0
    other = datasets.load("glyphs", num_writers=5, seed=4)
    assert not np.array_equal(other.x, natural.x)
    np.testing.assert_array_equal(datasets.load("glyphs", num_writers=5, seed=3).x, natural.x)


@pytest.mark.slow
def test_femnists_full_size_streams_in_bounded_memory() -> None:
    """In a process of its own: 3,400 writers and 749,068 images, of which only one writer's are held at a time."""
    code = """
import resource
from fedeve.data import glyphs
glyphs.draw(1, num_images=2, num_test=0, seed=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train = test = writers = 0
for x, y, x_test, y_test in glyphs.stream(3400, num_images=671585, num_test=77483, seed=0):
    train, test, writers = train + len(x), test + len(x_test), writers + 1
print(train, test, writers, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    shown = subprocess.check_output([sys.executable, "-c", code], text=True)
    train, test, writers, grown = map(int, shown.split())
    assert (train, test, writers) == (671_585, 77_483, 3_400)
    assert grown < 64, "MiB beyond the templates"
