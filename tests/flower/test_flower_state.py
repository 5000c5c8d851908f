"""What lasts: names and buffers of a model, checkpoints, and what clients remember."""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

import digits_federation
import flwr.serverapp.strategy as theirs
from digits_federation import NUM_NODES, app, initial_arrays, make_run
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, clients, replying
from playing import OPTIONS, flat, grid, played, same
from torch import nn

import fedeve.flower
from fedeve import FedAvg, FedDyn, FedEve, FedeveError, FedProx, Scaffold, Summary, all_methods
from fedeve.checkpoint import Checkpoint
from fedeve.flower import MethodStrategy, correct, loop

# Names.


def test_there_is_a_strategy_for_every_method_under_its_own_name():
    for cls in all_methods().values():
        made = getattr(fedeve.flower, cls.__name__)
        assert issubclass(made, MethodStrategy) and issubclass(made, theirs.Strategy)
        assert made().method == cls()
        assert cls.__name__ in dir(fedeve.flower)


def test_type_checkers_are_told_every_name():
    tree = ast.parse(Path(fedeve.flower.__file__).read_text())
    told = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert told == {cls.__name__ for cls in all_methods().values()}


def test_a_strategy_takes_what_flowers_fedavg_takes_with_the_same_defaults():
    def plain(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert plain(fedeve.flower.FedEve) == plain(theirs.FedAvg)
    assert plain(MethodStrategy)[1:] == plain(theirs.FedAvg)


def test_hyper_parameters_and_options_are_keywords():
    strategy = fedeve.flower.FedProx(0.25, mu=0.5, seed=4, clip_norm=2.0)
    assert strategy.method == FedProx(mu=0.5)
    assert (strategy.fraction_train, strategy.options.seed, strategy.options.clip_norm) == (0.25, 4, 2.0)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"sed": 1}, "did you mean 'seed'"),
        ({"outlier": 0.5}, "above 1"),
        ({"mu": -1.0}, "mu"),
        ({"nodes": "x"}, "nodes"),
        ({"m": 1.0}, "min_train_nodes, mu, nodes"),  # hyper-parameters, Flower's arguments and options alike
        ({"proximal_mu": 1.0}, "write mu"),
        ({"fraction_fit": 1.0}, "write fraction_train"),
        ({"min_available_clients": 2}, "write min_available_nodes"),
        ({"server_momentum": 0.9}, "unknown keyword"),  # FedProx has none
        ({"fraction_train": 1.5}, "fraction_train must be at most 1"),
        ({"fraction_evaluate": -0.1}, "fraction_evaluate must be at least 0"),
        ({"fraction_train": "half"}, "fraction_train must be a number"),
        ({"min_train_nodes": -3}, "min_train_nodes must be at least 0"),
        ({"min_available_nodes": 2.5}, "min_available_nodes must be a whole number"),
        ({"statistics": "running_mean"}, r"write statistics=\('running_mean',\)"),
        ({"statistics": 5}, "a tuple of names"),
        ({"checkpoint": 5}, "checkpoint must be a path"),
    ],
)
def test_a_wrong_option_is_refused_with_advice(wrong, what):
    with pytest.raises(FedeveError, match=what):
        fedeve.flower.FedProx(**wrong)


@pytest.mark.parametrize(
    ("name", "theirs_", "ours"),
    [
        ("FedAvgM", {"server_learning_rate": 0.5}, "server_lr"),
        ("FedAvgM", {"server_momentum": 0.5}, "beta"),
        ("FedAdam", {"eta": 0.5}, "server_lr"),
        ("FedYogi", {"beta_1": 0.5}, "beta1"),
        ("FedAdam", {"beta_2": 0.5}, "beta2"),
    ],
)
def test_flowers_names_of_hyper_parameters_are_answered_with_ours(name, theirs_, ours):
    getattr(theirs, name)(**theirs_)  # so it is called there
    with pytest.raises(FedeveError, match=f"write {ours}$"):
        getattr(fedeve.flower, name)(**theirs_)


