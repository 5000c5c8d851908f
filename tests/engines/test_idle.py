"""Lanes where nobody is at work are left out by our layers, and those at work do not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layers import DEVICE, LANES, images, lanes_of
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

pytest.importorskip("triton", reason="hand-batched layers need Triton")

from fedeve.engines import channels, convolution, narrow, norm
from fedeve.engines.batched import Batched, at_work
from fedeve.engines.turning import turn
from fedeve.models.norm import NormReLU

SIZE, EDGES = (3, 3), ((1, 1), (1, 1))


def some(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(LANES, *shape, generator=generator).to(DEVICE)


IMAGES, LAST, TAPS, MOMENTS = some(2, 16, 6, 6), some(2, 6, 6, 16), some(16, 9, 16), some(2, 2)
KERNELS: dict[str, Callable[[], Any]] = {
    "turned weights": lambda: channels.taps(some(16, 16, 3, 3), "ieee"),
    "sums of pieces": lambda: turn(some(3, 4, 5, 6), torch.float32, at_work(LANES)),
    "convolution, channels last": lambda: channels.convolve(LAST, TAPS, SIZE, *EDGES, "ieee"),
    "its images' gradient": lambda: channels.input_gradient(LAST, TAPS, (6, 6), SIZE, *EDGES, "ieee"),
    "its kernels' gradient": lambda: channels.kernel_gradient(LAST, LAST, SIZE, *EDGES, "ieee"),
    "convolution": lambda: convolution.convolve(IMAGES, some(17, 16, 3, 3), None, *EDGES, "ieee"),
    "its kernels' gradient, channels first": lambda: convolution.kernel_gradient(
        IMAGES, some(2, 17, 6, 6), SIZE, *EDGES, "ieee"
    ),
    "few channels": lambda: narrow.convolve(
        IMAGES, some(5, 16, 3, 3), None, *EDGES, torch.empty_like(some(2, 5, 6, 6))
    ),
    "their kernels' gradient": lambda: narrow.kernel_gradient(IMAGES, some(2, 5, 6, 6), SIZE, *EDGES),
    "norm": lambda: norm.normalise(IMAGES, IMAGES, some(16), some(16), 2, 1e-5, True)[0],
    "its gradients": lambda: norm.gradients(IMAGES, IMAGES, some(16), some(16), MOMENTS, MOMENTS, IMAGES, True)[0],
    "its weights' gradients": lambda: torch.cat(
        norm.gradients(IMAGES, IMAGES, some(16), some(16), MOMENTS, MOMENTS, None, True)[1:3], dim=1
    ),
}


@pytest.fixture
def memory_of_nothing() -> Iterator[None]:
    """What is not computed is not a number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("memory_of_nothing")
def test_a_kernel_computes_the_lanes_at_work(kernel: str, lane: int) -> None:
    busy = torch.arange(LANES, device=DEVICE) == lane
    every = KERNELS[kernel]()
    with Batched("ieee", busy):
        ours = KERNELS[kernel]()
    assert every.isfinite().all()
    assert torch.equal(ours[busy], every[busy])
    assert ours[~busy].isnan().all()


@pytest.mark.usefixtures("memory_of_nothing")
def test_a_lane_at_work_does_not_notice_that_others_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "suits", lambda weight, precision: weight.shape[0] % channels.MULTIPLE == 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 16, 3), NormReLU(2, 16), nn.Conv2d(16, 3, 1)).to(DEVICE)

    def slopes(busy: Tensor | None) -> dict[str, Tensor]:
        with Batched("ieee", busy):
            found = vmap(grad(lambda p, x: functional_call(model, p, (x,)).pow(3).sum()))(
                lanes_of(model), images(size=5).to(DEVICE)
            )
        return found

    busy = torch.arange(LANES, device=DEVICE) == 1
    every, ours = slopes(None), slopes(busy)
    for name, value in ours.items():
        assert torch.equal(value[busy], every[name][busy]), name


def test_two_threads_do_not_mix_up_who_is_at_work() -> None:
    mine, theirs = (torch.zeros(LANES, dtype=torch.bool, device=DEVICE) for _ in range(2))
    found = []

    def other() -> None:
        with Batched("ieee", theirs):
            found.append(at_work(LANES))

    thread = threading.Thread(target=other)
    with Batched("ieee", mine):
        thread.start()
        thread.join(0.2)
        assert not found and at_work(LANES) is mine
    thread.join()
    assert found == [theirs] and found[0] is theirs and at_work(LANES) is None


def test_a_layer_whose_lanes_are_others_computes_all_of_them() -> None:
    """As one that every lane shares, which is computed once."""
    assert at_work(LANES) is None
    busy = torch.zeros(LANES, dtype=torch.bool, device=DEVICE)
    with Batched("ieee", busy):
        assert at_work(LANES) is busy and at_work(1) is None
        with Batched("ieee"):
            assert at_work(LANES) is None
        x, w = images()[0].to(DEVICE), torch.ones(4, 3, 1, 1, device=DEVICE)
        assert torch.conv2d(x, w).isfinite().all()
    assert at_work(LANES) is None
