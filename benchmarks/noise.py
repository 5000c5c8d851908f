"""How noisy a cohort's update is, beside what FedEve takes for its noise: `FEDEVE_DATA=... python benchmarks/noise.py`.

Not a matter of speed. FedEve trains on real MNIST by partition; every round the innovation I = |u - M|^2 / d is set
beside three estimates of the variance of u, the weighted mean of S updates u_k with shares p_k:

    R = sum_k |u_k - u|^2 / (S^2 d)                            the paper's, FedEve's client drift
    J = (S - 1)/S sum_k (p_k / (1 - p_k))^2 |u_k - u|^2 / d    the jackknife's: each client left out in turn
    B = -(u_t - u_t-1) (u_t-1 - u_t-2) / d                     over rounds: the noise of one is in both differences

I contains the noise of u, so an estimate that is right is at most I on average.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from machine import save

from fedeve import FedEve, LocalWork, Run, Summary, datasets
from fedeve.engines.reference import Reference

PARTITIONS: dict[str, dict[str, Any]] = {"natural": {}} | {
    f"dirichlet {alpha}": {"partition": "dirichlet", "alpha": alpha, "num_clients": 539} for alpha in (1.0, 0.1, 0.01)
}
ROUNDS, COHORT = 100, 10


def traced(run: Run) -> dict[str, Any]:
    """The estimates over a run's rounds."""
    player, method = Reference(run, torch.device("cpu")), run.method
    state = method.init(player.start)
    found: dict[str, list[float]] = {name: [] for name in ("gain", "I", "R", "J", "B", "clients that count")}
    seen: list[torch.Tensor] = []
    for number in range(run.rounds):
        sent, cohort = method.send(state), run.cohort_of(number)
        updates = torch.stack([player.train(int(client), number, sent, {})[0] for client in cohort])
        weights = torch.from_numpy(run.data.sizes[cohort].astype(np.float64))
        summary = Summary.of(updates, weights)
        shares, dim = weights / weights.sum(), updates.shape[1]
        away = (updates.double() - summary.mean).square().sum(1)
        jackknife = (len(cohort) - 1) / len(cohort) * ((shares / (1 - shares)).square() * away).sum() / dim
        innovation = (summary.mean - state.momentum.double()).square().sum() / dim
        state, facts = method.step(state, summary)
        values = {"gain": facts["gain"], "I": innovation, "R": facts["client_drift"], "J": jackknife}
        for name, value in {**values, "clients that count": 1 / shares.square().sum()}.items():
            found[name].append(float(value))
        seen = [*seen[-2:], summary.mean]
        if len(seen) == 3:
            found["B"].append(-float((seen[2] - seen[1]) @ (seen[1] - seen[0])) / dim)
    mean = {name: float(np.mean(values)) for name, values in found.items()}
    result = {f"I / {name}": round(mean["I"] / mean[name], 2) for name in ("R", "J", "B")}
    return result | {name: round(float(np.median(found[name])), 2) for name in ("gain", "clients that count")}


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": ROUNDS, "cohort": COHORT}
    for name, options in PARTITIONS.items():
        data = datasets.load("mnist", **options)
        common: dict[str, Any] = {"data": data, "model": "lenet5", "rounds": ROUNDS, "cohort": COHORT, "seed": 192}
        result[name] = traced(Run(method=FedEve(), local=LocalWork(lr=0.01, batch=20), **common))
        print(name, result[name], flush=True)
    save("noise", result)


if __name__ == "__main__":
    main()
