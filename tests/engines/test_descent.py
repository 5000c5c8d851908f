"""Local steps and a cohort's summary, each in one pass over the vectors, are those of `local.py` and `summary.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="these kernels need Triton")

from fedeve import Correction, LocalWork, local
from fedeve.engines.descent import Descent, Standing, adam
from fedeve.engines.tally import tally
from fedeve.summary import Summary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_parts(slope: Tensor) -> list[Tensor]:
    """Gradients of tensors that make up vectors of 1,500; one of them does not lie in the vectors' order."""
    one, two, three = slope.split([1, 1000, 499], dim=1)
    return [one, two.unflatten(1, (25, 40)).mT.contiguous().mT, three]


def test_a_fused_step_is_the_local_step_and_leaves_idle_lanes_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    params, slope, start, shift = (torch.randn(3, 1500, generator=generator).to(DEVICE) for _ in range(4))
    lr, prox = torch.tensor([0.1, 0.2, 0.3]).to(DEVICE), torch.tensor([0.0, 1.0, 2.0]).to(DEVICE)
    active, shifted = torch.tensor([True, False, True]).to(DEVICE), torch.tensor([0.0, 1.0, 1.0]).to(DEVICE)
    shift[0] = 0.0
    expected = params - lr[:, None] * (slope + prox[:, None] * (params - start) + shift)
    expected = torch.where(active[:, None], expected, params)
    ours = params.clone()
    start[0], shift[0] = torch.nan, torch.nan  # nothing is read where it adds nothing
    small = ours.to(torch.float16)
    Descent(Standing(ours, start, shift, lr, prox, shifted, active), small).move(in_parts(slope))
    assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6) and torch.equal(ours[1], params[1])
    assert torch.equal(small, ours.to(torch.float16))


def test_a_fused_step_of_adam_is_the_local_step_at_every_count_of_steps() -> None:
    """Lanes idle now and then, so that their counts differ. NaN is where nothing may be read."""
    generator = torch.Generator().manual_seed(0)
    start, shift, *slopes = (torch.randn(4, 1500, generator=generator).to(DEVICE) for _ in range(8))
    lr = torch.tensor([0.1, 0.2, 0.3, 0.4]).to(DEVICE)
    prox = torch.tensor([0.0, 1.0, 2.0, 0.0]).to(DEVICE)
    shifted = torch.tensor([0.0, 0.0, 1.0, 1.0]).to(DEVICE)
    correction = Correction(prox, torch.where(shifted[:, None] > 0, shift, 0.0))
    unread = {
        "start": torch.where(prox[:, None] > 0, start, torch.nan),
        "shift": torch.where(shifted[:, None] > 0, shift, torch.nan),
    }
    lanes_rate: Any = lr  # a rate for every lane, where a number is declared
    work = LocalWork(optimizer="adam", lr=lanes_rate)
    walk = local.begin(work, start)._replace(num_steps=torch.zeros(4, dtype=torch.float64, device=DEVICE))
    ours = [tensor.clone() for tensor in walk[:3]]
    for number, slope in enumerate(slopes):
        active = torch.tensor([True, number != 2, number % 2 == 0, number > 3]).to(DEVICE)
        before = [tensor.clone() for tensor in ours]
        moments = {"first": ours[1], "second": ours[2], "num_steps": walk.num_steps}
        standing = Standing(params=ours[0], **unread, lr=lr, prox=prox, shifted=shifted, active=active)
        adam(standing, in_parts(slope), **moments)
        new = local.advance(work, walk, slope, start=start, correction=correction)
        kept = [torch.where(active[:, None], after, old) for after, old in zip(new[:3], walk[:3], strict=True)]
        walk = local.Walk(*kept, walk.num_steps + active)
        for mine, old, expected in zip(ours, before, kept, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(mine[~active], old[~active])


@pytest.mark.parametrize("weights", [[1.0, 0.0, 3.0, 4.0, 2.0], [0.0] * 5])
def test_a_cohort_is_summed_up_in_one_pass_as_by_summary(weights: list[float]) -> None:
    updates = torch.randn(5, 1300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    numbers = torch.tensor(weights, dtype=torch.float64, device=DEVICE)
    ours, finite = tally(updates, numbers, {"extra": updates})
    theirs = Summary.of(updates, numbers, {"extra": updates})
    for name in ("count", "weight", "mean", "center", "scatter", "spread"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.extras["extra"], theirs.extras["extra"], rtol=1e-12, atol=1e-14)
    assert finite.all()
    updates[2, 700], updates[4, 3] = float("inf"), float("nan")
    assert tally(updates, numbers, {})[1].tolist() == [True, True, False, True, False]
