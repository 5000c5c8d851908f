"""`make bench`: how fast data is made and how the reference simulator compares with the bare loop, in one run."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import torch
from bare import bare_rounds
from machine import save

from fedeve import FedAvg, FederatedData, LocalWork, Run, datasets, simulate
from fedeve.data import glyphs


def seconds(work: Callable[[], object], *, repeats: int = 3) -> float:
    """The median time of some repeats."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_glyphs() -> None:
    """Images a second, templates included and not, and the memory that FEMNIST's full size takes as a stream."""
    start = time.perf_counter()
    glyphs.draw(1, num_images=2, num_test=0, seed=0)
    templates = time.perf_counter() - start
    took = seconds(lambda: glyphs.draw(100, num_images=20_000, num_test=0, seed=1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    count = sum(
        len(y) + len(y_test) for _, y, _, y_test in glyphs.stream(3400, num_images=671_585, num_test=77_483, seed=0)
    )
    full = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    save(
        "glyphs",
        {
            "images_per_second": round(20_000 / took),
            "templates_seconds": round(templates, 2),
            "full_size": {"images": count, "seconds": round(full, 1), "memory_grown_mib": round(grown / 1024, 1)},
        },
    )


def bench_reference() -> None:
    """Ten clients of 60 images a round, LeNet-5: the reference simulator beside the bare loop, interleaved."""
    data: FederatedData = datasets.load("glyphs", num_writers=300, partition="iid")
    run = Run(method=FedAvg(), data=data, rounds=20, eval_every=20, local=LocalWork(lr=0.1))
    clients = [(data.inputs(data.x[data.rows(k)]), torch.from_numpy(data.y[data.rows(k)])) for k in range(300)]
    torch.set_num_threads(1)
    model = run.build_model()
    ours, theirs = [], []
    for _ in range(3):
        theirs.append(seconds(lambda: bare_rounds(model, clients, rounds=20, cohort=10, lr=0.1, batch=20), repeats=1))
        ours.append(seconds(lambda: simulate(run, device="cpu"), repeats=1))
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    save(
        "reference",
        {
            "rounds_per_second": round(20 / statistics.median(ours), 2),
            "bare_rounds_per_second": round(20 / statistics.median(theirs), 2),
            "times_bare": round(ratio, 2),
            "threads": 1,
            "note": "ours includes making the model and one evaluation of 1,800 images",
        },
    )


if __name__ == "__main__":
    bench_glyphs()
    bench_reference()
