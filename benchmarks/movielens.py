"""MovieLens-1M: how long from the zip to the first batch, how much memory, how long a second open takes.

Run it where the archive is: FEDEVE_DATA=folder python benchmarks/movielens.py
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from machine import save


def measure() -> dict[str, float]:
    """Seconds to open the data set and gather a batch of 100 rows of a client, in this process; memory in MiB."""
    import torch

    from fedeve import datasets

    torch.set_num_threads(1)
    imported = _peak()
    began = time.perf_counter()
    data = datasets.load("movielens1m")
    opened = time.perf_counter()
    batch = data.inputs(data.x[data.rows(0)[:100]])
    ended = time.perf_counter()
    assert batch.shape == (100, 56)
    return {
        "open_s": round(opened - began, 3),
        "first_batch_s": round(ended - began, 3),
        "peak_mib": round(_peak(), 1),
        "peak_above_imports_mib": round(_peak() - imported, 1),
        "rows_mib": round((data.x.nbytes + data.x_test.nbytes) / 2**20, 1),
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    """Measure in fresh processes: once without a cache, three times with it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FEDEVE_CACHE": folder}
        command = [sys.executable, __file__, "measure"]
        runs = [json.loads(subprocess.check_output(command, env=environment)) for _ in range(4)]
        cache = sum(os.path.getsize(os.path.join(top, name)) for top, _, names in os.walk(folder) for name in names)
    later = sorted(runs[1:], key=lambda run: run["first_batch_s"])
    result = {
        "from_zip": runs[0],
        "second_open_median_of_3": later[1],
        "cache_mib": round(cache / 2**20, 1),
    }
    save("movielens", result)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()))
    else:
        main()
