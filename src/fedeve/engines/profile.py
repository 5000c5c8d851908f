"""Where the time of a simulation goes: by stage, and how full the lanes were."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

STAGES = ("training", "server", "evaluation")


@dataclass
class Profile:
    """What `simulate(..., profile=Profile())` counts. On a GPU a stage is timed there, elsewhere by the clock.

    Training is the clients' local work; server is summaries and the method's step; evaluation is the test set.
    """

    lane_steps: int = 0
    """Steps times lanes."""
    client_steps: int = 0
    """How many of them moved a client."""
    seconds: float = 0.0
    """By the clock, from the first round to the last."""
    stages: dict[str, float] = field(default_factory=dict)
    _marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    @property
    def occupancy(self) -> float:
        """The share of lane-steps that moved a client."""
        return self.client_steps / self.lane_steps if self.lane_steps else 0.0

    @property
    def overhead(self) -> float:
        """The share of server steps and evaluations in the time of all stages."""
        self._read()
        total = sum(self.stages.values())
        return (total - self.stages.get("training", 0.0)) / total if total else 0.0

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        """Count what happens inside to a stage."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._marks.append((name, begin, end))
            if len(self._marks) > 10_000:
                self._read()
        else:
            start = time.perf_counter()
            yield
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start

    def _read(self) -> None:
        for name, begin, end in self._marks:
            end.synchronize()
            self.stages[name] = self.stages.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._marks.clear()

    def describe(self) -> dict[str, Any]:
        """All of it as plain values."""
        self._read()
        return {
            "seconds": round(self.seconds, 3),
            "client_steps": self.client_steps,
            "client_steps_per_second": round(self.client_steps / self.seconds, 1) if self.seconds else 0.0,
            "occupancy": round(self.occupancy, 3),
            "stages": {name: round(self.stages.get(name, 0.0), 3) for name in STAGES},
            "overhead": round(self.overhead, 3),
        }

    def lines(self) -> list[str]:
        """All of it for a reader."""
        about = self.describe()
        busy = sum(about["stages"].values())
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in about["stages"].items())
        return [
            f"{about['client_steps']:,} client-steps in {about['seconds']:.2f} s: "
            f"{about['client_steps_per_second']:,.0f} a second; lanes {100 * about['occupancy']:.0f} % full",
            f"{parts}; the rest, {max(0.0, about['seconds'] - busy):.2f} s, is the host's; "
            f"server and evaluation are {100 * about['overhead']:.0f} % of the stages",
        ]