@pytest.mark.parametrize("wrong", [FedEve, fedeve.flower.FedEve, fedeve.flower.FedEve()], ids=["a", "b", "c"])
def test_a_class_or_a_strategy_in_place_of_a_method_is_refused(wrong):
    with pytest.raises(FedeveError, match="a method is needed, not its class or a strategy"):
        MethodStrategy(wrong)


def test_a_strategy_that_is_started_twice_starts_twice():
    strategy, fresh = MethodStrategy(FedEve(), **OPTIONS), MethodStrategy(FedEve(), **OPTIONS)
    played(strategy)
    played(strategy)
    played(fresh)
    same(strategy, fresh)


# What is sent and returned.


def test_clients_get_the_prediction_and_evaluation_gets_the_fused_model():
    starts: dict[int, torch.Tensor] = {}
    inner = clients(app, NUM_NODES)

    def answer(message, partition):
        config = message.content["config"]
        starts[int(config["server-round"])] = flat(message.content["arrays"])
        return inner(message, partition)

    evaluated = {}
    strategy = MethodStrategy(FedEve(), **OPTIONS)
    played(strategy, LocalGrid(answer, NUM_NODES), evaluate_fn=lambda n, arrays: evaluated.__setitem__(n, flat(arrays)))
    assert torch.equal(starts[1], evaluated[0])
    moved = evaluated[1] - evaluated[0]
    torch.testing.assert_close(starts[2], evaluated[1] + moved, rtol=1e-5, atol=1e-7)  # w + server_lr M, and M = moved
    assert torch.equal(evaluated[2], strategy.state.params)


def test_clients_evaluate_and_the_mean_is_weighted():
    strategy = MethodStrategy(FedEve(), fraction_train=0.5, min_available_nodes=NUM_NODES, fraction_evaluate=1.0)
    result = played(strategy, rounds=1)
    run = make_run()
    model = run.build_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    rows = run.data.order
    right = (model(run.data.inputs(run.data.x[rows])).argmax(-1) == torch.from_numpy(run.data.y[rows])).double().mean()
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(float(right))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.norm(self.first(x.flatten(1))))


def test_running_statistics_are_averaged_outside_the_filter_and_whole_numbers_are_left_alone():
    torch.manual_seed(0)
    model, sent = Normed(), {}

    def make(partition, arrays):
        sent.update(arrays)
        return {n: a + np.asarray(partition + 1).astype(a.dtype) for n, a in arrays.items()}

    strategy = MethodStrategy(FedEve(), fraction_evaluate=0.0, min_available_nodes=4)
    network = LocalGrid(replying(make, weight=lambda k: k + 1), 4)
    result = strategy.start(network, ArrayRecord(model.state_dict()), num_rounds=1)
    got, begun = result.arrays.to_torch_state_dict(), model.state_dict()
    assert list(got) == list(begun)
    for name, tensor in begun.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype
    mean = sum((k + 1) ** 2 for k in range(4)) / 10  # weight k + 1, moved by k + 1
    torch.testing.assert_close(got["norm.running_mean"], begun["norm.running_mean"] + mean)
    torch.testing.assert_close(got["norm.running_var"], begun["norm.running_var"] + mean)
    assert got["norm.num_batches_tracked"] == 0
    num_params = sum(p.numel() for p in model.parameters())
    assert strategy.state.params.shape == (num_params,)
    # All parameters moved alike, so the drifts per parameter are those of one: nothing but parameters is counted.
    moves = torch.arange(1.0, 5.0)[:, None]
    _, facts = FedEve().step(FedEve().init(torch.zeros(1)), Summary.of(moves, torch.arange(1.0, 5.0)))
    told = result.train_metrics_clientapp[1]
    assert told["server/client_drift"] == pytest.approx(float(facts["client_drift"]), rel=1e-5)


