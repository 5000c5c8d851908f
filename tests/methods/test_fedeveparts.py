"""FedEve taken apart: put together it is FedEve, and each part taken away leaves a method with a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedeve import FedAvg, FedAvgM, FedEve, FedeveError, FedEveParts, Layout, Method, Run, Summary, simulate
from fedeve.data import datasets

DIM = 9


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def played(method: Method, *, num_rounds: int = 20, dtype: torch.dtype = torch.float64) -> list[Any]:
    """What is sent, the state and the facts of rounds with unequal weights, one of them zero."""
    state, out = method.init(normal(DIM, seed=1, dtype=dtype)), []
    for seed in range(num_rounds):
        updates = 0.3 + normal(6, DIM, seed=10 + seed, dtype=dtype)
        weights = torch.tensor([1.0, 2.0, 0.0, 30.0, 4.0, 7.0])
        sent = method.send(state)
        extras, _ = method.finish(updates, 1, 0.1, sent, {})
        state, facts = method.step(state, Summary.of(updates, weights, extras))
        out.append((sent.params, state, facts))
    return out


def assert_same(ours: Method, theirs: Method, *, rtol: float = 1e-12, dtype: torch.dtype = torch.float64) -> None:
    for (sent, state, facts), (their_sent, their_state, their_facts) in zip(
        played(ours, dtype=dtype), played(theirs, dtype=dtype), strict=True
    ):
        torch.testing.assert_close(sent, their_sent, rtol=rtol, atol=rtol)
        torch.testing.assert_close(state.params, their_state.params, rtol=rtol, atol=rtol)
        for name, fact in their_facts.items():
            torch.testing.assert_close(facts[name], fact, rtol=10 * rtol, atol=0)


@pytest.mark.parametrize("drift", ["paper", "released"])
def test_at_its_defaults_it_is_fedeve_bit_for_bit(drift: str) -> None:
    for dtype in (torch.float32, torch.float64):
        assert_same(FedEveParts(drift=drift), FedEve(drift=drift), rtol=0, dtype=dtype)


@pytest.mark.parametrize("drift", ["paper", "released"])
def test_one_block_of_all_parameters_is_fedeve_whatever_the_weights(drift: str) -> None:
    assert_same(FedEveParts(drift=drift, layers=str(DIM)), FedEve(drift=drift))
    assert_same(FedEveParts(drift=drift, layers=str(DIM)), FedEve(drift=drift), rtol=2e-6, dtype=torch.float32)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_a_fixed_gain_without_look_ahead_is_server_momentum(beta: float) -> None:
    assert_same(FedEveParts(gain=1 - beta, look_ahead=False, server_lr=1.3), FedAvgM(beta=beta, server_lr=1.3))


def test_gain_one_without_look_ahead_is_averaging() -> None:
    assert_same(FedEveParts(gain=1.0, look_ahead=False), FedAvg())


def test_without_look_ahead_only_the_start_differs() -> None:
    for (start, state, _), (_, their_state, _) in zip(
        played(FedEveParts(look_ahead=False)), played(FedEve()), strict=True
    ):
        assert torch.equal(state.params, their_state.params)  # the same updates, wherever they came from
        assert not torch.equal(start, state.params)


def test_every_block_has_the_gain_of_a_fedeve_of_its_own() -> None:
    sizes = (4, 1, 4)
    whole = played(FedEveParts(layers="4, 1, 4"))
    for number in range(3):
        cut = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
        alone = FedEve()
        state = alone.init(normal(DIM, seed=1)[cut])
        for seed, (sent, together, _) in enumerate(whole):
            torch.testing.assert_close(alone.send(state).params, sent[cut], rtol=1e-11, atol=1e-12)
            updates = (0.3 + normal(6, DIM, seed=10 + seed))[:, cut]
            state, _ = alone.step(state, Summary.of(updates, torch.tensor([1.0, 2.0, 0.0, 30.0, 4.0, 7.0])))
            torch.testing.assert_close(together.variance[number], state.variance, rtol=1e-9, atol=1e-12)


def test_a_gain_of_its_own_for_every_block_stacks_as_lanes_and_keeps_the_number_format() -> None:
    method = FedEveParts(layers="4,5")
    for dtype in (torch.float32, torch.float64):
        starts, updates = normal(3, DIM, seed=1, dtype=dtype), normal(3, 6, DIM, seed=2, dtype=dtype)
        weights = normal(3, 6, seed=3).abs()
        state, facts = method.step(method.init(starts), Summary.of(updates, weights, {"square": updates.square()}))
        assert {tensor.dtype for tensor in state} == {dtype} and state.variance.shape == (3, 2)
        for lane in range(3):
            summary = Summary.of(updates[lane], weights[lane], {"square": updates[lane].square()})
            alone, alone_facts = method.step(method.init(starts[lane]), summary)
            torch.testing.assert_close(state.params[lane], alone.params, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(facts["gain"][lane], alone_facts["gain"], rtol=1e-6, atol=0)


def test_clients_that_agree_leave_no_negative_drift() -> None:
    method = FedEveParts(layers="4,5")
    updates = normal(1, DIM, seed=2).expand(7, DIM) * 1e3
    state, facts = method.step(
        method.init(torch.zeros(DIM, dtype=torch.float64)),
        Summary.of(updates, torch.ones(7), {"square": updates.square()}),
    )
    assert 0 <= float(facts["client_drift"]) < 1e-9 and float(facts["gain"]) == pytest.approx(1)
    assert (state.variance >= 0).all()


@pytest.mark.parametrize("layers", ["4,", "4,x", "0,9", "-1,10", "4;5", "4.0,5"])
def test_what_are_no_sizes_is_refused(layers: str) -> None:
    with pytest.raises(FedeveError, match="layers must be sizes"):
        FedEveParts(layers=layers)


def test_sizes_that_do_not_add_up_to_the_model_are_refused() -> None:
    with pytest.raises(FedeveError, match=r"does not fit the model.*add up to 10.* 9 parameters"):
        FedEveParts(layers="4,6").init(torch.zeros(DIM))


def test_replies_without_squares_are_refused_where_they_are_needed() -> None:
    method = FedEveParts(layers="4,5")
    assert method.replies == ("square",) and FedEveParts().replies == ()
    with pytest.raises(FedeveError, match="needs the clients' squares"):
        method.step(method.init(torch.zeros(DIM)), Summary.of(torch.zeros(2, DIM), torch.ones(2)))


def test_a_gain_per_layer_runs_in_both_engines() -> None:
    data = datasets.load("digits", num_clients=12)
    layers = ",".join(map(str, Layout.of(torch.nn.Linear(64, 10)).sizes))
    run = Run(method=FedEveParts(layers=layers), data=data, model="linear", rounds=4, cohort=5, dtype="float64")
    one, other = (simulate(run, engine=engine, device="cpu") for engine in ("reference", "lanes"))
    torch.testing.assert_close(one.params, other.params, rtol=1e-9, atol=1e-11)
    assert 0 < one.facts("gain")[-1] < 1 and one.facts("client_drift")[-1] > 0
