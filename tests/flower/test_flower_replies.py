"""Replies are checked before arithmetic: what is wrong is named and left out, the rest counts as if alone."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from local_grid import LocalGrid, replying

from fedeve import FedAvg, FedEve, FedProx, Scaffold
from fedeve.flower import MethodStrategy

INITIAL = {"w": np.zeros((3, 2), dtype=np.float32), "b": np.ones(2, dtype=np.float32)}
SHIFTS = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)


def initial() -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in INITIAL.items()})


def moved(partition: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    shift = SHIFTS[partition]
    return {"w": arrays["w"] + shift[:6].reshape(3, 2), "b": arrays["b"] + shift[6:]}


honest = replying(moved, weight=lambda partition: partition + 1)


def play(answer, *, num_nodes: int = 5, rounds: int = 1, method=None, **options):
    strategy = MethodStrategy(
        method or FedAvg(), fraction_evaluate=0.0, min_available_nodes=num_nodes, seed=3, **options
    )
    result = strategy.start(LocalGrid(answer, num_nodes), initial(), num_rounds=rounds, timeout=0.3)
    return strategy, result


def with_content(change):
    """Node 2 changes its reply, everybody else is honest."""

    def answer(message, partition):
        reply = honest(message, partition)
        if partition != 2:
            return reply
        content = reply.content
        changed = change(content)
        return Message(content=changed if isinstance(changed, RecordDict) else content, reply_to=message)

    return answer


def put(name: str, array: Array):
    return lambda content: content["arrays"].__setitem__(name, array)


def metric(value):
    return lambda content: content.__setitem__("metrics", MetricRecord({"num-examples": value}))


def with_header(claimed: tuple[int, ...], data: bytes = b"") -> Array:
    """An array whose own header promises another shape than the record."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": claimed})
    return Array("float32", (2,), "numpy.ndarray", stream.getvalue() + data)


