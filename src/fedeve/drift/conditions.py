"""Conditions: which drift a round can have, by what its cohort's clients train on.

A cohort's rows are its clients' own, or pooled and dealt again: evenly, which leaves no client drift, or by label with
Dirichlet, which makes some. Together with how the federation was partitioned that gives the paper's four conditions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import seeds
from ..data import partition
from ..data.federated import FederatedData
from ..seeds import Indices

DEALINGS = ("own", "evenly", "dirichlet")


class Condition(NamedTuple):
    """One of the four: how the federation is partitioned, and how a cohort's rows are dealt."""

    title: str
    partition: str
    dealing: str

    def data_options(self, alpha: float) -> dict[str, Any]:
        """Options of a data set for this condition."""
        return {"partition": self.partition} | ({"alpha": alpha} if self.partition == "dirichlet" else {})

    def run_options(self, alpha: float) -> dict[str, Any]:
        """Settings of a run for this condition."""
        return {"dealing": self.dealing} | ({"dealing_alpha": alpha} if self.dealing == "dirichlet" else {})


CONDITIONS = {
    "iid": Condition("iid", "iid", "own"),
    "period": Condition("only period drift", "dirichlet", "evenly"),
    "client": Condition("only client drift", "iid", "dirichlet"),
    "both": Condition("both drifts", "dirichlet", "own"),
}
"""The paper's figure 2b."""


def deal(
    data: FederatedData, cohort: Indices, *, dealing: str = "own", alpha: float = 0.1, seed: int, round: int
) -> dict[int, Indices]:
    """What each client of a cohort trains on in a round: row numbers by client, in cohort order.

    Nothing is lost and nothing is dealt twice: the rows of all clients together are those of the cohort.

    >>> data = FederatedData.from_arrays(np.zeros((6, 1)), [0, 0, 0, 1, 1, 1], [[0, 1, 2], [3, 4, 5], []])
    >>> {k: rows.tolist() for k, rows in deal(data, np.array([2, 0]), seed=0, round=0).items()}
    {2: [], 0: [0, 1, 2]}
    >>> sorted(len(rows) for rows in deal(data, np.arange(3), dealing="evenly", seed=0, round=0).values())
    [2, 2, 2]
    """
    clients = cohort.tolist()
    mine = [data.rows(client) for client in clients]
    if dealing == "own":
        return dict(zip(clients, mine, strict=True))
    pool, stream = np.concatenate(mine), seeds.torch_seed(seed, round, "dealing")
    labels, count = data.y[pool], len(clients)
    if dealing == "evenly":
        parts = partition.iid(labels, num_clients=count, seed=stream)
    else:
        parts = partition.dirichlet(labels, num_clients=count, alpha=alpha, seed=stream)
    return {client: pool[part] for client, part in zip(clients, parts, strict=True)}
