"""Group norm in lanes, alone and with ReLU and a shortcut, computes what PyTorch's functions do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import DEVICE, LANES, assert_same_gradients, images
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="hand-batched layers need Triton")

from fedeve.engines import channels, norm
from fedeve.engines.batched import Batched
from fedeve.models.norm import NormReLU


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(groups, 8), nn.Tanh(), nn.Conv2d(8, 2, 1))
    assert_same_gradients(model, images(), "ieee", 5e-6)


@pytest.mark.parametrize("outlier", [0.0, 30.0])
def test_a_norm_of_values_far_from_zero_whose_first_is_far_from_the_others(outlier: float) -> None:
    """The variance is taken around the first value, which must not cost it its digits."""
    x = 200 + images(channels=4)[0]
    x[:, ::2, 0, 0] += outlier
    weight, bias = torch.ones(4), torch.zeros(4)
    exact = functional.group_norm(x.double(), 2, weight.double(), bias.double())
    with Batched("ieee"):
        ours = functional.group_norm(x.to(DEVICE), 2, weight.to(DEVICE), bias.to(DEVICE))
    assert (ours.cpu() - exact).norm() < 5e-5 * exact.norm()


class Beside(nn.Module):
    """Two convolutions beside a shortcut, as in a ResNet; all of them have a part in what is rectified."""

    def __init__(self, groups: int, *, is_last: bool) -> None:
        super().__init__()
        first, second = (3, 16) if is_last else (3, 8)
        self.inner = nn.Sequential(nn.Conv2d(first, second, 1), NormReLU(groups, second), nn.Conv2d(second, second, 1))
        self.outer = nn.Conv2d(first, second, 1)
        self.norm = NormReLU(groups, second)
        self.last = nn.Conv2d(second, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.inner(x), self.outer(x)))
        return out


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("groups", "held"), [(1, (64, 16)), (4, norm._HELD)])
def test_group_norm_with_relu_and_a_shortcut(
    groups: int, held: tuple[int, int], is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of groups that fill many blocks, and of one that does not fill its block."""
    monkeypatch.setattr(channels, "suits", lambda weight, precision: is_last and weight.shape[0] >= channels.MULTIPLE)
    monkeypatch.setattr(norm, "_HELD", held)
    monkeypatch.setattr(norm, "_HELD_LAST", dict.fromkeys(norm._HELD_LAST, held))
    torch.manual_seed(0)
    assert_same_gradients(Beside(groups, is_last=is_last), images(), "ieee", 5e-6)


class Copies(TorchDispatchMode):
    """Notes what is copied or made of zeros, which on a GPU is a kernel more for every norm."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::clone", "aten::zeros", "aten::zeros_like"):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_weights_are_read_where_they_lie() -> None:
    """In lanes they are pieces of long vectors, or the same for all."""
    vector = torch.randn(LANES, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    x, one = images(channels=4).to(DEVICE), torch.ones(4, device=DEVICE)

    def slopes(w: Tensor, b: Tensor, x: Tensor) -> Any:
        return vmap(grad(lambda w, b, x: functional.group_norm(x, 2, w, b).pow(3).sum(), (0, 1, 2)))(w, b, x)

    with Batched("ieee"):
        with Copies() as copies:
            ours = slopes(vector[:, 3:7], vector[:, 21:25], x)
        assert copies.found == []
        for mine, packed in zip(ours, slopes(vector[:, 3:7].clone(), vector[:, 21:25].clone(), x), strict=True):
            assert torch.equal(mine, packed)
        shared = vmap(lambda x: functional.group_norm(x, 2, one, one))(x)
        assert torch.equal(shared[1], functional.group_norm(x[1], 2, one, one))


def test_a_rectified_norm_is_relu_after_group_norm_to_the_last_bit_without_kernels() -> None:
    x, skip = torch.randn(2, 3, 4, 5, 5)
    norm = NormReLU(2, 4)
    nn.init.normal_(norm.weight)
    plain = functional.group_norm(x, 2, norm.weight, norm.bias)
    assert torch.equal(norm(x), plain.relu())
    assert torch.equal(norm(x, skip), (plain + skip).relu())
    assert {name: tuple(p.shape) for name, p in norm.named_parameters()} == {"weight": (4,), "bias": (4,)}


def test_what_is_not_a_number_passes_a_rectified_norm_in_both_directions() -> None:
    """Else a run that has diverged would look as if it had not."""
    model = NormReLU(1, 4).to(DEVICE)
    x, skip = images(channels=4).to(DEVICE)
    x[0, 0, 0, 0] = float("nan")
    for beside in (None, skip):
        params = dict(model.named_parameters())
        with Batched("ieee"):
            out = model(x, beside)
            slope = grad(lambda p, beside=beside: functional_call(model, p, (x, beside)).sum())(params)
        assert out[0].isnan().all() and out[1].isfinite().all()
        assert slope["weight"].isnan().any()


def test_a_shortcut_of_another_shape_or_type_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "normalise", None)
    x = images(channels=4)[0].to(DEVICE)
    model = NormReLU(2, 4).to(DEVICE)
    for skip in (x[:, :1], x.double()):
        with Batched("ieee"):
            ours = model(x, skip)
        assert torch.equal(ours, model(x, skip))


def test_groups_that_do_not_divide_the_channels_are_pytorchs_error() -> None:
    x, ones = images(channels=4)[0].to(DEVICE), torch.ones(4, device=DEVICE)
    with Batched("ieee"), pytest.raises(RuntimeError, match="divisible"):
        functional.group_norm(x, 3, ones, ones)
