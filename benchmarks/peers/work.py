"""The work every contestant does: the same clients, the same LeNet-5 from the same weights, the same clock and judge.

Only torch and numpy here, since the other simulators' environments have nothing of this project.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn


class LeNet5(nn.Module):
    """LeNet-5 for 28x28, layer by layer what `fedeve.models.LeNet5` is."""

    def __init__(self, num_classes: int = 62) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x.unsqueeze(1)))


@dataclass
class Work:
    """Clients of equal or unequal size, a test set, and how to train: read from one file."""

    clients: list[tuple[torch.Tensor, torch.Tensor]]
    x_test: torch.Tensor
    y_test: torch.Tensor
    weights: dict[str, torch.Tensor]
    cohort: int
    batch: int
    lr: float

    @classmethod
    def read(cls, path: str | Path) -> Work:
        """Inputs are turned from bytes into what the model sees once, before any clock runs."""
        with np.load(path) as file:
            stored = {name: file[name] for name in file.files}
        shift, scale = np.float32(stored["shift"]), np.float32(stored["scale"])

        def inputs(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy((x.astype(np.float32) - shift) * scale)

        rows = np.split(stored["order"], stored["offsets"][1:-1])
        return cls(
            clients=[(inputs(stored["x"][r]), torch.from_numpy(stored["y"][r])) for r in rows],
            x_test=inputs(stored["x_test"]),
            y_test=torch.from_numpy(stored["y_test"]),
            weights={n.removeprefix("w:"): torch.from_numpy(v) for n, v in stored.items() if n.startswith("w:")},
            cohort=int(stored["cohort"]),
            batch=int(stored["batch"]),
            lr=float(stored["lr"]),
        )

    def model(self) -> LeNet5:
        """The network with the weights everybody starts from."""
        model = LeNet5(len(self.weights["head.5.bias"]))
        model.load_state_dict(self.weights)
        return model

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of the test set that a model gets right."""
        guesses = torch.cat([model(x).argmax(-1) for x in self.x_test.split(1000)])
        return float((guesses == self.y_test).double().mean())


def arguments(description: str) -> argparse.Namespace:
    """What every contestant is told on its command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("work", type=Path, help="the file written by benchmarks/peers.py")
    parser.add_argument("answer", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before the clock starts")
    parser.add_argument("--processes", type=int, default=1, help="processes that train clients")
    parser.add_argument("--engine", default="reference", help="ours only: which engine")
    return parser.parse_args()


class Clock:
    """Times rounds: made when all is ready, called when a round is done. The first `warm_up` rounds do not count."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.first, self.last = told.warm_up, told.warm_up + told.rounds
        self.num_rounds = 0
        self.began = self.ended = (time.perf_counter(), cpu_seconds())

    def __call__(self) -> None:
        self.num_rounds += 1
        if self.num_rounds == self.first:
            self.began = (time.perf_counter(), cpu_seconds())
        if self.num_rounds == self.last:
            self.ended = (time.perf_counter(), cpu_seconds())


def cpu_seconds() -> float:
    """CPU time of all processes of this session, so of one contestant; other work on the machine does not add to it."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process may end while we look
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == os.getsid(0):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def answer(told: argparse.Namespace, *, clock: Clock, accuracy: float, packages: tuple[str, ...] = ()) -> None:
    """Write down how long the timed rounds took, how good the model is, and which versions did it."""
    if clock.num_rounds != clock.last:
        raise RuntimeError(f"{clock.num_rounds} rounds were played, not {clock.last}")
    seconds, cpu = (end - begin for begin, end in zip(clock.began, clock.ended, strict=True))
    result = {
        "rounds_per_second": told.rounds / seconds,
        "cpu_seconds_per_round": cpu / told.rounds,
        "accuracy": accuracy,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "numpy", *packages)},
    }
    told.answer.write_text(json.dumps(result))
