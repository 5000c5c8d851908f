"""The lane engine beside the bare loop, in one run on one device: `python benchmarks/lanes.py [PART ...]`.

Parts: small (LeNet-5, one run and sixty), ragged (Dirichlet 0.01), shares (evaluation), cnn, resnet, table3 (forty runs
of the paper's largest table); on a CPU small.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from bare import bare_rounds
from machine import save

from fedeve import FederatedData, LocalWork, Run, all_methods, datasets, simulate
from fedeve.engines.profile import Profile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORK = LocalWork(lr=0.05, batch=20)
WARM = 4  # rounds of every run that are not timed: kernels are compiled and captured in them
METHODS = ("fedavg", "fedavgm", "fedprox", "scaffold", "fedadam", "fedeve")


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def bare(data: FederatedData, *, rounds: int, model: str = "lenet5") -> float:
    """Rounds a second of the hand-written loop, with PyTorch's settings as they come."""
    torch.set_num_threads(1)
    run = Run(method=all_methods()["fedavg"](), data=data, model=model, rounds=1)
    net = run.build_model().to(DEVICE)
    rows = [data.rows(k) for k in range(data.num_clients)]
    clients = [(data.inputs(data.x[r]).to(DEVICE), torch.from_numpy(data.y[r]).to(DEVICE)) for r in rows if len(r)]
    bare_rounds(net, clients, rounds=2, cohort=10, lr=0.05, batch=20)
    wait()
    start = time.perf_counter()
    bare_rounds(net, clients, rounds=rounds, cohort=10, lr=0.05, batch=20)
    wait()
    return rounds / (time.perf_counter() - start)


def lanes(runs: list[Run], *, precision: str = "float32", width: int | None = None) -> dict[str, Any]:
    """Run-rounds a second and client-steps a second once warm, and occupancy over all."""
    marks: list[float] = []
    profile = Profile()
    options: dict[str, Any] = {"device": DEVICE.type, "precision": precision, "width": width, "profile": profile}
    simulate(runs, engine="lanes", watch=lambda _: marks.append(time.perf_counter()), **options)
    skipped = WARM * len(runs)
    seconds, rounds = marks[-1] - marks[skipped - 1], len(marks) - skipped
    steps = profile.client_steps * rounds / len(marks)
    return {
        "run_rounds_per_second": round(rounds / seconds, 2),
        "client_steps_per_second": round(steps / seconds),
        "occupancy": round(profile.occupancy, 3),
        "width": width,
        "precision": precision,
        "stages": profile.describe()["stages"],
        "server_and_evaluation_share": round(profile.overhead, 3),
    }


def sweep(data: FederatedData, count: int, rounds: int, **changes: Any) -> list[Run]:
    """Runs of the methods in turn, with seeds of their own."""
    defaults: dict[str, Any] = {"rounds": rounds, "local": WORK, "eval_every": rounds, **changes}
    return [Run(method=all_methods()[METHODS[n % len(METHODS)]](), data=data, seed=n, **defaults) for n in range(count)]


def small(result: dict[str, Any]) -> None:
    """Equal clients, LeNet-5: one run and sixty."""
    even = datasets.load("glyphs", num_writers=340, num_images=68_000, partition="iid")
    on_cpu = DEVICE.type == "cpu"
    speed = result["bare_rounds_per_second"] = round(bare(even, rounds=3 if on_cpu else 20), 3)
    result["one_run"] = lanes(sweep(even, 1, 20 if on_cpu else 400))
    if not on_cpu:
        result["one_run_tf32"] = lanes(sweep(even, 1, 400), precision="tf32")
        for width in (300, 512):
            result[f"sixty_runs_{width}"] = lanes(sweep(even, 60, 20), width=width)
        result["sixty_runs_300_tf32"] = lanes(sweep(even, 60, 20), width=300, precision="tf32")
    for value in result.values():
        if isinstance(value, dict):
            value["times_bare_per_run"] = round(value["run_rounds_per_second"] / speed, 1)


