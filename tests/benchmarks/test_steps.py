"""The benchmark of one step, on a few lanes."""

from __future__ import annotations

import steps
import torch

from fedeve import FedAvg, LocalWork, Run, datasets


def test_a_step_is_timed_and_moves_the_lanes(monkeypatch) -> None:
    monkeypatch.setattr(steps, "DEVICE", torch.device("cpu"))
    data = datasets.load("glyphs", num_writers=5, num_images=50, num_test=5)
    run = Run(method=FedAvg(), data=data, model="linear", cohort=2, local=LocalWork(batch=4))
    found = steps.step(run, 3, repeats=2)
    assert found["width"] == 3 and found["ms"] > 0
    assert found["lane_steps_per_second"] > 0