def test_a_model_with_batchnorm_trains_with_an_ordinary_client():
    run = make_run()
    torch.manual_seed(1)
    start = Normed()
    plain = ClientApp()

    @plain.train()
    def train(message: Message, context: Context) -> Message:
        model = Normed()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        corrected = correct(message, context, model, optimizer)
        rows = run.data.rows(int(context.node_config["partition-id"]))
        x, y = run.data.inputs(run.data.x[rows]), torch.from_numpy(run.data.y[rows])
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
        return Message(content=RecordDict({**content, **corrected.finish()}), reply_to=message)

    strategy = MethodStrategy(Scaffold(), **OPTIONS)
    network = LocalGrid(clients(plain, NUM_NODES), NUM_NODES)
    result = strategy.start(network, ArrayRecord(start.state_dict()), num_rounds=8)
    assert not strategy.left_out
    start.load_state_dict(result.arrays.to_torch_state_dict())
    start.eval()
    x, y = run.data.inputs(run.data.x_test), torch.from_numpy(run.data.y_test)
    assert (start(x).argmax(-1) == y).double().mean() > 0.5


def test_a_half_precision_model_keeps_its_dtype_and_counts_updates_from_what_was_sent():
    begun = {"w": np.linspace(-1, 1, 7).astype(np.float16)}
    strategy = MethodStrategy(FedEve(), fraction_evaluate=0.0)
    network = LocalGrid(replying(lambda k, a: a, weight=lambda _: 1), 3)
    from flwr.app import Array

    result = strategy.start(network, ArrayRecord({"w": Array(begun["w"])}), num_rounds=2)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), begun["w"])
    assert result.arrays["w"].dtype == "float16"


def test_arrays_without_parameters_are_refused():
    from flwr.app import Array

    strategy = MethodStrategy(FedAvg(), fraction_evaluate=0.0)
    with pytest.raises(FedeveError, match="nothing to train"):
        strategy.start(grid(), ArrayRecord({"steps": Array(np.zeros(2, dtype=np.int64))}), num_rounds=1)


# Checkpoints.


@pytest.mark.parametrize("method", [FedEve(), Scaffold(), FedDyn()], ids=lambda m: m.name)
def test_a_server_that_is_started_again_continues_with_the_same_numbers(method, tmp_path):
    whole = MethodStrategy(method, **OPTIONS)
    expected = played(whole, rounds=4, evaluate_fn=measure)
    config = {"fedeve-memory": str(tmp_path / "memory{}")}

    def once(rounds: int):
        # Another server process and another run: contexts are new, only files last.
        strategy = MethodStrategy(method, checkpoint=tmp_path / "state", **OPTIONS)
        network = LocalGrid(clients(app, NUM_NODES, **config), NUM_NODES)
        return strategy, played(strategy, network, rounds=rounds, evaluate_fn=measure)

    once(2)
    strategy, result = once(4)
    same(strategy, whole)
    assert {n: dict(m) for n, m in result.train_metrics_clientapp.items()} == {
        n: dict(m) for n, m in expected.train_metrics_clientapp.items()
    }
    assert result.evaluate_metrics_serverapp.keys() == {0, 1, 2, 3, 4}
    again, _ = once(4)  # nothing is left to do
    same(again, whole)


def measure(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"norm": float(flat(arrays).norm())})


@pytest.mark.parametrize("method", [FedEve(), Scaffold(), FedDyn()], ids=lambda m: m.name)
def test_a_server_that_dies_in_mid_round_plays_that_round_again_with_the_same_numbers(method, tmp_path):
    whole = MethodStrategy(method, **OPTIONS)
    played(whole, rounds=3)
    contexts: dict[int, Context] = {}
    inner, count = clients(app, NUM_NODES, contexts=contexts), itertools.count()

    def dies(message, partition):
        if next(count) == 4 + 4 + 2:  # in the third round, two clients have trained and remember it
            raise KeyboardInterrupt
        return inner(message, partition)

    with pytest.raises(KeyboardInterrupt):
        played(MethodStrategy(method, checkpoint=tmp_path / "state", **OPTIONS), LocalGrid(dies, NUM_NODES), rounds=3)
    strategy = MethodStrategy(method, checkpoint=tmp_path / "state", **OPTIONS)
    played(strategy, LocalGrid(clients(app, NUM_NODES, contexts=contexts), NUM_NODES), rounds=3)
    same(strategy, whole)


