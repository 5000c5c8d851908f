"""What a client does with `correct`: which steps are corrected, what is remembered, of whom, and what is refused."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, clients
from playing import flat

from fedeve import FedAvg, FedDyn, FedeveError, FedProx, Scaffold
from fedeve.flower import MethodStrategy, correct

NUM_NODES = 6
TARGETS = torch.randn(NUM_NODES, 3, generator=torch.Generator().manual_seed(1))


class Line(torch.nn.Module):
    """A vector to be trained, and a running mean under a name that PyTorch does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("ema", torch.zeros(2))


def plain_steps(model, optimizer, loss) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def app_that(steps=plain_steps, *, diverges: tuple[int, int] | None = None, **options) -> ClientApp:
    """A client that goes towards its own target; the one of partition and round `diverges` ends at NaN."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        model = Line()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        corrected = correct(message, context, model, optimizer, **options)
        steps(model, optimizer, lambda: (model.weight - TARGETS[partition]).square().sum())
        if diverges == (partition, number):
            torch.nn.init.constant_(model.weight, float("nan"))
        records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": partition + 1})}
        return Message(content=RecordDict({**records, **corrected.finish()}), reply_to=message)

    return app


def play(method, app=None, *, rounds: int = 4, contexts=None, memory=None, **options):
    """What a federation of these clients ends with; `memory` is a folder that outlives it."""
    defaults = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "min_available_nodes": NUM_NODES, "seed": 2}
    strategy = MethodStrategy(method, **(defaults | options))
    config = {"fedeve-memory": f"{memory}/{{}}"} if memory else {}
    network = LocalGrid(clients(app or app_that(), NUM_NODES, contexts=contexts, **config), NUM_NODES)
    result = strategy.start(network, ArrayRecord(Line().state_dict()), num_rounds=rounds)
    return strategy, flat(result.arrays)


# What is remembered.


@pytest.mark.parametrize("method", [Scaffold(), FedDyn()], ids=lambda m: m.name)
def test_a_client_that_diverged_once_is_left_out_once(method):
    strategy, _ = play(method, app_that(diverges=(0, 1)), fraction_train=1.0)
    assert [(number, one.reason) for number, ones in strategy.left_out.items() for one in ones] == [
        (1, "'weight' is not finite")
    ]


@pytest.mark.parametrize("where", ["contexts", "memory"])
@pytest.mark.parametrize("method", [Scaffold(), FedDyn()], ids=lambda m: m.name)
def test_what_is_remembered_of_another_federation_does_not_count(method, where, tmp_path):
    lasting = {"contexts": {}} if where == "contexts" else {"memory": tmp_path}
    play(method, seed=1, **lasting)
    _, found = play(method, **lasting)
    _, expected = play(method)
    assert torch.equal(found, expected)


def test_an_older_checkpoint_lets_clients_begin_anew_and_they_say_so(tmp_path, caplog):
    lasting = {"checkpoint": tmp_path / "state", "memory": tmp_path / "memory", "fraction_train": 1.0}
    play(Scaffold(), rounds=1, **lasting)
    shutil.copy(tmp_path / "state", tmp_path / "copy")
    with caplog.at_level(logging.WARNING, logger="flwr"):
        play(Scaffold(), rounds=4, **lasting)
        assert "begins anew" not in caplog.text  # the folders were kept
        shutil.copy(tmp_path / "copy", tmp_path / "state")
        play(Scaffold(), rounds=2, **lasting)
    said = [record.getMessage() for record in caplog.records if "begins anew" in record.getMessage()]
    assert (
        said == ["scaffold: this client remembers rounds [3, 4] and is asked for round 2: it begins anew"] * NUM_NODES
    )


def test_a_round_that_is_played_again_has_the_same_numbers_and_no_warning(tmp_path, caplog):
    lasting = {"checkpoint": tmp_path / "state", "memory": tmp_path / "memory"}
    play(Scaffold(), rounds=1, **lasting)
    shutil.copy(tmp_path / "state", tmp_path / "copy")
    _, expected = play(Scaffold(), rounds=2, **lasting)
    shutil.copy(tmp_path / "copy", tmp_path / "state")
    _, again = play(Scaffold(), rounds=2, **lasting)
    assert torch.equal(again, expected)
    assert "begins anew" not in caplog.text


# Which steps are corrected.


def closure_steps(model, optimizer, loss) -> None:
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)


def named_closure_steps(model, optimizer, loss) -> None:
    optimizer.step(closure=loss)


@pytest.mark.parametrize("steps", [closure_steps, named_closure_steps])
def test_a_closure_would_not_be_corrected_and_is_refused(steps):
    with pytest.raises(FedeveError, match="fedprox cannot correct the gradients of a closure"):
        play(FedProx(mu=1.0), app_that(steps))


def test_a_closure_is_fine_where_nothing_is_corrected():
    assert torch.equal(play(FedAvg(), app_that(closure_steps))[1], play(FedAvg())[1])


def test_scaffold_refuses_a_learning_rate_that_ends_at_zero():
    def cooling(model, optimizer, loss):
        plain_steps(model, optimizer, loss)
        optimizer.param_groups[0]["lr"] = 0.0

    with pytest.raises(FedeveError, match="3 steps, the last at rate 0; train with plain SGD at a constant rate"):
        play(Scaffold(), app_that(cooling))


# What is sent.


@pytest.mark.parametrize("method", [Scaffold(), FedDyn(), FedProx()], ids=lambda m: m.name)
def test_statistics_of_other_names_are_told_to_the_clients(method):
    strategy, _ = play(method, statistics=("ema",))
    assert not strategy.left_out and strategy.state.params.shape == (3,)


def test_arrays_under_another_name_are_asked_for():
    with pytest.raises(FedeveError, match=r"no arrays under 'model'.*arrays="):
        play(FedProx(), app_that(arrays="model"))
