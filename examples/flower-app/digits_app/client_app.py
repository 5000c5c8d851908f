"""An ordinary PyTorch client. What it owes to fedeve is marked: two lines, and then it works with every method."""

from __future__ import annotations

import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from digits_app.task import describe
from fedeve import local
from fedeve.flower import correct

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    run = describe(context.run_config, int(context.node_config["num-partitions"]))
    model = run.build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=run.local.lr)
    corrected = correct(message, context, model, optimizer)  # fedeve: from here on step() corrects gradients

    time.sleep(float(context.run_config["pause"]))
    rows, total = run.data.rows(client), 0.0
    x, y = run.data.inputs(run.data.x[rows]), torch.from_numpy(run.data.y[rows])
    server_round = int(message.content["config"]["server-round"])
    model.train()
    for batch in local.plan(run.local, len(rows), seed=run.seed, round=server_round - 1, client=client):
        mine = batch[batch >= 0]
        optimizer.zero_grad()
        loss = cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(mine)

    metrics = MetricRecord({"train_loss": total / len(rows), "num-examples": len(rows)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(content=RecordDict({**content, **corrected.finish()}), reply_to=message)  # fedeve: finish()
