"""What goes around our strategies, and what they go around: privacy, the drift monitor, sums in place of replies."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

import digits_federation
import flwr.serverapp.strategy as theirs
from digits_federation import NUM_NODES, initial_arrays, make_run
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from local_grid import LocalGrid, clients, replying
from playing import OPTIONS, flat, played, same

import fedeve.flower
from fedeve import FedDyn, FedEve, FedeveError, FedProx, Scaffold, Summary
from fedeve.flower import DriftMonitor, MethodStrategy, SecureStrategy, secure_update

# Differential privacy.


def test_flowers_server_side_privacy_without_noise_is_our_strategy():
    ours = MethodStrategy(FedEve(), **OPTIONS)
    expected = played(ours)
    inner = MethodStrategy(FedEve(), **OPTIONS)
    wrapped = theirs.DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e6, 4)
    result = played(wrapped)
    torch.testing.assert_close(flat(result.arrays), flat(expected.arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ServerSideFixedClipping", "ServerSideAdaptiveClipping"])
def test_flowers_central_privacy_adds_noise_that_our_strategy_takes_over(kind):
    inner = MethodStrategy(FedEve(observation_noise=(0.2 * 1.0 / 4) ** 2), **OPTIONS)
    make = getattr(theirs, f"DifferentialPrivacy{kind}")
    wrapped = make(inner, 0.2, 1.0, 4) if "Fixed" in kind else make(inner, 0.2, 4)
    np.random.seed(0)
    result = played(wrapped, rounds=3)
    assert not inner.lost and not inner.left_out
    returned = flat(result.arrays)
    assert torch.isfinite(returned).all()
    assert not torch.equal(returned, inner.state.params)  # the noise of the last round is on top


def test_flowers_client_side_clipping_works_with_an_ordinary_client():
    from flwr.clientapp.mod import fixedclipping_mod

    plain = ClientApp(mods=[fixedclipping_mod])

    @plain.train()
    def train(message: Message, context: Context) -> Message:
        return digits_federation.train_locally(message, context, corrects=False)

    inner = MethodStrategy(FedEve(), **OPTIONS)
    wrapped = theirs.DifferentialPrivacyClientSideFixedClipping(inner, 0.01, 0.05, 4)
    result = played(wrapped, LocalGrid(clients(plain, NUM_NODES), NUM_NODES))
    assert not inner.lost and not inner.left_out
    assert torch.isfinite(flat(result.arrays)).all()


# DriftMonitor.


def test_a_monitor_around_fedeve_measures_what_fedeve_computes_and_changes_nothing():
    plain, watched = MethodStrategy(FedEve(), **OPTIONS), MethodStrategy(FedEve(), **OPTIONS)
    played(plain, rounds=3)
    result = played(DriftMonitor(watched), rounds=3)
    same(plain, watched)
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["drift/gain"] == metrics["server/gain"]
        assert metrics["drift/client"] == metrics["server/client_drift"]
        assert metrics["drift/period"] == metrics["server/period_drift"]


def test_a_monitor_around_flowers_fedavg_only_measures():
    def start(strategy):
        import random

        random.seed(3)  # Flower draws its cohorts from this
        network = LocalGrid(clients(plain_app(), NUM_NODES), NUM_NODES)
        return strategy.start(network, initial_arrays(make_run()), num_rounds=2)

    options = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "min_available_nodes": NUM_NODES}
    expected, result = start(theirs.FedAvg(**options)), start(DriftMonitor(theirs.FedAvg(**options)))
    assert torch.equal(flat(expected.arrays), flat(result.arrays))
    for number, metrics in result.train_metrics_clientapp.items():
        assert 0 < metrics["drift/gain"] <= 1 and metrics["drift/client"] > 0 and metrics["drift/period"] > 0
        assert metrics["train_loss"] == expected.train_metrics_clientapp[number]["train_loss"]


def plain_app() -> ClientApp:
    plain = ClientApp()

    @plain.train()
    def train(message: Message, context: Context) -> Message:
        return digits_federation.train_locally(message, context, corrects=False)

    return plain


def shifted(change=lambda partition, number, value: value + partition + 1):
    """Replies of clients whose arrays are changed in this way."""
    return lambda message, partition: replying(
        lambda k, arrays: {
            name: change(k, int(message.content["config"]["server-round"]), value).astype(value.dtype)
            for name, value in arrays.items()
        },
        weight=lambda _: 1,
    )(message, partition)


def watch(strategy, answer, *, rounds: int = 1, arrays=None, **more):
    initial = ArrayRecord({n: Array(v) for n, v in (arrays or {"w": np.zeros(3, dtype=np.float32)}).items()})
    return strategy.start(LocalGrid(answer, 4), initial, num_rounds=rounds, **more)


def test_a_monitor_does_not_stop_a_strategy_whose_model_is_not_finite(caplog):
    def change(partition, number, value):
        return value + (np.nan if number == 2 and partition == 0 else partition + 1)

    result = watch(DriftMonitor(theirs.FedAvg(fraction_evaluate=0.0)), shifted(change), rounds=4)
    assert np.isnan(result.arrays["w"].numpy()).all()  # Flower's FedAvg averages it
    assert "drift/gain" in result.train_metrics_clientapp[1] and "drift/gain" not in result.train_metrics_clientapp[3]
    assert sum("the drifts are not measured" in record.getMessage() for record in caplog.records) == 1


def test_a_monitor_does_not_stop_a_strategy_that_grows_trees(caplog):
    trees = {"0": np.frombuffer(b"{}", dtype=np.uint8)}
    answer = replying(lambda k, arrays: trees, weight=lambda _: 1)
    empty = {"0": np.zeros(0, dtype=np.uint8)}
    one = {"fraction_train": 0.25, "min_train_nodes": 1, "fraction_evaluate": 0.0}
    result = watch(DriftMonitor(theirs.FedXgbBagging(**one)), answer, arrays=empty)
    assert result.arrays["0"].numpy().tobytes() == b"{}"
    assert "the drifts are not measured: the model has nothing to train" in caplog.text


def test_a_lost_round_is_not_measured():
    def lossy(strategy):
        def answer(message, partition):
            number = int(message.content["config"]["server-round"])
            return None if number == 2 and partition else shifted()(message, partition)

        return watch(strategy, answer, rounds=3, timeout=0.3)

    inner = MethodStrategy(FedEve(), fraction_evaluate=0.0, min_replies=3)
    result = lossy(DriftMonitor(inner))
    assert inner.lost.keys() == {2} and "drift/gain" not in result.train_metrics_clientapp[2]
    for number in (1, 3):
        metrics = result.train_metrics_clientapp[number]
        assert metrics["drift/gain"] == metrics["server/gain"]
        assert metrics["drift/period"] == metrics["server/period_drift"]


def test_a_monitor_that_is_started_twice_starts_twice():
    monitor = DriftMonitor(theirs.FedAvg(fraction_evaluate=0.0))
    first, second = (dict(watch(monitor, shifted()).train_metrics_clientapp[1]) for _ in range(2))
    assert first == second


def test_a_monitor_leaves_out_the_statistics_that_the_strategy_leaves_out():
    inner = MethodStrategy(FedEve(), fraction_evaluate=0.0, statistics=("ema",))
    arrays = {"w": np.zeros(3, dtype=np.float32), "ema": np.full(2, 9, dtype=np.float32)}
    answer = shifted(lambda k, number, value: value + (k + 1) * len(value))
    metrics = watch(DriftMonitor(inner), answer, arrays=arrays).train_metrics_clientapp[1]
    assert metrics["drift/client"] == metrics["server/client_drift"]


# On sums alone, without the masks: what SecAgg+ hands over, made by hand.


def test_fedeve_on_sums_alone_is_fedeve():
    begun = [np.zeros((3, 2)), np.ones(2)]
    secure, state = SecureStrategy(FedEve(), begun, clip_norm=10.0), None
    state = FedEve().init(secure.state.params)
    rng = np.random.default_rng(0)
    for number in range(1, 5):
        start = secure.arrays(FedEve().send(secure.state).params)
        moves = rng.normal(size=(5, 8))
        ends = [[s + m.reshape(s.shape) for s, m in zip(start, np.split(move, [6]), strict=True)] for move in moves]
        replies = [secure_update(start, end, clip_norm=10.0)[0] for end in ends]
        mean = ndarrays_to_parameters([np.mean(parts, axis=0) for parts in zip(*replies, strict=True)])
        secure.aggregate_fit(number, [(None, FitRes(Status(Code.OK, ""), mean, 1, {}))] * 5, [])
        state, facts = FedEve().step(state, Summary.of(torch.from_numpy(moves), torch.ones(5)))
        assert secure.facts[number]["gain"] == pytest.approx(float(facts["gain"]), rel=1e-9)
    torch.testing.assert_close(secure.state.params, state.params, rtol=1e-9, atol=1e-12)


def test_a_secure_update_is_clipped_and_every_number_fits_the_range():
    start, end = [np.zeros(4)], [np.array([3.0, 4.0, 0.0, 0.0])]
    arrays, weight, _ = secure_update(start, end, clip_norm=1.0)
    np.testing.assert_allclose(arrays[0], [0.6, 0.8, 0.0, 0.0])
    assert arrays[1] == pytest.approx([1.0]) and weight == 1


@pytest.mark.parametrize("method", [Scaffold(), FedProx(), FedDyn()], ids=lambda m: m.name)
def test_methods_that_need_more_than_sums_of_updates_are_refused(method):
    with pytest.raises(FedeveError, match="sums alone"):
        SecureStrategy(method, [np.zeros(2)], clip_norm=1.0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e200])
def test_a_client_whose_training_diverged_drops_out_of_secure_aggregation(wrong):
    with pytest.raises(FedeveError, match="not finite"):
        secure_update([np.zeros(2)], [np.array([0.5, wrong])], clip_norm=1.0)


def sums(strategy: SecureStrategy, number: int, mean: np.ndarray, square: float):
    """What SecAgg+ would hand over for three clients with this mean and this mean square."""
    arrays = ndarrays_to_parameters([mean, np.array([square / strategy.clip_norm])])
    return strategy.aggregate_fit(number, [(None, FitRes(Status(Code.OK, ""), arrays, 1, {}))] * 3, [])


@pytest.mark.parametrize(
    ("mean", "square"),
    [
        ([np.nan, 0.0], 1.0),
        ([0.0, 0.0], np.nan),
        ([0.0, np.inf], 1.0),
        ([2.1, 0.0], 4.0),  # longer than any update
        ([0.0, 0.0], -0.01),
        ([0.0, 0.0], 4.1),  # larger than any square
        ([1.0, 1.0], 1.9),  # smaller than the mean's own square
    ],
)
def test_sums_that_no_clipped_updates_have_lose_the_round(mean, square):
    strategy = SecureStrategy(FedEve(), [np.zeros(2)], clip_norm=2.0)
    assert sums(strategy, 1, np.array(mean), square) == (None, {})
    assert "no clipped updates have these means" in strategy.lost[1]
    assert torch.equal(strategy.state.params, torch.zeros(2, dtype=torch.float64))
    sums(strategy, 2, np.array([0.5, 0.0]), 0.3)
    assert strategy.lost.keys() == {1} and strategy.state.params[0] > 0


def test_sums_at_the_bound_are_taken_whatever_their_rounding():
    rng, step = np.random.default_rng(0), 2 * 2.0 / 2**22
    for number in range(1, 20):
        strategy = SecureStrategy(FedEve(), [np.zeros(1000)], clip_norm=2.0)
        update = rng.normal(size=1000)
        update *= 2.0 / np.linalg.norm(update)  # all three clients moved alike, and as far as they may
        sums(strategy, number, update + rng.uniform(-step, step, 1000), 4.0 + 2.0 * rng.uniform(-step, step))
        assert not strategy.lost


@pytest.mark.parametrize("wrong", [fedeve.flower.FedEve, FedEve, fedeve.flower.FedEve()], ids=["a", "b", "c"])
def test_a_strategy_or_a_class_in_place_of_a_method_is_refused_with_the_right_import(wrong):
    with pytest.raises(FedeveError, match="from fedeve import FedEve"):
        SecureStrategy(wrong, [np.zeros(2)], clip_norm=1.0)


def test_what_the_page_imports_for_secure_aggregation_is_what_it_needs():
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "SecureStrategy(" in text]
    names: dict = {}
    exec("\n".join(line for line in block.splitlines() if line.startswith(("from", "import"))), names)
    assert SecureStrategy(names["FedEve"](), [np.zeros(2)], clip_norm=2.0)
    used = set(re.findall(r"\b([A-Z][A-Za-z]+|secure_update)\(", block))
    assert used == {name for name in names if not name.startswith("__")}
