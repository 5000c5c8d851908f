"""Playing strategies in this process, and comparing what comes of them."""

from __future__ import annotations

import torch
from digits_federation import NUM_NODES, app, initial_arrays, make_run
from flwr.app import ArrayRecord
from local_grid import LocalGrid, clients

OPTIONS = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "min_available_nodes": NUM_NODES, "seed": 11}


def grid(**options) -> LocalGrid:
    return LocalGrid(clients(app, NUM_NODES), NUM_NODES, **options)


def played(strategy, network=None, *, rounds: int = 2, **more):
    return strategy.start(network or grid(), initial_arrays(make_run()), num_rounds=rounds, **more)


def flat(record: ArrayRecord) -> torch.Tensor:
    return torch.cat([torch.from_numpy(array.numpy().copy()).reshape(-1) for array in record.values()])


def same(a, b) -> None:
    for name in a.state._fields:
        assert torch.equal(getattr(a.state, name), getattr(b.state, name)), name
