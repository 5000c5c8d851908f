"""Pachinko allocation of labels in a hierarchy, as CIFAR-100's are."""

from __future__ import annotations

import numpy as np
import pytest

from fedeve import FedeveError
from fedeve.data.cifar import pachinko


def hierarchy(*, num_fine: int = 100, per_label: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    fine = np.random.default_rng(seed).permutation(np.repeat(np.arange(num_fine), per_label))
    return fine, fine // 5


@pytest.mark.parametrize(("root_alpha", "leaf_alpha"), [(0.1, 10.0), (1e-300, 1e-300), (1e-3, 1e-3), (100.0, 100.0)])
def test_pachinko_uses_every_example_once_when_the_sizes_add_up(root_alpha, leaf_alpha):
    fine, coarse = hierarchy()
    parts = pachinko(fine, coarse, num_clients=50, per_client=100, alpha_root=root_alpha, alpha_leaf=leaf_alpha)
    assert [len(part) for part in parts] == [100] * 50
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(5000))


def test_pachinko_uses_no_example_twice_when_some_stay():
    fine, coarse = hierarchy()
    parts = pachinko(fine, coarse, num_clients=33, per_client=7, seed=3)
    rows = np.concatenate(parts)
    assert len(rows) == len(np.unique(rows)) == 33 * 7


def test_pachinko_is_decided_by_its_seed():
    fine, coarse = hierarchy()
    first, again, other = (pachinko(fine, coarse, num_clients=9, per_client=20, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_pachinko_skews_coarse_labels_by_alpha_and_the_fine_ones_in_them_by_leaf_alpha():
    # Plenty of every label, so that nothing is used up: shares of two draws agree with odds sum E[p^2], which for
    # Dirichlet(a) over k labels is (1 + a) / (1 + k a).
    fine, coarse = hierarchy(per_label=1000)
    for alpha_root, alpha_leaf in ((0.1, 10.0), (1.0, 0.1)):
        parts = pachinko(
            fine, coarse, num_clients=400, per_client=100, alpha_root=alpha_root, alpha_leaf=alpha_leaf, seed=5
        )
        same_coarse = np.mean([agreement(coarse[part]) for part in parts])
        same_fine = np.mean([agreement(fine[part]) for part in parts])
        expected_coarse = (1 + alpha_root) / (1 + 20 * alpha_root)
        expected_fine = expected_coarse * (1 + alpha_leaf) / (1 + 5 * alpha_leaf)
        assert same_coarse == pytest.approx(expected_coarse, rel=0.06)
        assert same_fine == pytest.approx(expected_fine, rel=0.06)


def agreement(labels: np.ndarray) -> float:
    """The share of pairs of examples with one label."""
    counts = np.unique(labels, return_counts=True)[1]
    return float((counts * (counts - 1)).sum() / (len(labels) * (len(labels) - 1)))


def test_a_used_up_fine_label_leaves_its_odds_to_others_of_its_coarse_label():
    # Two coarse labels; label 0 has one example only. Whoever draws its coarse label draws label 1 instead.
    fine = np.array([0] + [1] * 4000 + [2] * 4000 + [3] * 4000)
    parts = pachinko(fine, fine // 2, num_clients=100, per_client=40, alpha_root=1000.0, alpha_leaf=1000.0, seed=0)
    drawn = fine[np.concatenate(parts)]
    assert np.mean(drawn // 2 == 0) == pytest.approx(0.5, abs=0.03)
    assert np.mean(drawn == 2) == pytest.approx(0.25, abs=0.03)


def test_pachinko_refuses_what_cannot_be_dealt():
    fine, coarse = hierarchy(per_label=2)
    for num_clients, per_client in ((0, 5), (5, 0), (201, 1), (2, 101)):
        with pytest.raises(FedeveError, match="200 examples cannot be dealt"):
            pachinko(fine, coarse, num_clients=num_clients, per_client=per_client)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(FedeveError, match="above 0"):
            pachinko(fine, coarse, num_clients=2, per_client=2, alpha_root=alpha)
        with pytest.raises(FedeveError, match="above 0"):
            pachinko(fine, coarse, num_clients=2, per_client=2, alpha_leaf=alpha)
    with pytest.raises(FedeveError, match="one coarse label"):
        pachinko(fine, np.arange(200) % 20, num_clients=2, per_client=2)
