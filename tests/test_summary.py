"""Summaries against a two-pass computation in extended precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedeve import FedeveError, Summary

modest = settings(max_examples=60, deadline=None, derandomize=True)

FIELDS = ("count", "weight", "mean", "center", "scatter", "spread")


def two_pass(updates: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """What a summary holds, by definition."""
    u, n = updates.astype(np.longdouble), weights.astype(np.longdouble)
    total = n.sum()
    mean = (n[:, None] * u).sum(0) / total if total > 0 else np.zeros(u.shape[1], dtype=np.longdouble)
    center = u.sum(0) / len(u)
    found = {
        "count": np.longdouble(len(u)),
        "weight": total,
        "mean": mean,
        "center": center,
        "scatter": ((u - center) ** 2).sum(),
        "spread": ((u - mean) ** 2).sum(),
    }
    return {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}


def assert_matches(summary: Summary, expected: dict[str, np.ndarray], *, scale: float) -> None:
    """Equal up to rounding at the scale of the updates."""
    tolerance = {"scatter": 1e-9 * scale**2, "spread": 1e-9 * scale**2}
    for name in FIELDS:
        got = getattr(summary, name)
        assert got.dtype == torch.float64
        np.testing.assert_allclose(
            got.numpy(), expected[name], rtol=1e-9, atol=tolerance.get(name, 1e-12 * scale), err_msg=name
        )


def arrays(seed: int, num_clients: int, dim: int, *, offset: float = 0.0, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    updates = offset + scale * rng.normal(size=(num_clients, dim))
    return updates, rng.integers(0, 50, size=num_clients).astype(np.float64)


def of(updates: np.ndarray, weights: np.ndarray, extras: dict[str, np.ndarray] | None = None) -> Summary:
    named = {name: torch.from_numpy(value) for name, value in (extras or {}).items()}
    return Summary.of(torch.from_numpy(updates), torch.from_numpy(weights), named)


def merged_in_random_pairs(parts: list[Summary], rng: np.random.Generator) -> Summary:
    """Two parts at a time, drawn at random, until one is left: any order and any tree."""
    parts = list(parts)
    while len(parts) > 1:
        first = parts.pop(rng.integers(len(parts)))
        second = parts.pop(rng.integers(len(parts)))
        parts.append(first.merge(second))
    return parts[0]


@modest
@given(
    seed=st.integers(0, 10**6),
    num_clients=st.integers(1, 12),
    dim=st.integers(1, 6),
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e4]),
)
def test_a_summary_is_what_two_passes_give(seed, num_clients, dim, scale):
    updates, weights = arrays(seed, num_clients, dim, scale=scale)
    assert_matches(of(updates, weights), two_pass(updates, weights), scale=10 * scale)


@modest
@given(
    updates=st.integers(1, 5).flatmap(
        lambda dim: st.lists(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=dim, max_size=dim), min_size=1, max_size=8
        )
    ),
    data=st.data(),
)
def test_a_summary_of_any_numbers_is_what_two_passes_give(updates, data):
    weights = data.draw(st.lists(st.floats(0, 1e6, width=32), min_size=len(updates), max_size=len(updates)))
    u, n = np.array(updates), np.array(weights)
    # A total below the smallest normal number has lost digits of its own.
    n[n < 1e-30] = 0.0
    assert_matches(of(u, n), two_pass(u, n), scale=float(np.abs(u).max()) + 1e-30)


@modest
@given(seed=st.integers(0, 10**6), num_clients=st.integers(2, 15), chunk=st.integers(1, 5))
def test_grouping_and_order_change_nothing_but_rounding(seed, num_clients, chunk):
    updates, weights = arrays(seed, num_clients, 4)
    extras = {"control": np.random.default_rng(seed + 1).normal(size=updates.shape)}
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_clients)
    groups = np.split(order, range(chunk, num_clients, chunk))
    parts = [of(updates[g], weights[g], {"control": extras["control"][g]}) for g in groups]
    merged = merged_in_random_pairs(parts, rng)
    assert_matches(merged, two_pass(updates, weights), scale=10.0)
    np.testing.assert_allclose(merged.extras["control"], extras["control"].mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("how", ["at once", "one by one", "in random pairs"])
@pytest.mark.parametrize("seed", range(4))
def test_the_spread_is_exact_where_the_mean_dominates_it_by_a_million(dtype, how, seed):
    updates, weights = arrays(seed, 30, 20, offset=1e6 if dtype == np.float64 else 1e3, scale=1.0)
    if dtype == np.float32:  # float32 has 7 digits: a mean of 1000 and differences of 0.001, on its own grid
        updates = 1e3 + (updates - 1e3) * 1e-3
    updates, weights = updates.astype(dtype), weights + 1
    expected = two_pass(updates, weights)
    assert np.abs(expected["mean"]).min() > 0.9e6 * np.sqrt(expected["spread"] / updates.size)
    singles = [of(updates[k : k + 1], weights[k : k + 1]) for k in range(len(updates))]
    summary = {
        "at once": lambda: of(updates, weights),
        "one by one": lambda: Summary.merged(singles),
        "in random pairs": lambda: merged_in_random_pairs(singles, np.random.default_rng(seed)),
    }[how]()
    for name in ("spread", "scatter"):
        assert abs(float(getattr(summary, name)) / expected[name] - 1) < 1e-6, name
    np.testing.assert_allclose(summary.mean, expected["mean"], rtol=1e-14)


def test_merged_goes_from_left_to_right():
    updates, weights = arrays(0, 5, 3)
    singles = [of(updates[k : k + 1], weights[k : k + 1] + 1) for k in range(5)]
    by_hand = singles[0].merge(singles[1]).merge(singles[2]).merge(singles[3]).merge(singles[4])
    merged = Summary.merged(iter(singles))
    assert all(torch.equal(getattr(merged, name), getattr(by_hand, name)) for name in FIELDS)


def test_one_client_is_its_own_mean_to_the_last_bit():
    update = torch.tensor([[0.1, 1 / 3, -7e10]], dtype=torch.float64)
    for weight in (1.0, 3.0, 1e9):
        summary = Summary.of(update, torch.tensor([weight]))
        assert torch.equal(summary.mean, update[0])
        assert summary.spread == 0
        assert summary.count == 1


def test_a_client_of_weight_zero_counts_in_the_spread_but_not_in_the_mean():
    updates = np.array([[1.0, 0.0], [3.0, 0.0], [100.0, 0.0]])
    summary = of(updates, np.array([1.0, 1.0, 0.0]))
    assert summary.mean.tolist() == pytest.approx([2.0, 0.0])
    assert summary.count == 3
    assert summary.spread.item() == pytest.approx(1 + 1 + 98**2)


@pytest.mark.parametrize("first", [0.0, 2.0])
@pytest.mark.parametrize("second", [0.0, 3.0])
def test_zero_weights_merge_on_either_side(first, second):
    updates, weights = np.array([[1.0, 2.0], [5.0, -1.0]]), np.array([first, second])
    merged = of(updates[:1], weights[:1]).merge(of(updates[1:], weights[1:]))
    assert_matches(merged, two_pass(updates, weights), scale=1.0)


def test_all_weights_zero_give_a_mean_of_zero():
    updates = np.array([[1.0, 2.0], [5.0, -1.0]])
    summary = of(updates, np.zeros(2))
    assert summary.mean.tolist() == [0.0, 0.0]
    assert summary.weight == 0
    assert summary.center.tolist() == [3.0, 0.5]
    assert summary.spread.item() == pytest.approx((updates**2).sum())


@modest
@given(seed=st.integers(0, 10**6), num_lanes=st.integers(1, 4))
def test_leading_axes_are_lanes(seed, num_lanes):
    rng = np.random.default_rng(seed)
    updates, weights = rng.normal(size=(2, num_lanes, 5, 3)), rng.integers(0, 4, size=(2, num_lanes, 5)).astype(float)
    extras = {"control": rng.normal(size=updates.shape)}
    parts = [slice(0, 2), slice(2, 5)]
    together = Summary.merged(
        [of(updates[:, :, p], weights[:, :, p], {"control": extras["control"][:, :, p]}) for p in parts]
    )
    assert together.mean.shape == (2, num_lanes, 3)
    assert together.spread.shape == together.count.shape == (2, num_lanes)
    for i in range(2):
        for lane in range(num_lanes):
            expected = two_pass(updates[i, lane], weights[i, lane])
            for name in FIELDS:
                got = getattr(together, name)[i, lane]
                np.testing.assert_allclose(got, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
            np.testing.assert_allclose(together.extras["control"][i, lane], extras["control"][i, lane].mean(0))


@modest
@given(seed=st.integers(0, 10**6), num_clients=st.integers(1, 6), dim=st.integers(1, 12), block=st.integers(1, 5))
def test_a_large_model_is_summarised_in_blocks(seed, num_clients, dim, block):
    updates, weights = arrays(seed, num_clients, dim)
    extras = {"control": np.random.default_rng(seed + 1).normal(size=updates.shape)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedeve.summary._BLOCK", block)
        summary = of(updates, weights, extras)
        agreed = of(np.repeat(updates[:1], 5, axis=0), np.arange(1.0, 6.0))
    assert_matches(summary, two_pass(updates, weights), scale=10.0)
    np.testing.assert_allclose(summary.extras["control"], extras["control"].mean(0), rtol=1e-12, atol=1e-14)
    assert agreed.spread == 0  # to the last bit, in every block


def test_merging_changes_neither_part():
    first, second = of(*arrays(0, 3, 2)), of(*arrays(1, 4, 2))
    before = [getattr(part, name).clone() for part in (first, second) for name in FIELDS]
    first.merge(second)
    after = [getattr(part, name) for part in (first, second) for name in FIELDS]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_whole_numbers_do_as_weights():
    updates = torch.tensor([[1.0], [4.0]])
    assert Summary.of(updates, torch.tensor([1, 2])).mean.item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("updates", "weights"),
    [((3, 2), (4,)), ((3, 2), (3, 1)), ((3,), (3,)), ((0, 2), (0,)), ((2, 3, 4), (3,)), ((3, 2), ())],
)
def test_updates_and_weights_that_do_not_fit_are_refused(updates, weights):
    with pytest.raises(FedeveError, match="do not fit together"):
        Summary.of(torch.zeros(updates), torch.ones(weights))


@pytest.mark.parametrize("shape", [(3, 3), (2, 2), (3,)])
def test_extras_that_do_not_fit_the_updates_are_refused(shape):
    with pytest.raises(FedeveError, match="'control' does not fit"):
        Summary.of(torch.zeros(3, 2), torch.ones(3), {"control": torch.zeros(shape)})


@pytest.mark.parametrize("bad", [-1.0, -1e-300, float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_negative_or_not_finite_are_refused(bad):
    with pytest.raises(FedeveError, match="finite and not negative"):
        Summary.of(torch.zeros(3, 2), torch.tensor([1.0, bad, 1.0], dtype=torch.float64))


def test_negative_whole_weights_are_refused():
    with pytest.raises(FedeveError, match="finite and not negative"):
        Summary.of(torch.zeros(2, 2), torch.tensor([1, -1]))


def test_summaries_of_different_models_are_not_merged():
    with pytest.raises(FedeveError, match="different models"):
        of(*arrays(0, 3, 2)).merge(of(*arrays(0, 3, 4)))


def test_summaries_with_different_extras_are_not_merged():
    plain = of(*arrays(0, 3, 2))
    with_extras = of(*arrays(0, 3, 2), {"control": np.zeros((3, 2))})
    with pytest.raises(FedeveError, match="different models"):
        plain.merge(with_extras)


# From sums alone, as secure aggregation gives them.


@modest
@given(seed=st.integers(0, 10**6), num_clients=st.integers(1, 15), dim=st.integers(1, 6))
def test_sums_alone_give_the_summary_of_clients_of_equal_weight(seed, num_clients, dim):
    updates, _ = arrays(seed, num_clients, dim)
    extras = np.random.default_rng(seed + 1).normal(size=updates.shape)
    full = of(updates, np.ones(num_clients), {"control": extras})
    sums = Summary.from_sums(
        num_clients, torch.from_numpy(updates.sum(0)), (updates**2).sum(), {"control": torch.from_numpy(extras.sum(0))}
    )
    for name in FIELDS:
        np.testing.assert_allclose(getattr(sums, name), getattr(full, name), rtol=1e-9, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(sums.extras["control"], full.extras["control"], rtol=1e-9, atol=1e-12)


def test_sums_of_lanes_are_summaries_of_lanes():
    updates = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    full = Summary.of(updates, torch.ones(3, 5))
    sums = Summary.from_sums(torch.full((3,), 5.0), updates.sum(1), updates.square().sum((1, 2)))
    for name in FIELDS:
        torch.testing.assert_close(getattr(sums, name), getattr(full, name), rtol=1e-9, atol=1e-9)


def test_clients_that_agree_have_no_spread_even_from_sums():
    update = torch.full((7,), 0.1, dtype=torch.float64)
    summary = Summary.from_sums(10, 10 * update, 10 * update.square().sum() * (1 - 1e-15))
    assert summary.spread == 0


@pytest.mark.parametrize("bad", [(0, 1.0), (2, -1.0), (2, float("nan")), (2, float("inf"))])
def test_what_cannot_be_sums_is_refused(bad):
    count, squares = bad
    with pytest.raises(FedeveError, match="no sums of updates"):
        Summary.from_sums(count, torch.ones(3), squares)


def test_a_sum_that_is_not_finite_is_refused():
    with pytest.raises(FedeveError, match="no sums of updates"):
        Summary.from_sums(2, torch.tensor([1.0, float("nan")]), 1.0)
