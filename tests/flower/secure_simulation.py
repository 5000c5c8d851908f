"""FedEve under Flower's SecAgg+ in its simulation: `python secure_simulation.py RESULT.json`."""

from __future__ import annotations

import json
import sys

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from simulation import BACKEND

from fedeve import FedEve
from fedeve.flower import SecureStrategy, secure_update

NUM_NODES, ROUNDS, CLIP = 5, 3, 2.0
TARGETS = np.random.default_rng(0).normal(size=(NUM_NODES, 14)) * 0.3
START = [np.zeros((3, 4), dtype=np.float32), np.ones(2, dtype=np.float32)]


def end_of(start: np.ndarray, client: int) -> np.ndarray:
    """Where a client's training ends: a third of the way to its own target."""
    return start + 0.3 * (TARGETS[client] - start)


class Client(NumPyClient):
    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters, config):
        start = np.concatenate([np.asarray(p, dtype=np.float64).reshape(-1) for p in parameters])
        end = np.split(end_of(start, self.number), [12])
        return secure_update(
            parameters, [e.reshape(p.shape) for e, p in zip(end, parameters, strict=True)], clip_norm=CLIP
        )


app = ClientApp(lambda context: Client(int(context.node_config["partition-id"])).to_client(), mods=[secaggplus_mod])
strategy = SecureStrategy(FedEve(), START, clip_norm=CLIP, min_clients=NUM_NODES)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=ROUNDS), strategy=strategy)
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=1.0, clipping_range=CLIP)
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)


if __name__ == "__main__":
    run_simulation(server, app, NUM_NODES, backend_config=BACKEND)
    with open(sys.argv[1], "w") as file:
        json.dump({"params": strategy.state.params.tolist(), "facts": strategy.facts, "lost": strategy.lost}, file)