WRONG = {
    "no arrays": (lambda c: RecordDict({"metrics": c["metrics"]}), "0 array records"),
    "two array records": (lambda c: c.__setitem__("more", ArrayRecord({})), "2 array records"),
    "no metrics": (lambda c: RecordDict({"arrays": c["arrays"]}), "0 metric records"),
    "two metric records": (lambda c: c.__setitem__("more", MetricRecord({"x": 1})), "2 metric records"),
    "a missing array": (lambda c: c["arrays"].pop("b"), "misses 'b'"),
    "an array too many": (put("c", Array(np.zeros(1))), "has 'c' too many"),
    "another shape": (put("b", Array(np.zeros(3, dtype=np.float32))), "has shape (3,) instead of (2,)"),
    "another dtype": (put("b", Array(np.zeros(2))), "has dtype float64 instead of float32"),
    "whole numbers": (put("b", Array(np.zeros(2, dtype=np.int32))), "has dtype int32"),
    "NaN": (put("b", Array(np.array([0, np.nan], dtype=np.float32))), "'b' is not finite"),
    "infinity": (put("b", Array(np.array([0, -np.inf], dtype=np.float32))), "'b' is not finite"),
    "no bytes": (put("b", Array("float32", (2,), "numpy.ndarray", b"")), "cannot be read"),
    "other bytes": (put("b", Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{'d")), "cannot be read"),
    "a pickle": (put("b", Array("float32", (2,), "pickle", b"cos\nsystem\n")), "unknown format"),
    "a header that promises terabytes": (put("b", with_header((10**12,))), "which is not what it says"),
    "too few bytes": (put("b", with_header((2,), b"\0\0\0\0")), "wrong number of bytes"),
    "too many bytes": (put("b", with_header((2,), bytes(400))), "wrong number of bytes"),
    "zero examples": (metric(0), "says num-examples = 0"),
    "a negative count": (metric(-3), "says num-examples = -3"),
    "an absurd count": (metric(10**18), "more than 1e+09"),
    "a count that is NaN": (metric(float("nan")), "says num-examples = nan"),
    "an infinite count": (metric(float("inf")), "says num-examples = inf"),
    "a list as count": (metric([1, 2]), "has no number under 'num-examples'"),
    "no count": (lambda c: c.__setitem__("metrics", MetricRecord({"loss": 1.0})), "has no number under 'num-examples'"),
    "an update a thousand times the median": (
        put("b", Array(np.array([1e6, 0], dtype=np.float32))), "times the median"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_reply_is_named_and_left_out_and_the_others_count_as_if_it_were_not_there(what):
    change, reason = WRONG[what]
    strategy, result = play(with_content(change))
    assert len(strategy.left_out[1]) == 1
    assert reason in strategy.left_out[1][0].reason
    assert strategy.nodes.number(strategy.left_out[1][0].node) == 2
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["server/asked"], metrics["server/answered"], metrics["server/left_out"]) == (5, 4, 1)
    without, _ = play(lambda message, partition: None if partition == 2 else honest(message, partition))
    assert torch.equal(strategy.state.params, without.state.params)
    weights, losses = np.array([1, 2, 4, 5]), np.array([0, 1, 3, 4])
    assert metrics["loss"] == pytest.approx((weights * losses).sum() / weights.sum())


def test_a_node_that_fails_is_named(caplog):
    def answer(message, partition):
        if partition != 2:
            return honest(message, partition)
        return Message(Error(code=1, reason="out of memory"), reply_to=message)

    strategy, _ = play(answer)
    assert strategy.left_out[1][0].reason == "failed: out of memory"
    assert strategy.nodes.number(strategy.left_out[1][0].node) == 2


def test_a_mean_is_the_weighted_one_and_keeps_names_shapes_and_dtypes():
    _, result = play(honest)
    weights = np.arange(1, 6) / 15
    expected = (weights[:, None] * SHIFTS[:5].astype(np.float64)).sum(0)
    arrays = {name: array.numpy() for name, array in result.arrays.items()}
    assert list(arrays) == ["w", "b"]
    np.testing.assert_allclose(arrays["w"].reshape(-1), expected[:6], rtol=1e-6)
    np.testing.assert_allclose(arrays["b"], 1 + expected[6:], rtol=1e-6)
    assert {array.dtype for array in arrays.values()} == {np.dtype("float32")}


def test_arrays_in_columns_first_are_read_rightly():
    def answer(message, partition):
        reply = honest(message, partition)
        reply.content["arrays"]["w"] = Array(np.asfortranarray(reply.content["arrays"]["w"].numpy()))
        return reply

    assert torch.equal(play(answer)[0].state.params, play(honest)[0].state.params)


# Lost rounds.


def test_with_too_few_good_replies_the_state_stays_and_the_round_is_reported_as_lost():
    def answer(message, partition):
        if message.content["config"]["server-round"] == 2 and partition > 1:
            return None
        return honest(message, partition)

    strategy, result = play(answer, rounds=2, min_replies=3, method=FedEve())
    one, _ = play(honest, rounds=1, method=FedEve())
    assert strategy.lost == {2: "2 good replies, 3 needed"}
    assert result.train_metrics_clientapp[2]["server/lost"] == 1
    for name in one.state._fields:
        assert torch.equal(getattr(strategy.state, name), getattr(one.state, name))
    np.testing.assert_array_equal(result.arrays["b"].numpy(), strategy.arrays()["b"].numpy())


def test_nobody_answering_loses_the_round():
    strategy, _ = play(lambda message, partition: None)
    assert strategy.lost == {1: "0 good replies, 1 needed"}
    assert torch.equal(strategy.state.params, torch.tensor([0.0] * 6 + [1.0] * 2))


def test_a_step_that_would_not_be_finite_loses_the_round():
    def answer(message, partition):
        arrays = {"w": np.full((3, 2), 3e38, dtype=np.float32), "b": np.ones(2, dtype=np.float32)}
        return replying(lambda *_: arrays, weight=lambda _: 1)(message, partition)

    strategy, _ = play(answer, method=FedAvg(server_lr=2.0))
    assert strategy.lost == {1: "the new state would not be finite"}
    assert torch.isfinite(strategy.state.params).all()


# Outliers and clipping.


def scaled(factor):
    """Replies whose partition-th is scaled by a factor."""

    def make(partition, arrays):
        shift = SHIFTS[partition] / np.linalg.norm(SHIFTS[partition]) * factor(partition)
        return {"w": arrays["w"] + shift[:6].reshape(3, 2), "b": arrays["b"] + shift[6:]}

    return replying(make, weight=lambda _: 1)


@pytest.mark.parametrize("size", [900.0, 1100.0])
def test_the_threshold_is_a_thousand_medians_of_those_that_moved(size):
    strategy, _ = play(scaled(lambda k: size if k == 4 else 1.0 if k < 4 else 0.0), num_nodes=9)
    assert (1 in strategy.left_out) == (size > 1000)
    if size > 1000:
        assert "1100 times the median" in strategy.left_out[1][0].reason


def test_the_threshold_can_be_set_and_switched_off():
    assert play(scaled(lambda k: 20.0 if k == 0 else 1.0), outlier=10.0)[0].left_out
    assert not play(scaled(lambda k: 2000.0 if k == 0 else 1.0), outlier=None)[0].left_out


def test_more_outliers_than_can_be_held_lose_the_round():
    few, _ = play(scaled(lambda k: 1e5 if k < 3 else 1.0), num_nodes=12, max_outliers=3)
    assert len(few.left_out[1]) == 3 and not few.lost
    many, _ = play(scaled(lambda k: 1e5 if k < 4 else 1.0), num_nodes=12, max_outliers=3)
    assert "more than 3 replies" in many.lost[1]
    assert torch.equal(many.state.params, torch.tensor([0.0] * 6 + [1.0] * 2))


@pytest.mark.parametrize("max_outliers", [1, 2, 5, 20])
def test_how_many_are_held_aside_changes_nothing_but_rounding(max_outliers):
    strategy, _ = play(honest, num_nodes=12, max_outliers=max_outliers, method=FedEve())
    other, _ = play(honest, num_nodes=12, outlier=None, method=FedEve())
    torch.testing.assert_close(strategy.state.params, other.state.params, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(strategy.state.variance, other.state.variance, rtol=1e-9, atol=0)


def test_updates_are_clipped_to_the_norm_that_was_asked_for():
    strategy, result = play(scaled(lambda k: 5.0 if k == 0 else 0.5), clip_norm=1.0)
    units = SHIFTS[:5].astype(np.float64) / np.linalg.norm(SHIFTS[:5], axis=1, keepdims=True)
    mean = (units * np.array([1.0, 0.5, 0.5, 0.5, 0.5])[:, None]).mean(0)
    start = np.array([0.0] * 6 + [1.0] * 2)
    np.testing.assert_allclose(strategy.state.params.numpy(), start + mean, rtol=1e-4, atol=1e-6)
    assert result.train_metrics_clientapp[1]["server/clipped"] == 1


def test_memory_holds_a_few_replies_however_many_come():
    network = LocalGrid(honest_many, 200)
    strategy = MethodStrategy(FedEve(), fraction_evaluate=0.0, window=4, max_outliers=8)
    strategy.start(network, initial(), num_rounds=1)
    assert network.asked == [network.asked[0]] and len(network.asked[0]) == 200
    assert network.most_alive <= 4 + 2  # those fetched early, and the one in hand
    assert network.alive == 0


def honest_many(message, partition):
    return replying(lambda k, a: moved(k % 12, a), weight=lambda _: 1)(message, partition)


# Clients that know nothing of fedeve.


def test_they_are_left_out_where_gradients_must_be_corrected():
    strategy, _ = play(honest, method=FedProx())
    assert all("was not corrected for fedprox" in one.reason for one in strategy.left_out[1])
    assert strategy.lost


def test_they_are_left_out_where_more_than_updates_is_needed():
    def answer(message, partition):
        reply = honest(message, partition)
        reply.content["fedeve"] = ConfigRecord({"method": "scaffold"})
        return reply

    strategy, _ = play(answer, method=Scaffold())
    assert all("misses 'control'" in one.reason for one in strategy.left_out[1])


# Anything at all.

numbers = st.one_of(st.integers(-(2**62), 2**62), st.floats(width=64, allow_nan=True, allow_infinity=True))
names = st.sampled_from(["w", "b", "num-examples", "loss", "", "fedeve", "x"])
shapes = st.sampled_from([(3, 2), (2,), (2, 3), (), (0,), (10**9,), (-1,)])


def array_of(dtype: str, shape: tuple[int, ...], seed: int, scale: float) -> Array:
    with np.errstate(all="ignore"):
        return Array(np.asarray(np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype))


arrays_of_numbers = st.builds(
    array_of,
    st.sampled_from(["float32", "float64", "float16", "int64", "bool", ">f4", "complex64"]),
    st.sampled_from([(3, 2), (2,), (2, 3), (), (0,)]),
    st.integers(0, 99),
    st.sampled_from([0.0, 1.0, 1e-30, 1e30, float("inf"), float("nan")]),
)  # fmt: skip
raw = st.builds(
    Array,
    st.sampled_from(["float32", "float64", "", "object"]),
    shapes,
    st.sampled_from(["numpy.ndarray", "pickle", ""]),
    st.one_of(
        st.binary(max_size=200), st.just(with_header((2,), bytes(8)).data), st.just(with_header((3, 2), bytes(24)).data)
    ),
)
array_records = st.dictionaries(names, st.one_of(arrays_of_numbers, raw), max_size=3).map(ArrayRecord)
metric_records = st.dictionaries(names, st.one_of(numbers, st.lists(numbers, max_size=3)), max_size=3)
metric_records = metric_records.filter(
    lambda d: all(not isinstance(v, list) or len({type(x) for x in v}) <= 1 for v in d.values())
).map(MetricRecord)
config_records = st.dictionaries(names, st.one_of(st.text(max_size=5), st.integers(-5, 5)), max_size=2).map(
    ConfigRecord
)
contents = st.dictionaries(
    st.sampled_from(["arrays", "metrics", "config", "fedeve", "fedeve.extras", "more"]),
    st.one_of(array_records, metric_records, config_records),
    max_size=4,
).map(RecordDict)
nearly_right = st.builds(
    lambda w, b, count, extra: RecordDict(
        {"arrays": ArrayRecord({"w": w, "b": b}), "metrics": MetricRecord({"num-examples": count, "loss": extra})}
    ),
    arrays_of_numbers,
    arrays_of_numbers,
    numbers,
    numbers,
)
replies = st.one_of(contents, nearly_right, st.none())


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    made=st.lists(st.one_of(replies, st.just("honest")), min_size=10, max_size=10),
    which=st.sampled_from(["fedeve", "fedavg", "scaffold", "fedadam"]),
)
def test_no_reply_whatever_crashes_the_server_or_puts_nan_into_the_state(made, which):
    from fedeve import methods

    def answer(message, partition):
        content = made[partition]
        if content == "honest":
            return honest(message, partition)
        if content is None:
            return Message(Error(code=0, reason="failed"), reply_to=message)
        return Message(content=content, reply_to=message)

    strategy, result = play(answer, num_nodes=10, method=methods.create(which))
    metrics = result.train_metrics_clientapp[1]
    assert all(torch.isfinite(tensor).all() for tensor in strategy.state)
    assert metrics["server/answered"] + metrics["server/left_out"] == metrics["server/asked"] == 10
    assert len(strategy.left_out.get(1, [])) == metrics["server/left_out"]
    if metrics["server/lost"]:
        assert torch.equal(strategy.state.params, torch.tensor([0.0] * 6 + [1.0] * 2))
