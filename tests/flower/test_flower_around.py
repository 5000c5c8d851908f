"""What goes around our strategies, and what they go around: privacy, the drift monitor, sums in place of replies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

import digits_federation
import flwr.serverapp.strategy as theirs
from digits_federation import NUM_NODES, initial_arrays, make_run
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from local_grid import LocalGrid, clients
from playing import OPTIONS, flat, played, same

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
