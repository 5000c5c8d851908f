"""One step of a pool, alone: its time, and the kernels it is made of. `python benchmarks/steps.py [lenet5 din ...]`.

For a GPU; `din` reads MovieLens-1M from FEDEVE_DATA. What a whole sweep makes of it is in `lanes.py`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from machine import save

from fedeve import FedAvg, FederatedData, LocalWork, Run, datasets
from fedeve.engines.lanes import Lanes
from fedeve.engines.loop import _steady
from fedeve.engines.pool import Batch, Task
from fedeve.method import Correction

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = 12


def step(
    run: Run, width: int, *, busy: int | None = None, precision: str = "float32", repeats: int = 10
) -> dict[str, Any]:
    """Milliseconds a step of so many lanes takes, lane-steps a second, and the longest kernels' shares.

    `busy` of the lanes are at work, or all of them.
    """
    busy = width if busy is None else busy
    with _steady(1, precision):
        engine = Lanes([run], DEVICE, width=width, precision=precision, batched=True)
        pool = engine._pool(0, width)
        assert isinstance(pool, Batch)
        rng, batch = np.random.default_rng(0), run.local.batch
        plans = [rng.integers(0, len(run.data.y), (100, batch)) for _ in range(busy)]
        work = [Task(n, engine.starts[0], Correction(0.0, None), run.local, plan) for n, plan in enumerate(plans)]
        pool.seat(work)
        advance = pool._prepare()
        for _ in range(2):
            advance()
        _wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            advance()
        _wait()
        seconds = (time.perf_counter() - begun) / repeats
        result = {"width": width, "busy": busy, "precision": precision, "ms": round(1e3 * seconds, 3)}
        return result | {"lane_steps_per_second": round(busy / seconds), "kernels": _kernels(advance)}


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _kernels(advance: Any) -> dict[str, str]:
    """The share of every kernel's time in a step, and how often it runs, of those that take longest."""
    if DEVICE.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        advance()
        _wait()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    shares = {event.key[:80]: (event.self_device_time_total / total, event.count) for event in events[:KERNELS]}
    return {name: f"{100 * share:.1f} % in {count}" for name, (share, count) in shares.items()}


def lenet5() -> list[dict[str, Any]]:
    """Of images like FEMNIST's, batch 20."""
    run = Run(method=FedAvg(), data=datasets.load("glyphs", num_writers=340), model="lenet5", local=LocalWork(batch=20))
    return [step(run, width, precision="tf32") for width in (16, 32, 64, 128, 256)] + [step(run, 256)]


def _resnet18() -> Run:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (1000, 3, 32, 32), dtype=np.uint8), rng.integers(0, 100, 1000)
    data = FederatedData.from_arrays(x, y, np.split(np.arange(1000), 10), x_test=x[:10], y_test=y[:10])
    return Run(method=FedAvg(), data=data, model="resnet18", local=LocalWork(batch=20))


def resnet18() -> list[dict[str, Any]]:
    """Of noise in CIFAR-100's shape, batch 20, in bfloat16."""
    run = _resnet18()
    full = [step(run, width, precision="bf16", repeats=40) for width in (8, 10, 14, 20, 28, 40, 56)]
    return full + [step(run, 40, busy=busy, precision="bf16", repeats=40) for busy in (36, 20)]


def resnet18_tf32() -> list[dict[str, Any]]:
    """The same in TF32."""
    return [step(_resnet18(), 20, precision="tf32")]


def din() -> list[dict[str, Any]]:
    """Of MovieLens-1M, batch 100, Adam."""
    work = LocalWork(lr=0.01, batch=100, optimizer="adam")
    run = Run(method=FedAvg(), data=datasets.load("movielens1m"), model="din", cohort=20, local=work)
    return [step(run, width, precision="tf32") for width in (128, 256)]


PARTS = {part.__name__: part for part in (lenet5, resnet18, resnet18_tf32, din)}

if __name__ == "__main__":
    if DEVICE.type != "cuda":
        sys.exit("benchmarks/steps.py: a pool is a batch on a GPU only; there is none here")
    for name in sys.argv[1:] or PARTS:
        save(f"steps-{name}", {"steps": PARTS[name]()})
