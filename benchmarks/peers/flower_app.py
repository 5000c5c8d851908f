"""The client's half of the Flower app. A module of its own, so that Ray's actors import it once and keep the data."""

from __future__ import annotations

from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy
from work import LeNet5, Work

app = ClientApp()


@lru_cache(maxsize=1)
def common_work(path: str) -> Work:
    torch.set_num_threads(1)
    return Work.read(path)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of SGD on the data of the client that this node is."""
    work = common_work(str(message.content["config"]["work"]))
    x, y = work.clients[int(context.node_config["partition-id"])]
    model = LeNet5(len(work.weights["head.5.bias"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr)
    for rows in torch.randperm(len(y)).split(work.batch):
        optimiser.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": len(y)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