def ragged(result: dict[str, Any]) -> None:
    """Sixty runs whose clients have from no to thousands of examples, beside equal ones in pools of the same width."""
    options: dict[str, Any] = {"num_writers": 340, "num_images": 68_000}
    even = datasets.load("glyphs", partition="iid", **options)
    skewed = datasets.load("glyphs", partition="dirichlet", alpha=0.01, **options)
    result["sizes"] = {"largest": int(skewed.sizes.max()), "median": float(np.median(skewed.sizes))}
    for width in (80, 160):
        theirs = lanes(sweep(even, 60, 12), width=width)
        ours = lanes(sweep(skewed, 60, 40), width=width)
        ours["cost_per_client_step_times_equal"] = round(
            theirs["client_steps_per_second"] / ours["client_steps_per_second"], 3
        )
        result[f"dirichlet_{width}"] = ours


def shares(result: dict[str, Any]) -> None:
    """Server steps and evaluations every ten rounds, of 6,800 test images."""
    even = datasets.load("glyphs", num_writers=340, num_images=68_000, num_test=6_800, partition="iid")
    result["sixty_runs_evaluated"] = lanes(sweep(even, 60, 20, eval_every=10), width=300)
    result["one_run_evaluated"] = lanes(sweep(even, 1, 200, eval_every=10))


def cnn(result: dict[str, Any]) -> None:
    """3,400 writers with their own images, 1,500 rounds of 10, the network of published timings."""
    data = datasets.load("glyphs", num_writers=3400, num_images=671_585, num_test=1000)
    for precision in ("float32", "tf32"):
        run = sweep(data, 1, 1500, model="cnn", eval_every=100)
        start = time.perf_counter()
        result[f"cnn_{precision}"] = lanes(run, precision=precision)
        result[f"cnn_{precision}"]["seconds_in_all"] = round(time.perf_counter() - start, 2)


def resnet(result: dict[str, Any]) -> None:
    """ResNet-18 with GroupNorm on CIFAR-shaped noise, 100 examples a client."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (10_000, 3, 32, 32), dtype=np.uint8), rng.integers(0, 100, 10_000)
    data = FederatedData.from_arrays(x, y, np.split(np.arange(10_000), 100), x_test=x[:1000], y_test=y[:1000])
    result["resnet_bare_rounds_per_second"] = round(bare(data, rounds=2, model="resnet18"), 3)
    for precision in ("float32", "tf32", "bf16"):
        result[f"resnet_{precision}"] = lanes(sweep(data, 4, 8, model="resnet18"), precision=precision)
        value = result[f"resnet_{precision}"]
        value["times_bare_per_run"] = round(value["run_rounds_per_second"] / result["resnet_bare_rounds_per_second"], 1)


def table3(result: dict[str, Any]) -> None:
    """Forty runs on data of FEMNIST's size, by local epochs: what the paper's largest table is made of."""
    data = datasets.load("glyphs", num_writers=3400, num_images=671_585, num_test=77_483)
    for epochs in (1, 3, 5):
        work = LocalWork(lr=0.01, batch=20, epochs=epochs)
        runs = sweep(data, 40, 24, local=work, eval_every=10)
        result[f"epochs_{epochs}"] = lanes(runs, precision="tf32", width=256)
    rates = [result[f"epochs_{epochs}"]["run_rounds_per_second"] for epochs in (1, 3, 5)]
    result["minutes_of_420_runs_of_1500_rounds"] = round(sum(140 * 1500 / rate for rate in rates) / 60, 1)


PARTS = {part.__name__: part for part in (small, ragged, shares, cnn, resnet, table3)}


def main() -> None:
    chosen = sys.argv[1:] or (["small"] if DEVICE.type == "cpu" else list(PARTS))
    for name in chosen:
        result: dict[str, Any] = {"clients": "10 a round, batch 20, one epoch"}
        PARTS[name](result)
        save(f"lanes-{DEVICE.type}-{name}", result)


if __name__ == "__main__":
    main()
