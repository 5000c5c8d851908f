"""The bare loop: FedAvg as most people would write it in PyTorch, without this library. What speed is compared with."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def bare_rounds(
    model: nn.Module,
    clients: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    rounds: int,
    cohort: int,
    lr: float,
    batch: int,
) -> nn.Module:
    """Plain FedAvg with deep copies and state dicts, one client after another."""
    for _ in range(rounds):
        chosen = torch.randperm(len(clients))[:cohort].tolist()
        total = sum(len(clients[client][1]) for client in chosen)
        mean = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for client in chosen:
            x, y = clients[client]
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), lr=lr)
            for rows in torch.randperm(len(y)).split(batch):
                optimiser.zero_grad()
                cross_entropy(local(x[rows]), y[rows]).backward()
                optimiser.step()
            for name, value in local.state_dict().items():
                mean[name] += value * (len(y) / total)
        model.load_state_dict(mean)
    return model
