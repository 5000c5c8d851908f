"""What is learned: the data, the model and the batches, the same for server, clients and `fedeve.simulate`."""

from __future__ import annotations

from typing import Any

import torch

from fedeve import LocalWork, Run, datasets, methods

torch.set_num_threads(1)


def describe(config: Any, num_clients: int) -> Run:
    """The federation as a `Run`: `simulate(run, engine="reference")` gives the numbers that Flower gives."""
    data = datasets.load("digits", partition="dirichlet", alpha=float(config["alpha"]), num_clients=num_clients)
    return Run(
        method=methods.create(str(config["method"])),
        data=data,
        model=str(config["model"]),
        rounds=int(config["num-rounds"]),
        cohort=max(int(num_clients * float(config["fraction-train"])), 2),
        local=LocalWork(lr=float(config["lr"]), batch=int(config["batch"])),
        seed=int(config["seed"]),
    )
