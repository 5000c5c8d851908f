"""A federation for tests: an ordinary PyTorch ClientApp whose data, batches and model are those of a `Run`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedeve import FedAvg, FederatedData, LocalWork, Method, Run, datasets, local
from fedeve.flower import correct, say_partition

NUM_NODES = 8


@functools.cache
def the_data() -> FederatedData:
    return datasets.load("digits", partition="dirichlet", alpha=0.5, num_clients=NUM_NODES)


def make_run(method: Method | None = None, **changes: Any) -> Run:
    """The run that the federation plays; in float32, with clients of unequal sizes."""
    defaults: dict[str, Any] = {"model": "linear", "rounds": 3, "cohort": 4, "seed": 11, "eval_every": 1}
    work = LocalWork(lr=0.1, batch=20, epochs=1)
    return Run(method=method or FedAvg(), data=the_data(), local=work, **(defaults | changes))


def initial_arrays(run: Run) -> ArrayRecord:
    return ArrayRecord(run.build_model().state_dict())


def train_locally(message: Message, context: Context, *, corrects: bool = True) -> Message:
    """What a client does: torch's own optimiser on the batches that the simulator would take."""
    torch.set_num_threads(1)
    run = make_run()
    client, server_round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    model = run.build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=run.local.lr)
    corrected = correct(message, context, model, optimizer) if corrects else None
    rows = run.data.rows(client)
    x, y = run.data.inputs(run.data.x[rows]), torch.from_numpy(run.data.y[rows])
    model.train()
    total = 0.0
    for batch in local.plan(run.local, len(rows), seed=run.seed, round=server_round - 1, client=client):
        mine = batch[batch >= 0]
        optimizer.zero_grad()
        loss = cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(mine) / len(rows)
    records: dict[str, Any] = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"train_loss": total, "num-examples": len(rows)}),
    }
    return Message(content=RecordDict(records | (corrected.finish() if corrected else {})), reply_to=message)


app = ClientApp()
app.query("partition")(say_partition)


@app.train()
def train(message: Message, context: Context) -> Message:
    return train_locally(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    run = make_run()
    client = int(context.node_config["partition-id"])
    model = run.build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = run.data.rows(client)
    with torch.no_grad():
        right = (model(run.data.inputs(run.data.x[rows])).argmax(-1) == torch.from_numpy(run.data.y[rows])).sum()
    metrics = MetricRecord({"accuracy": float(right) / len(rows), "num-examples": len(rows)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
