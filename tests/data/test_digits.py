"""The smallest real data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedeve import FedeveError, datasets
from fedeve.data.digits import Digits


def rows_of(images: np.ndarray, labels: np.ndarray) -> list[bytes]:
    """Every example as bytes, sorted: a set of examples that can be compared."""
    return sorted(
        bytes([label]) + image.astype(np.uint8).tobytes() for image, label in zip(images, labels, strict=True)
    )


def test_a_fifth_is_the_test_set_and_nothing_is_lost():
    data, bunch = datasets.load("digits"), load_digits()
    assert len(data.y_test) == 1797 // 5 == 359
    assert len(data.y) == 1797 - 359
    together = np.concatenate([data.x, data.x_test]), np.concatenate([data.y, data.y_test])
    assert rows_of(*together) == rows_of(bunch.images, bunch.target)


def test_images_are_bytes_that_a_model_sees_from_zero_to_one():
    data = datasets.load("digits")
    assert data.x.dtype == np.uint8
    assert data.input_shape == (8, 8)
    assert data.num_classes == 10
    seen = data.inputs(data.x)
    assert (float(seen.min()), float(seen.max())) == (0.0, 1.0)
    assert torch.equal(seen, torch.from_numpy(data.x).float() / 16)


def test_the_test_set_is_the_same_whatever_the_seed_and_partition():
    first, second = datasets.load("digits", seed=0), datasets.load("digits", seed=1, partition="iid")
    assert np.array_equal(first.x_test, second.x_test)
    assert np.array_equal(first.y_test, second.y_test)
    assert np.bincount(first.y_test, minlength=10).min() > 20


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_every_training_row_has_one_owner(partition):
    data = datasets.load("digits", partition=partition, num_clients=30)
    assert data.num_clients == 30
    assert np.array_equal(np.sort(data.order), np.arange(len(data.y)))


def test_there_are_a_hundred_clients_unless_told_otherwise():
    assert datasets.load("digits").num_clients == 100


def test_the_seed_decides_the_split():
    assert datasets.load("digits", seed=3).fingerprint == datasets.load("digits", seed=3).fingerprint
    assert datasets.load("digits", seed=3).fingerprint != datasets.load("digits", seed=4).fingerprint


def test_options_reach_the_partition():
    skewed = datasets.load("digits", alpha=0.01, num_clients=20)
    even = datasets.load("digits", alpha=1000.0, num_clients=20)
    assert skewed.sizes.std() > 3 * even.sizes.std()
    shards = datasets.load("digits", partition="shards", shards_per_client=1, num_clients=20)
    assert max(len(np.unique(shards.y[shards.rows(client)])) for client in range(20)) <= 2


def test_digits_have_no_natural_clients():
    with pytest.raises(FedeveError, match=r"data\.partition.*dirichlet, iid, shards"):
        datasets.load("digits", partition="natural")


def test_it_is_found_by_name_with_source_licence_and_citation():
    assert datasets.all_datasets()["digits"] is Digits
    assert Digits().name == "digits"
    assert all((Digits.source, Digits.licence, Digits.citation))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digts", {}, "did you mean 'digits'?"),
        ("digits", {"alhpa": 1.0}, "did you mean 'alpha'?"),
        ("digits", {"alpha": 0.0}, "data.alpha must be above 0"),
        ("digits", {"num_clients": 0}, "data.num_clients must be at least 1"),
        ("digits", {"num_clients": 2.5}, "data.num_clients must be a whole number or left out"),
    ],
)
def test_wrong_names_and_values_are_refused_with_advice(name, options, words):
    with pytest.raises(FedeveError) as caught:
        datasets.load(name, **options)
    assert words in str(caught.value)
