"""Arrays and who owns which row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedeve import FederatedData, FedeveError

X = np.random.default_rng(0).normal(size=(6, 2, 3))
Y = [0, 1, 2, 1, 0, 2]
CLIENTS = [[4, 0], [], [5, 1, 2], [3]]


def federated(**changes: object) -> FederatedData:
    options = {"x": X, "y": Y, "clients": CLIENTS, "x_test": X[:2], "y_test": [1, 0], **changes}
    return FederatedData.from_arrays(options.pop("x"), options.pop("y"), options.pop("clients"), **options)


def test_every_client_has_the_rows_it_was_given_in_their_order():
    data = federated()
    assert data.num_clients == 4
    assert data.sizes.tolist() == [2, 0, 3, 1]
    assert [data.rows(client).tolist() for client in range(4)] == CLIENTS
    assert data.with_data.tolist() == [0, 2, 3]
    assert data.input_shape == (2, 3)
    assert data.num_classes == 3


def test_inputs_stay_as_they_are_stored():
    x = np.arange(12, dtype=np.uint8).reshape(6, 2)
    data = FederatedData.from_arrays(x, Y, CLIENTS)
    assert data.x.dtype == np.uint8
    assert np.array_equal(data.x, x)


def test_without_a_test_set_there_are_no_test_rows():
    data = FederatedData.from_arrays(X, Y, CLIENTS)
    assert data.x_test.shape == (0, 2, 3)
    assert data.y_test.shape == (0,)


def test_classes_are_counted_in_both_sets_and_can_be_more():
    assert federated(y_test=[1, 7]).num_classes == 8
    assert federated(num_classes=10).num_classes == 10


def test_rows_need_not_all_have_an_owner():
    assert federated(clients=[[0], [1]]).sizes.tolist() == [1, 1]


def test_lists_and_small_integers_do_as_labels():
    for y in (Y, tuple(Y), np.array(Y, dtype=np.uint8), np.array(Y, dtype=np.int32)):
        assert federated(y=y).y.dtype == np.int64


def test_bytes_are_scaled_to_one():
    x = np.array([[0, 51, 255]], dtype=np.uint8)
    data = FederatedData.from_arrays(x, [0], [[0]])
    assert data.inputs(x).tolist() == [pytest.approx([0.0, 0.2, 1.0])]
    assert data.inputs(x).dtype == torch.float32
    assert data.inputs(x, torch.float64).dtype == torch.float64


def test_floats_are_taken_as_they_are():
    data = federated()
    assert torch.equal(data.inputs(X[:2], torch.float64), torch.from_numpy(X[:2]))


def test_inputs_are_stored_minus_shift_times_scale():
    x = np.array([[10, 20], [30, 40]], dtype=np.uint8)
    data = FederatedData.from_arrays(x, [0, 1], [[0, 1]], shift=10.0, scale=0.5)
    assert data.inputs(x).tolist() == [[0.0, 5.0], [10.0, 15.0]]


def test_shift_and_scale_can_differ_by_channel():
    x = np.arange(12, dtype=np.float64).reshape(1, 3, 2, 2)
    shift, scale = np.array([0.0, 4.0, 8.0]).reshape(3, 1, 1), np.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    data = FederatedData.from_arrays(x, [0], [[0]], shift=shift, scale=scale)
    assert np.allclose(data.inputs(x, torch.float64).numpy(), (x - shift) * scale)


def test_inputs_do_not_touch_what_is_stored():
    data = federated(shift=1.0)
    data.inputs(data.x, torch.float64).add_(1)
    assert np.array_equal(data.x, X)


CHANGES = {
    "an input": {"x": X + np.eye(6)[:, :1, None] * 1e-12},
    "the inputs' dtype": {"x": X.astype(np.float32), "x_test": X[:2].astype(np.float32)},
    "the meaning of the inputs' bytes": {"x": X.view(np.int64), "x_test": X[:2].view(np.int64)},
    "the inputs' shape": {"x": X.reshape(6, 3, 2), "x_test": X[:2].reshape(2, 3, 2)},
    "a label": {"y": [0, 1, 2, 1, 0, 1]},
    "an owner": {"clients": [[4], [0], [5, 1, 2], [3]]},
    "the order of a client's rows": {"clients": [[0, 4], [], [5, 1, 2], [3]]},
    "a further empty client": {"clients": [*CLIENTS, []]},
    "a test input": {"x_test": X[1:3]},
    "a test label": {"y_test": [1, 1]},
    "no test set": {"x_test": None, "y_test": None},
    "the number of classes": {"num_classes": 4},
    "the shift": {"shift": 0.1},
    "the scale": {"scale": 2.0},
    "a scale by channel": {"scale": np.full((2, 1), 2.0)},
}


def test_equal_content_has_an_equal_fingerprint():
    assert federated().fingerprint == federated(x=X.copy(), y=np.array(Y)).fingerprint


def test_memory_layout_is_not_content():
    assert federated(x=np.asfortranarray(X)).fingerprint == federated().fingerprint


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_fingerprint_changes_with_any_content(change):
    assert federated(**change).fingerprint != federated().fingerprint


def test_only_federations_that_deal_the_same_rows_seen_alike_have_the_same_examples():
    data = federated()
    dealt = federated(clients=[[0], [1, 2, 3]], x=X.copy(), y=np.array(Y), x_test=X[:2].copy())
    assert data.has_examples_of(data) and dealt.has_examples_of(data) and data.has_examples_of(dealt)
    for name, change in CHANGES.items():
        is_dealing = list(change) == ["clients"]
        assert federated(**change).has_examples_of(data) == is_dealing, name


def test_all_changes_have_different_fingerprints():
    prints = [federated(**change).fingerprint for change in CHANGES.values()]
    assert len(set(prints)) == len(prints)


def test_a_changed_copy_has_a_fingerprint_of_its_own():
    data = federated()
    before = data.fingerprint
    assert dataclasses.replace(data, scale=3.0).fingerprint != before


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"y": Y[:5]}, "x and y have different lengths"),
        ({"y_test": [1]}, "x_test and y_test have different lengths"),
        ({"y_test": None}, "x_test and y_test have different lengths"),
        ({"x_test": None}, "x_test and y_test have different lengths"),
        ({"x_test": X[:2, :1]}, "different shapes"),
        ({"y": [0.5, 1, 2, 1, 0, 2]}, "y must hold class numbers"),
        ({"y": [-1, 1, 2, 1, 0, 2]}, "y must hold class numbers"),
        ({"y": np.array(Y)[:, None]}, "y must hold class numbers"),
        ({"y": ["a", "b", "c", "b", "a", "c"]}, "y must hold class numbers"),
        ({"y_test": [0.0, 1.0]}, "y_test must hold class numbers"),
        ({"clients": []}, "needs clients"),
        ({"clients": [[0, 6]]}, "outside the data"),
        ({"clients": [[0], [-1]]}, "outside the data"),
        ({"num_classes": 2}, "label is out of range"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(bad, words):
    with pytest.raises(FedeveError, match=words) as caught:
        federated(**bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "clients", [[np.array(Y) == 0, np.array(Y) == 1], [[0.7, 1.2], [2.9]]], ids=["masks", "fractions"]
)
def test_rows_that_are_no_row_numbers_are_refused(clients):
    with pytest.raises(FedeveError):
        federated(clients=clients)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients": {0: [1, 2], 1: [3]}}, "must be a list of index arrays: got a mapping"),
        ({"clients": [0, 1, 2]}, r"list of row numbers: got an array of shape \(\)"),
        ({"clients": [[[0, 1], [2, 3]]]}, r"got an array of shape \(2, 2\)"),
        ({"x": np.zeros((6, 2, 3), dtype=np.uint8)}, "scaled differently.*got uint8 and float64"),
        ({"x_test": np.zeros((2, 2, 3), dtype=np.uint8)}, "scaled differently.*got float64 and uint8"),
        (
            {"x": np.where(np.arange(6) == 4, np.nan, 1.0)[:, None, None] * X},
            "x has .* not finite: got the first in row 4",
        ),
        ({"x_test": X[:2] + np.inf}, "x_test has numbers that are not finite"),
        ({"x": X + 1j}, "x must hold numbers: got complex128"),
        ({"x": 3}, "x must hold numbers"),
        ({"task": "foo"}, "unknown task: got 'foo'"),
    ],
)
def test_what_would_be_misread_is_refused(changes: dict[str, object], words: str):
    with pytest.raises(FedeveError, match=words):
        federated(**changes)


def test_a_row_may_be_several_clients():
    assert [federated(clients=[[0, 1], [1, 1]]).rows(k).tolist() for k in (0, 1)] == [[0, 1], [1, 1]]


def test_the_task_is_part_of_what_the_data_is():
    ranked = federated(task="ranking", y=[0, 1, 0, 1, 0, 1])
    assert ranked.fingerprint != federated(y=[0, 1, 0, 1, 0, 1]).fingerprint
