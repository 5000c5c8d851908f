"""A ServerApp and a ClientApp as Flower's quickstart for PyTorch has them. Nothing here knows of fedeve."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIGITS = load_digits(return_X_y=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


def load_data(partition: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    x, y = DIGITS
    mine = range(partition, len(y), num_partitions)
    x, y = torch.tensor(x[mine] / 16, dtype=torch.float32), torch.tensor(y[mine])
    cut = len(y) * 4 // 5
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)


client_app = ClientApp()


@client_app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"], momentum=0.9)
    model.train()
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item()
    metrics = MetricRecord({"train_loss": running / len(loader), "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@client_app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    with torch.no_grad():
        right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in loader)
    metrics = MetricRecord({"eval_acc": right / len(loader.dataset), "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=1.0, min_available_nodes=4)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    context.state["final"] = result.evaluate_metrics_clientapp[context.run_config["num-server-rounds"]]
