"""Flower's simulation runtime on the common work: virtual clients in Ray actors, one CPU each."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flower_app import app
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Clock, Work, answer, arguments


def main() -> None:
    told = arguments(__doc__)
    torch.set_num_threads(1)
    work = Work.read(told.work)
    model = work.model()
    clock = Clock(told)
    server = ServerApp()

    def mark(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        # Called before the first round and after each; nothing is evaluated while the clock runs.
        if server_round:
            clock()
        return None

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        # A share of nodes would be rounded; the smallest number of nodes says ten exactly.
        strategy = FedAvg(fraction_train=1e-9, min_train_nodes=work.cohort, fraction_evaluate=0.0)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=told.warm_up + told.rounds,
            train_config=ConfigRecord({"work": str(told.work.resolve())}),
            evaluate_fn=mark,
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())

    # Ray would leave its logs behind; the path is short because sockets are made below it.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        run_simulation(
            server_app=server,
            client_app=app,
            num_supernodes=len(work.clients),
            backend_config={
                "init_args": {"num_cpus": told.processes, "_temp_dir": folder},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    answer(told, clock=clock, accuracy=work.accuracy(model), packages=("flwr", "ray"))


if __name__ == "__main__":
    main()
