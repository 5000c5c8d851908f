"""What does not fit a method is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from oracles import each_method
from torch import Tensor

from fedeve import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedEve,
    FedeveError,
    FedEveParts,
    FedProx,
    Method,
    Scaffold,
    Summary,
)


@pytest.mark.parametrize(
    ("updates", "weights"),
    [
        (torch.zeros(3, 4), torch.ones(2)),
        (torch.zeros(3, 4), torch.ones(1)),
        (torch.zeros(3, 4), torch.ones(3, 1)),
        (torch.zeros(3, 4), torch.ones(3, 4)),
        (torch.zeros(3, 4), torch.tensor(1.0)),
        (torch.zeros(4), torch.ones(4)),
        (torch.zeros(0, 4), torch.ones(0)),
        (torch.zeros(2, 4), torch.tensor([1.0, -1.0])),
        (torch.zeros(2, 4), torch.tensor([1.0, math.nan])),
        (torch.zeros(2, 4), torch.tensor([1.0, math.inf])),
    ],
    ids=["few", "one", "column", "per-entry", "scalar", "vector", "nobody", "negative", "nan", "infinite"],
)
def test_updates_and_weights_that_do_not_fit_are_refused(updates: Tensor, weights: Tensor) -> None:
    with pytest.raises(FedeveError):
        Summary.of(updates, weights)


def test_extras_of_another_shape_are_refused() -> None:
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(3, 4), torch.ones(3), {"control": torch.zeros(3, 5)})
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(3, 4), torch.ones(3), {"control": torch.zeros(2, 4)})


def test_summaries_of_different_models_are_not_merged() -> None:
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(3, 4), torch.ones(3)).merge(Summary.of(torch.zeros(3, 1), torch.ones(3)))
    with pytest.raises(FedeveError):
        Summary.of(torch.zeros(1, 4), torch.ones(1)).merge(
            Summary.of(torch.zeros(1, 4), torch.ones(1), {"control": torch.zeros(1, 4)})
        )


@pytest.mark.parametrize("dim", [1, 4, 6])
@each_method
def test_updates_of_another_model_are_refused(method: Method, dim: int) -> None:
    state = method.init(torch.zeros(5), num_clients=3)
    extras = {name: torch.zeros(2, dim) for name in method.replies}
    with pytest.raises(FedeveError):
        method.step(state, Summary.of(torch.zeros(2, dim), torch.ones(2), extras))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedEve(drift="published"),
        lambda: Scaffold(control="published"),
        lambda: FedAvg(server_lr=-1.0),
        lambda: FedAvg(server_lr=math.nan),
        lambda: FedAvgM(beta=1.5),
        lambda: FedProx(mu=-0.1),
        lambda: FedAdam(tau=-1e-4),
        lambda: FedAdam(beta2=1.1),
        lambda: FedDyn(alpha=0.0),
        lambda: FedEveParts(gain=0.0),
        lambda: FedEveParts(gain=1.5),
    ],
    ids=["drift", "control", "server_lr", "nan", "beta", "mu", "tau", "beta2", "alpha", "no-gain", "gain"],
)
def test_hyper_parameters_out_of_range_are_refused(make: Callable[[], Method]) -> None:
    with pytest.raises(FedeveError):
        make()
