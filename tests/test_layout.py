"""A vector and a module's named tensors are the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedeve import FedeveError, Layout


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def vector_of(module: nn.Module) -> torch.Tensor:
    return Layout.of(module).flatten(dict(module.named_parameters()))


def test_names_and_shapes_are_the_modules_in_its_order():
    net = small_net()
    layout = Layout.of(net)
    assert layout.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert [tuple(shape) for shape in layout.shapes] == [(2, 1, 3, 3), (2,), (3, 8), (3,)]
    assert layout.sizes == [18, 2, 24, 3]
    assert layout.num_params == 47 == sum(param.numel() for param in net.parameters())


def test_flatten_is_what_torch_makes_of_the_parameters():
    net = small_net()
    vector = vector_of(net)
    assert torch.equal(vector, nn.utils.parameters_to_vector(net.parameters()).detach())
    assert not vector.requires_grad


def test_flatten_copies():
    net = nn.Linear(2, 1, bias=False)
    vector = vector_of(net)
    vector += 1
    assert not torch.equal(vector, net.weight.detach().reshape(-1))


def test_flatten_follows_names_and_not_the_order_of_the_mapping():
    net = small_net()
    shuffled = dict(reversed(list(net.named_parameters())))
    assert torch.equal(Layout.of(net).flatten(shuffled), vector_of(net))


def test_unflatten_undoes_flatten():
    net = small_net()
    named = Layout.of(net).unflatten(vector_of(net))
    assert list(named) == [name for name, _ in net.named_parameters()]
    assert all(torch.equal(named[name], param) for name, param in net.named_parameters())


def test_unflatten_keeps_leading_lanes():
    layout = Layout.of(small_net())
    lanes = torch.arange(2 * 3 * 47.0).reshape(2, 3, 47)
    named = layout.unflatten(lanes)
    assert named["0.weight"].shape == (2, 3, 2, 1, 3, 3)
    alone = layout.unflatten(lanes[1, 2])
    assert all(torch.equal(named[name][1, 2], alone[name]) for name in layout.names)


def test_a_model_called_with_unflattened_parameters_is_the_model():
    net, x = small_net(), torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    named = Layout.of(net).unflatten(vector_of(net))
    assert torch.equal(torch.func.functional_call(net, named, (x,)), net(x))


def test_gradients_flow_back_into_the_vector():
    layout = Layout.of(nn.Linear(2, 1))
    vector = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (layout.unflatten(vector)["weight"].sum() * 5 + layout.unflatten(vector)["bias"].sum()).backward()
    assert vector.grad.tolist() == [5.0, 5.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_and_back_is_the_same_vector(dtype):
    layout, vector = Layout.of(small_net()), vector_of(small_net()).to(dtype)
    arrays = layout.to_numpy(vector)
    assert [array.shape for array in arrays] == [tuple(shape) for shape in layout.shapes]
    back = layout.from_numpy(arrays)
    assert torch.equal(back, vector)
    assert back.dtype == dtype


def test_arrays_in_fortran_order_are_read_right():
    layout = Layout.of(nn.Linear(3, 2))
    arrays = layout.to_numpy(torch.arange(8.0))
    assert layout.from_numpy([np.asfortranarray(array) for array in arrays]).tolist() == list(range(8))


def test_a_scalar_parameter_has_a_place():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))
            self.rest = nn.Linear(1, 1)

    layout, vector = Layout.of(Scaled()), torch.tensor([7.0, 8.0, 9.0])
    assert layout.unflatten(vector)["factor"].shape == ()
    assert torch.equal(layout.from_numpy(layout.to_numpy(vector)), vector)


def test_a_shared_parameter_is_counted_once():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    assert Layout.of(nn.Sequential(first, second)).num_params == 4 + 2 + 2


@pytest.mark.parametrize("wrong", ["too few", "too many", "transposed"])
def test_arrays_that_do_not_fit_are_refused(wrong):
    layout = Layout.of(nn.Linear(3, 2))
    arrays = layout.to_numpy(torch.arange(8.0))
    bad = {"too few": arrays[:1], "too many": [*arrays, arrays[0]], "transposed": [arrays[0].T, arrays[1]]}[wrong]
    with pytest.raises(FedeveError, match="do not fit the model"):
        layout.from_numpy(bad)


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(2),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
        nn.InstanceNorm1d(2, track_running_stats=True),
    ],
)
def test_running_statistics_are_refused_with_a_remedy(module):
    with pytest.raises(FedeveError, match=r"running statistics.*GroupNorm"):
        Layout.of(module)


@pytest.mark.parametrize(
    "module",
    [
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2, affine=True),
    ],
)
def test_normalisation_without_running_statistics_is_welcome(module):
    assert Layout.of(module).num_params == 4


def test_a_model_without_parameters_is_refused():
    with pytest.raises(FedeveError, match="nothing to train"):
        Layout.of(nn.Flatten())


def test_frozen_parameters_are_not_part_of_the_vector():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    layout = Layout.of(model)
    assert layout.names == ("1.weight", "1.bias")
    assert layout.num_params == 10
