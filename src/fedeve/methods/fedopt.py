"""FedOpt: adaptive server optimisers, FedAdam, FedYogi and FedAdagrad."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..method import Facts, Method, Vector, keep, lane, observed
from ..settings import setting
from ..summary import Summary


class FedOptState(NamedTuple):
    """`params` [..., D]: the model. `mean` [..., D]: m, of the updates. `square` [..., D]: s, of their squares."""

    params: Vector
    mean: Vector
    square: Vector


@dataclass(frozen=True, kw_only=True)
class FedOpt(Method):
    """What the three share; they differ in how the second moment s follows u^2.

    What differs from the paper: m and s start at zero (Reddi et al. let s start at any value of at least tau^2), and
    as there, no bias is corrected.
    """

    server_lr: float = setting(1e-3, help="server learning rate, about the largest move of one parameter", above=0)
    beta1: float = setting(0.9, help="how much of the mean update stays", low=0, below=1)
    tau: float = setting(1e-4, help="what is added to the root (authors: 3e-4 FEMNIST, 1e-4 others)", above=0)

    def init(self, params: Vector, *, num_clients: int = 1) -> FedOptState:
        return FedOptState(params, torch.zeros_like(params), torch.zeros_like(params))

    @abstractmethod
    def second_moment(self, square: Vector, update: Vector) -> Vector:
        """How s follows the square of the update."""

    def step(self, state: FedOptState, summary: Summary) -> tuple[FedOptState, Facts]:
        u = observed(state, summary)
        mean = lane(self.beta1) * state.mean.double() + lane(1 - self.beta1) * u
        square = self.second_moment(state.square.double(), u)
        params = state.params + lane(self.server_lr) * mean / (square.sqrt() + lane(self.tau))
        return keep(state, params=params, mean=mean, square=square), {}


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedOpt):
    """Adam on the server.

    Equations (u the clients' averaged update):
        m <- beta1 m + (1 - beta1) u
        s <- beta2 s + (1 - beta2) u^2
        w <- w + server_lr m / (sqrt(s) + tau)

    What differs from the paper: m and s start at zero.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Reddi et al., Adaptive Federated Optimization, 2021.
    """

    beta2: float = setting(0.99, help="how much of the mean square stays", low=0, high=1)

    neutral: ClassVar[Mapping[str, float] | None] = {"server_lr": 1.0, "beta1": 0.0, "beta2": 1.0, "tau": 1.0}

    def second_moment(self, square: Vector, update: Vector) -> Vector:
        return lane(self.beta2) * square + lane(1 - self.beta2) * update.square()


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedOpt):
    """Yogi on the server: as FedAdam, but s moves by at most (1 - beta2) u^2, so it forgets slowly.

    Equations:
        m <- beta1 m + (1 - beta1) u
        s <- s - (1 - beta2) u^2 sign(s - u^2)
        w <- w + server_lr m / (sqrt(s) + tau)

    What differs from the paper: m and s start at zero.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Reddi et al., Adaptive Federated Optimization, 2021.
    """

    beta2: float = setting(0.99, help="1 - beta2 is how fast the mean square moves", low=0, high=1)

    neutral: ClassVar[Mapping[str, float] | None] = {"server_lr": 1.0, "beta1": 0.0, "beta2": 1.0, "tau": 1.0}

    def second_moment(self, square: Vector, update: Vector) -> Vector:
        squared = update.square()
        return square - lane(1 - self.beta2) * squared * torch.sign(square - squared)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedOpt):
    """Adagrad on the server: s is the sum of all squares, so steps only shrink.

    Equations:
        m <- beta1 m + (1 - beta1) u        (beta1 = 0 by default, as Reddi et al. run it)
        s <- s + u^2
        w <- w + server_lr m / (sqrt(s) + tau)

    What differs from the paper: m and s start at zero.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Reddi et al., Adaptive Federated Optimization, 2021.
    """

    server_lr: float = setting(1e-2, help="server learning rate, about the first move of a parameter", above=0)
    beta1: float = setting(0.0, help="how much of the mean update stays", low=0, below=1)

    def second_moment(self, square: Vector, update: Vector) -> Vector:
        return square + update.square()
