"""The hooks of a strategy, as the SuperLink, Flower's loop and subclasses use them."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import Strategy
from local_grid import LocalGrid, replying

from fedeve.flower import FedAvg

honest = replying(lambda k, arrays: {"w": arrays["w"] + k + 1}, weight=lambda _: 1)


def start(strategy: Strategy, answer=honest, *, num_nodes: int = 4, rounds: int = 1, loop=None, grid=LocalGrid, **more):
    network = grid(answer, num_nodes)
    initial = ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))})
    return (loop or type(strategy).start)(strategy, network, initial, num_rounds=rounds, timeout=0.3, **more)


# Whose a reply is.


def unavailable(message: Message, kind: str) -> Message | None:
    """What the SuperLink answers for a node that is gone: an error of its own, whose sender is the SuperLink."""
    if not message.metadata.message_type.startswith(kind):
        return None
    reply = Message(Error(code=3, reason="Node Unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 1
    return reply


def dead(kind: str):
    def answer(message, partition):
        return (unavailable(message, kind) if partition == 2 else None) or honest(message, partition)

    return answer


@pytest.mark.parametrize("loop", [None, Strategy.start], ids=["ours", "flowers"])
def test_what_the_superlink_says_about_a_dead_node_is_put_down_to_that_node_and_once(loop):
    strategy = FedAvg(fraction_evaluate=0.0)
    result = start(strategy, dead("train"), loop=loop)
    (one,) = strategy.left_out[1]
    assert (strategy.nodes.number(one.node), one.reason) == (2, "failed: Node Unavailable")
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["server/asked"], metrics["server/answered"], metrics["server/left_out"]) == (4, 3, 1)


@pytest.mark.parametrize("loop", [None, Strategy.start], ids=["ours", "flowers"])
def test_so_it_is_where_clients_evaluate(loop, caplog):
    strategy = FedAvg()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = start(strategy, dead("evaluate"), loop=loop)
    (gone,) = re.findall(r"the evaluation of node (\d+) is left out: failed: Node Unavailable", caplog.messages[-1])
    assert strategy.nodes.number(int(gone)) == 2
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx((0 + 1 + 3) / 3)


def test_a_reply_that_came_twice_counts_once_with_its_metrics():
    class Twice(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            return replies + replies[:1]

    strategy = FedAvg(fraction_evaluate=0.0)
    result = start(strategy, loop=Strategy.start, grid=Twice)
    assert [one.reason for one in strategy.left_out[1]] == ["came twice"]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(1.5)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 2.5)


@pytest.mark.parametrize("reason", ["x" * 10_000, "Traceback:\n  line\n\tline\r\n" * 50])
def test_a_reason_is_one_line_of_at_most_200_characters(reason):
    def answer(message, partition):
        return honest(message, partition) if partition else Message(Error(code=0, reason=reason), reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0)
    start(strategy, answer)
    (one,) = strategy.left_out[1]
    assert one.reason.startswith("failed: ") and len(one.reason) <= 200 and "\n" not in one.reason
    assert one.reason.endswith("...")


def test_the_log_says_in_words_why_a_reply_is_left_out(caplog):
    def answer(message, partition):
        large = replying(lambda k, arrays: {"w": arrays["w"] + 1e9}, weight=lambda _: 1)
        return honest(message, partition) if partition else large(message, partition)

    strategy = FedAvg(fraction_evaluate=0.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        start(strategy, answer)
    assert f"the reply of node {strategy.left_out[1][0].node} is left out: its update is" in caplog.text


# Subclasses.


@pytest.mark.parametrize("loop", [None, Strategy.start], ids=["ours", "flowers"])
def test_arrays_that_a_subclass_puts_into_the_returned_record_are_taken_over(loop):
    class Halving(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            arrays["w"] = Array(arrays["w"].numpy() / 2)
            return arrays, metrics

    result = start(Halving(fraction_evaluate=0.0), rounds=2, loop=loop)
    np.testing.assert_allclose(result.arrays["w"].numpy(), (2.5 / 2 + 2.5) / 2)


def test_a_restarted_server_has_what_a_subclass_changed(tmp_path):
    class Halving(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            arrays["w"] = Array(arrays["w"].numpy() / 2)
            return arrays, metrics

    for rounds in (1, 2):
        result = start(Halving(fraction_evaluate=0.0, checkpoint=tmp_path / "state"), rounds=rounds)
    np.testing.assert_allclose(result.arrays["w"].numpy(), (2.5 / 2 + 2.5) / 2)


@pytest.mark.parametrize("asks_first", [False, True])
@pytest.mark.parametrize("loop", [None, Strategy.start], ids=["ours", "flowers"])
def test_a_round_that_a_subclass_passes_over_is_nobodys_fault(loop, asks_first):
    class Pausing(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if asks_first or server_round != 2:
                messages = super().configure_train(server_round, arrays, config, grid)
            return [] if server_round == 2 else messages

    strategy = Pausing(fraction_evaluate=0.0)
    result = start(strategy, rounds=3, loop=loop)
    assert not strategy.left_out and not strategy.lost
    assert result.train_metrics_clientapp.keys() == {1, 3}
    np.testing.assert_allclose(result.arrays["w"].numpy(), 5.0)


def test_messages_may_be_made_as_they_are_sent():
    class Lazy(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            yield from super().configure_train(server_round, arrays, config, grid)

    np.testing.assert_allclose(start(Lazy(fraction_evaluate=0.0), rounds=2).arrays["w"].numpy(), 5.0)


def test_functions_that_average_metrics_may_return_nothing():
    seen = []
    strategy = FedAvg(
        train_metrics_aggr_fn=lambda contents, key: seen.append(contents), evaluate_metrics_aggr_fn=lambda *_: None
    )
    result = start(strategy)
    assert len(seen[0]) == 4 and all(isinstance(content["metrics"], MetricRecord) for content in seen[0])
    assert result.train_metrics_clientapp[1]["server/answered"] == 4
    assert not result.evaluate_metrics_clientapp