@pytest.mark.parametrize("change", [{"method": FedAvg()}, {"seed": 12}, {"method": FedEve(server_lr=0.5)}])
def test_another_federations_checkpoint_is_refused(change, tmp_path):
    options = OPTIONS | {"checkpoint": tmp_path / "state"}
    played(MethodStrategy(FedEve(), **options), rounds=1)
    other = MethodStrategy(
        change.get("method", FedEve()), **(options | {k: v for k, v in change.items() if k == "seed"})
    )
    with pytest.raises(FedeveError, match="another run"):
        played(other, rounds=2)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    options = OPTIONS | {"checkpoint": tmp_path / "state"}
    played(MethodStrategy(FedEve(), **options), rounds=1)
    content = bytearray((tmp_path / "state").read_bytes())
    content[-3] ^= 1
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(FedeveError, match="damaged"):
        played(MethodStrategy(FedEve(), **options), rounds=2)


@pytest.mark.parametrize("lacks", ["history", "num_rounds", "federation", "state.momentum"])
def test_a_checkpoint_that_lacks_something_is_refused(lacks, tmp_path):
    path = tmp_path / "state"
    strategy = MethodStrategy(FedEve(), checkpoint=path, **OPTIONS)
    played(strategy, rounds=1)
    found = Checkpoint.load(path, identity=loop._identity(strategy))
    left = [{k: v for k, v in part.items() if k != lacks} for part in (found.tensors, found.values)]
    Checkpoint(*left).save(path, identity=loop._identity(strategy))
    with pytest.raises(FedeveError, match=f"is not a strategy's: got no '{lacks}'"):
        played(MethodStrategy(FedEve(), checkpoint=path, **OPTIONS), rounds=2)


def test_what_grows_with_rounds_is_not_in_a_checkpoints_header_and_comes_back(tmp_path):
    inner = clients(app, NUM_NODES)

    def answer(message, partition):
        return inner(message, partition) if partition % 2 else Message(Error(0, "far too hot " * 99), reply_to=message)

    def once(rounds: int):
        strategy = MethodStrategy(FedEve(), checkpoint=tmp_path / "state", min_replies=2, **OPTIONS)
        played(strategy, LocalGrid(answer, NUM_NODES), rounds=rounds)
        with safetensors.safe_open(tmp_path / "state", framework="pt") as file:
            return strategy, len(file.metadata()["values"])

    _, short = once(1)
    first, long = once(6)
    assert long == short
    again, _ = once(6)
    assert again.left_out == first.left_out and again.lost == first.lost
    assert len(first.left_out) == 6 and first.lost


def test_a_checkpoint_below_a_file_fails_before_the_first_round(tmp_path):
    (tmp_path / "file").write_text("")
    network = grid()
    with pytest.raises(FedeveError, match="cannot be used"):
        played(MethodStrategy(FedEve(), checkpoint=tmp_path / "file" / "state", **OPTIONS), network)
    assert network.asked == []


@pytest.mark.parametrize("method", [FedEve(), Scaffold()], ids=lambda m: m.name)
def test_a_restarted_server_warns_where_clients_must_have_remembered(method, tmp_path, caplog):
    for rounds in (1, 2):
        caplog.clear()
        played(MethodStrategy(method, checkpoint=tmp_path / "state", **OPTIONS), rounds=rounds)
        warned = any("fedeve-memory" in r.getMessage() and r.levelname == "WARNING" for r in caplog.records)
        assert warned == (rounds == 2 and bool(method.remembers))


# Clients.


def test_a_client_that_knows_nothing_of_fedeve_works_where_nothing_is_corrected():
    plain = ClientApp()

    @plain.train()
    def train(message: Message, context: Context) -> Message:
        return digits_federation.train_locally(message, context, corrects=False)

    strategy, knowing = MethodStrategy(FedEve(), **OPTIONS), MethodStrategy(FedEve(), **OPTIONS)
    played(strategy, LocalGrid(clients(plain, NUM_NODES), NUM_NODES))
    played(knowing)
    same(strategy, knowing)


def test_correct_refuses_a_message_of_another_strategy():
    message = Message(content=RecordDict({"arrays": initial_arrays(make_run())}), message_type="train", dst_node_id=2)
    model = make_run().build_model()
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(FedeveError, match="names no method"):
        correct(message, context, model, torch.optim.SGD(model.parameters(), lr=0.1))
