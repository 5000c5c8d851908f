"""Flower's simulation of every method, twice, in a process of its own: `python simulation.py RESULT.safetensors`."""

from __future__ import annotations

import sys

import torch
from digits_federation import NUM_NODES, app, initial_arrays, make_run
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from safetensors.torch import save_file

from fedeve import FedEve, Scaffold, all_methods
from fedeve.flower import MethodStrategy

METHODS = {name: cls() for name, cls in all_methods().items()}
METHODS |= {"fedeve-released": FedEve(drift="released"), "scaffold-released": Scaffold(control="released")}
ROUNDS = 2
BACKEND = {
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    "init_args": {"num_cpus": 2, "logging_level": "error", "log_to_driver": False},
}

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    found: dict[str, torch.Tensor] = {}
    for name, method in METHODS.items():
        run = make_run(method)
        for time in ("first", "second"):
            strategy = MethodStrategy(
                method, fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=NUM_NODES, seed=run.seed,
                nodes="ask" if name == "fedeve" else "registered",
            )  # fmt: skip
            strategy.start(grid, initial_arrays(run), num_rounds=ROUNDS)
            found[f"{name}.{time}"] = strategy.state.params
    save_file(found, sys.argv[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_simulation(server, app, NUM_NODES, backend_config=BACKEND)
