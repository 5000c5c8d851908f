"""FedAvgM: FedAvg with server momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..method import Facts, Method, Vector, keep, lane, observed
from ..settings import setting
from ..summary import Summary
from .kalman import fuse


class FedAvgMState(NamedTuple):
    """`params` [..., D]: the model. `momentum` [..., D]: running mean of the updates."""

    params: Vector
    momentum: Vector


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Method):
    """Server momentum, the member of the predict-observe family with a fixed gain and no look-ahead.

    Equations (u the clients' averaged update):
        M <- M + (1 - beta) (u - M)     = beta M + (1 - beta) u
        w <- w + server_lr M

    What differs from the paper: Hsu et al. write `M = beta M + u`; the authors of FedEve use the weighted mean above,
    which takes smaller steps at the same `server_lr` (by the factor 1 - beta in the long run).
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Hsu, Qi & Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.
    """

    server_lr: float = setting(1.0, help="how far the server moves along its momentum", above=0)
    beta: float = setting(0.9, help="how much of the momentum stays; the gain is 1 - beta", low=0, below=1)

    neutral: ClassVar[Mapping[str, float] | None] = {"beta": 0.0}

    def init(self, params: Vector, *, num_clients: int = 1) -> FedAvgMState:
        return FedAvgMState(params, torch.zeros_like(params))

    def step(self, state: FedAvgMState, summary: Summary) -> tuple[FedAvgMState, Facts]:
        momentum = fuse(state.momentum.double(), observed(state, summary), gain=1 - self.beta)
        params = state.params + lane(self.server_lr) * momentum
        return keep(state, params=params, momentum=momentum), {}
