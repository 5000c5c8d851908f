"""Partitions deal every example to exactly one client."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedeve import FedeveError, partition

LABELS = np.random.default_rng(0).integers(0, 10, size=3000)

DEALS = {
    "iid": lambda y, num, seed: partition.iid(y, num_clients=num, seed=seed),
    "dirichlet": lambda y, num, seed: partition.dirichlet(y, num_clients=num, alpha=0.3, seed=seed),
    "dirichlet 1e-6": lambda y, num, seed: partition.dirichlet(y, num_clients=num, alpha=1e-6, seed=seed),
    "dirichlet 1e6": lambda y, num, seed: partition.dirichlet(y, num_clients=num, alpha=1e6, seed=seed),
    "shards": lambda y, num, seed: partition.shards(y, num_clients=num, seed=seed),
}

every_deal = pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS.keys())


def as_lists(clients: list[np.ndarray]) -> list[list[int]]:
    return [rows.tolist() for rows in clients]


def assert_every_row_once(clients: list[np.ndarray], num_rows: int) -> None:
    assert sum(len(rows) for rows in clients) == num_rows
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(num_rows))
    assert all(rows.dtype == np.int64 for rows in clients)


def skew(clients: list[np.ndarray], y: np.ndarray) -> float:
    """Mean total-variation distance of the clients' label shares from everybody's, each client by its size."""
    everybody = np.bincount(y, minlength=10) / len(y)
    mine = [np.bincount(y[rows], minlength=10) / max(len(rows), 1) for rows in clients]
    sizes = np.array([len(rows) for rows in clients])
    return float((sizes * (np.abs(np.array(mine) - everybody).sum(1) / 2)).sum() / sizes.sum())


@every_deal
@pytest.mark.parametrize("num_clients", [1, 7, 100, 5000])
def test_every_row_is_dealt_exactly_once(deal, num_clients):
    clients = deal(LABELS, num_clients, 0)
    assert len(clients) == num_clients
    assert_every_row_once(clients, len(LABELS))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    y=st.lists(st.integers(0, 5), max_size=40),
    num_clients=st.integers(1, 12),
    seed=st.integers(0, 1000),
    alpha=st.sampled_from([1e-300, 1e-6, 0.01, 1.0, 1e6]),
)
def test_every_row_is_dealt_exactly_once_for_any_labels(y, num_clients, seed, alpha):
    for clients in (
        partition.iid(y, num_clients=num_clients, seed=seed),
        partition.dirichlet(y, num_clients=num_clients, alpha=alpha, seed=seed),
        partition.shards(y, num_clients=num_clients, per_client=3, seed=seed),
    ):
        assert len(clients) == num_clients
        assert_every_row_once(clients, len(y))


@every_deal
def test_same_seed_gives_the_same_split(deal):
    assert as_lists(deal(LABELS, 20, 3)) == as_lists(deal(LABELS, 20, 3))


@every_deal
def test_another_seed_gives_another_split(deal):
    assert as_lists(deal(LABELS, 20, 3)) != as_lists(deal(LABELS, 20, 4))


@every_deal
def test_a_list_of_labels_is_as_good_as_an_array(deal):
    assert as_lists(deal(LABELS[:200].tolist(), 5, 0)) == as_lists(deal(LABELS[:200], 5, 0))


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(rows) for rows in partition.iid(LABELS[:103], num_clients=10)]
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_iid_clients_have_everybodys_labels():
    assert skew(partition.iid(LABELS, num_clients=3), LABELS) < 0.05


def test_a_smaller_alpha_skews_labels_more():
    skews = [skew(partition.dirichlet(LABELS, num_clients=20, alpha=a, seed=1), LABELS) for a in (100, 1, 0.1, 0.01)]
    assert skews == sorted(skews)
    assert skews[0] < 0.1 < 0.5 < skews[-1]


def test_at_a_vanishing_alpha_every_class_belongs_to_one_client():
    for alpha in (1e-6, 1e-300):
        clients = partition.dirichlet(LABELS, num_clients=50, alpha=alpha, seed=2)
        for label in range(10):
            assert sum(bool((LABELS[rows] == label).any()) for rows in clients) == 1


def test_classes_go_to_different_clients_at_a_vanishing_alpha():
    clients = partition.dirichlet(LABELS, num_clients=50, alpha=1e-6, seed=2)
    assert sum(len(rows) > 0 for rows in clients) > 5


def test_at_a_huge_alpha_every_class_is_cut_evenly():
    clients = partition.dirichlet(LABELS, num_clients=10, alpha=1e6, seed=2)
    counts = np.array([np.bincount(LABELS[rows], minlength=10) for rows in clients])
    even = np.bincount(LABELS, minlength=10) / 10
    assert np.abs(counts - even).max() <= 2


def test_dirichlet_proportions_have_the_mean_and_variance_of_the_distribution():
    y, num, alpha = np.zeros(20_000, dtype=np.int64), 5, 0.5
    sizes = [[len(r) for r in partition.dirichlet(y, num_clients=num, alpha=alpha, seed=seed)] for seed in range(300)]
    shares = np.array(sizes) / len(y)
    # Dirichlet(alpha 1_N): mean 1/N, variance (1/N)(1 - 1/N) / (N alpha + 1).
    assert shares.mean(0) == pytest.approx([1 / num] * num, abs=0.06)
    assert shares.var() == pytest.approx(0.2 * 0.8 / (num * alpha + 1), rel=0.2)


def test_the_examples_of_a_class_are_shuffled_before_they_are_cut():
    clients = partition.dirichlet(np.zeros(100, dtype=np.int64), num_clients=2, alpha=1e6, seed=0)
    assert clients[0].tolist() != sorted(clients[0].tolist())
    assert clients[0].max() > clients[1].min()


def test_classes_are_cut_independently():
    y = np.repeat([0, 1], 5000)
    clients = partition.dirichlet(y, num_clients=10, alpha=0.5, seed=0)
    counts = np.array([np.bincount(y[rows], minlength=2) for rows in clients])
    assert not np.array_equal(counts[:, 0], counts[:, 1])


def test_about_half_of_the_clients_are_empty_at_alpha_001_with_ten_classes():
    y = np.repeat(np.arange(10), 5000)
    clients = partition.dirichlet(y, num_clients=500, alpha=0.01, seed=0)
    assert 0.4 < np.mean([len(rows) == 0 for rows in clients]) < 0.6


@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_shards_hold_few_labels_and_even_sizes(per_client):
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 100))
    clients = partition.shards(y, num_clients=20, per_client=per_client, seed=0)
    assert max(len(rows) for rows in clients) - min(len(rows) for rows in clients) <= per_client
    # A shard of at most 50 rows of 100 per class touches at most two classes.
    assert max(len(np.unique(y[rows])) for rows in clients) <= 2 * per_client


def test_shards_of_one_class_are_shuffled_before_they_are_cut():
    y = np.zeros(100, dtype=np.int64)
    clients = partition.shards(y, num_clients=2, per_client=1, seed=0)
    assert clients[0].tolist() != sorted(clients[0].tolist())


def test_natural_gives_every_owner_its_rows_in_their_order():
    clients = partition.natural(["b", "a", "b", "c", "a", "b"])
    assert as_lists(clients) == [[1, 4], [0, 2, 5], [3]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(owners=st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_natural_deals_every_row_to_its_owner(owners):
    clients = partition.natural(owners)
    assert_every_row_once(clients, len(owners))
    assert [{owners[row] for row in rows} for rows in clients] == [{owner} for owner in sorted(set(owners))]


@pytest.mark.parametrize("num_clients", [0, -1])
@every_deal
def test_a_federation_without_clients_is_refused(deal, num_clients):
    with pytest.raises(FedeveError, match="needs clients"):
        deal(LABELS, num_clients, 0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_no_concentration_is_refused(alpha):
    with pytest.raises(FedeveError, match="alpha must be above 0"):
        partition.dirichlet(LABELS, num_clients=3, alpha=alpha)


def test_no_shards_at_all_are_refused():
    with pytest.raises(FedeveError, match="at least one shard"):
        partition.shards(LABELS, num_clients=3, per_client=0)


@pytest.mark.parametrize("y", [np.eye(3), [0.0, 1.0, np.nan], 3])
def test_labels_that_would_be_dealt_twice_or_never_are_refused(y):
    for deal in (
        lambda: partition.dirichlet(y, num_clients=2, alpha=1.0),
        lambda: partition.iid(y, num_clients=2),
        lambda: partition.shards(y, num_clients=2),
        lambda: partition.natural(y),
    ):
        with pytest.raises(FedeveError, match="every example needs one"):
            deal()


@pytest.mark.parametrize("num_clients", [2.5, "3", True, None])
def test_a_number_of_clients_is_a_whole_number(num_clients):
    with pytest.raises(FedeveError, match="a federation needs clients"):
        partition.iid([0, 1, 1], num_clients=num_clients)
    with pytest.raises(FedeveError, match="at least one shard"):
        partition.shards([0, 1, 1], num_clients=2, per_client=num_clients)


def test_no_owners_are_no_clients():
    assert partition.natural([]) == []
