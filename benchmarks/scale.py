"""Does a round cost more in a larger population or, in memory, with a larger cohort? `python benchmarks/scale.py`.

Each size is played in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from machine import save

POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
COHORTS = (10, 100, 1_000, 10_000)


def measure(num_clients: int, cohort: int, rounds: int) -> dict[str, float]:
    """Seconds a round and peak memory, of clients with one example each and LeNet-5 on 28x28 pixels."""
    from fedeve import FederatedData, FedEve, LocalWork, Run, simulate

    rng = np.random.default_rng(0)
    num_rows = 1_000  # many clients hold the same rows, so that the data does not grow with the population
    x, y = rng.integers(0, 256, (num_rows, 28, 28), dtype=np.uint8), np.arange(num_rows) % 10
    order = np.arange(num_clients, dtype=np.int64) % num_rows
    data = FederatedData(
        x=x, y=y, order=order, offsets=np.arange(num_clients + 1, dtype=np.int64),
        x_test=x[:10], y_test=y[:10], num_classes=10, scale=1 / 255, source="benchmark",
    )  # fmt: skip
    run = Run(method=FedEve(), data=data, rounds=rounds, cohort=cohort, local=LocalWork(batch=20), eval_every=rounds)
    marks: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    simulate(run, device="cpu", watch=lambda _: marks.append(time.process_time()))
    each = float(np.median(np.diff(marks))) if len(marks) > 1 else marks[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"server_ms_a_round": round(1000 * each, 2), "memory_mib": peak / 1024, "grown_mib": (peak - before) / 1024}


def apart(num_clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    arguments = [sys.executable, __file__, *map(str, (num_clients, cohort, rounds))]
    found = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    if len(sys.argv) == 4:
        print(json.dumps(measure(*map(int, sys.argv[1:]))))
        return
    result: dict[str, Any] = {"clients": "one example each, LeNet-5, FedEve; time is the main process's own"}
    result["population"] = {str(size): apart(size, 10, 60) for size in POPULATIONS}
    result["cohort"] = {str(size): apart(20_000, size, 3) for size in COHORTS}
    save("scale", result)


if __name__ == "__main__":
    main()
