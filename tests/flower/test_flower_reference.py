"""Flower gives what the reference simulator gives, for every method the folder scan finds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from digits_federation import NUM_NODES, app, initial_arrays, make_run
from flwr.app import Error, Message
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


class Restarted(LocalGrid):
    """After round 1 the SuperNode of partition 2 is there a second time, with a new id; after round 2 the old is gone.

    Flower lists a killed SuperNode until its last heartbeat has lapsed.
    """

    gone: tuple[int, ...] = ()

    def get_nodes(self):
        return [info for info in super().get_nodes() if info.node_id not in self.gone]

    def restart(self, number, arrays) -> None:
        if number == 1:
            self.ids.append(1 + max(self.ids))
        if number == 2:
            self.gone = (self.ids[2],)


def test_a_node_that_comes_back_with_another_id_has_its_partition_again():
    inner = clients(app, NUM_NODES)
    network = Restarted(lambda message, place: inner(message, 2 if place == NUM_NODES else place), NUM_NODES)
    strategy = strategy_of(FedEve(), nodes="ask", fraction_train=1.0, min_available_nodes=2)
    strategy.start(network, initial_arrays(make_run()), num_rounds=3, evaluate_fn=network.restart)
    questions, first, question, second, third = map(sorted, network.asked)
    assert (questions, question) == (list(range(8)), [8])
    assert (first, second, third) == (list(range(8)), list(range(8)), [0, 1, 3, 4, 5, 6, 7, 8])
    assert strategy.nodes.number(network.ids[8]) == 2
    expected, _ = play(FedEve(), grid(), fraction_train=1.0)
    assert torch.equal(strategy.state.params, expected.state.params)


def test_a_node_that_missed_the_question_is_asked_again(caplog):
    inner, missed = clients(app, NUM_NODES), []

    def answer(message, partition):
        if message.metadata.message_type.startswith("query") and partition == 3 and len(missed) < 2:
            missed.append(partition)
            return Message(Error(code=0, reason="busy"), reply_to=message) if len(missed) == 1 else None
        return inner(message, partition)

    network = LocalGrid(answer, NUM_NODES)
    strategy, _ = play(FedEve(), network, nodes="ask", fraction_train=1.0, min_available_nodes=2, rounds=3)
    assert [len(asked) for asked in network.asked] == [8, 7, 1, 7, 1, 8]  # questions and rounds
    assert strategy.nodes.number(network.ids[3]) == 3
    assert caplog.text.count("does not say which partition it holds") == 1
