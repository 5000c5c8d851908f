"""Flower gives what the reference simulator gives, for every method the folder scan finds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from digits_federation import NUM_NODES, app, initial_arrays, make_run
from flwr.serverapp.strategy import Result, Strategy
from local_grid import LocalGrid, clients

from fedeve import FedEve, Method, Scaffold, all_methods, simulate
from fedeve.flower import MethodStrategy

METHODS = {name: cls() for name, cls in all_methods().items()}
METHODS |= {"fedeve-released": FedEve(drift="released"), "scaffold-released": Scaffold(control="released")}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def strategy_of(method: Method, **options) -> MethodStrategy:
    defaults = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "min_available_nodes": NUM_NODES, "seed": 11}
    return MethodStrategy(method, **(defaults | options))


def play(method: Method, grid: LocalGrid, *, rounds: int = 3, **options) -> tuple[MethodStrategy, Result]:
    strategy = strategy_of(method, **options)
    return strategy, strategy.start(grid, initial_arrays(make_run(method)), num_rounds=rounds)


def grid(**options) -> LocalGrid:
    return LocalGrid(clients(app, NUM_NODES), NUM_NODES, **options)


@every_method
def test_a_federation_has_the_parameters_of_the_reference_simulator(method):
    strategy, result = play(method, grid())
    record = simulate(dataclasses.replace(make_run(method), watch_drift=False), engine="reference", device="cpu")
    torch.testing.assert_close(strategy.state.params, record.params, rtol=1e-5, atol=1e-7)
    error = (strategy.state.params - record.params).norm() / record.params.norm()
    assert error < 1e-5
    for fact in record.lines[-1]["facts"]:
        told = [result.train_metrics_clientapp[number][f"server/{fact}"] for number in (1, 2, 3)]
        assert told == pytest.approx(record.facts(fact).tolist(), rel=1e-3)


@every_method
def test_two_runs_have_identical_bits_whatever_order_replies_and_node_ids_come_in(method):
    first, _ = play(method, grid())
    second, _ = play(method, grid(late=5, ids=9))
    for name in first.state._fields:
        assert torch.equal(getattr(first.state, name), getattr(second.state, name)), name


@every_method
def test_flowers_own_loop_gives_the_same_bits(method):
    ours, _ = play(method, grid())
    theirs = strategy_of(method)
    Strategy.start(theirs, grid(late=3), initial_arrays(make_run(method)), num_rounds=3)
    assert torch.equal(ours.state.params, theirs.state.params)


def test_cohorts_are_those_of_a_run_with_that_seed():
    network = grid()
    play(FedEve(), network)
    assert network.asked == [make_run().cohort_of(round).tolist() for round in range(3)]


def test_cohorts_do_not_depend_on_who_connects_first():
    class Trickling(LocalGrid):
        looks = 0

        def get_nodes(self):
            self.looks += 1
            return list(super().get_nodes())[: 3 * self.looks]  # the last to register are the first to connect

    network = Trickling(clients(app, NUM_NODES), NUM_NODES)
    play(FedEve(), network, rounds=2)
    assert network.looks >= 3
    assert network.asked == [make_run().cohort_of(round).tolist() for round in range(2)]


def test_asked_for_their_partitions_nodes_are_numbered_by_them():
    class Backwards(LocalGrid):
        def get_nodes(self):
            infos = list(super().get_nodes())
            for place, info in enumerate(infos):  # registered in another order than their partitions
                info.registered_at = f"{place:03d}"
            return infos

    network = Backwards(clients(app, NUM_NODES), NUM_NODES)
    strategy, _ = play(FedEve(), network, nodes="ask")
    expected, _ = play(FedEve(), grid())
    assert torch.equal(strategy.state.params, expected.state.params)


def test_a_node_that_does_not_say_its_partition_is_not_used(caplog):
    inner = clients(app, NUM_NODES)

    def answer(message, partition):
        if message.metadata.message_type.startswith("query") and partition == 3:
            from flwr.app import Message, RecordDict

            return Message(content=RecordDict(), reply_to=message)
        return inner(message, partition)

    network = LocalGrid(answer, NUM_NODES)
    play(FedEve(), network, nodes="ask", fraction_train=1.0, min_available_nodes=2, rounds=1)
    assert sorted(network.asked[1]) == [0, 1, 2, 4, 5, 6, 7]
