"""FedAvg: the server moves by the clients' averaged update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..method import Facts, Method, Vector, keep, lane, observed
from ..settings import setting
from ..summary import Summary
from .kalman import fuse


class FedAvgState(NamedTuple):
    """`params` [..., D]: the model."""

    params: Vector


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Federated averaging, the member of the predict-observe family that predicts nothing.

    Equations (u the clients' averaged update):
        M <- 0 + 1 (u - 0)              gain 1: only the observation counts
        w <- w + server_lr M

    What differs from the paper: it subtracts `start - end`, we add `end - start`; the values are the same.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
    """

    server_lr: float = setting(1.0, help="how far the server moves along the averaged update", above=0)

    neutral: ClassVar[Mapping[str, float] | None] = {}

    def init(self, params: Vector, *, num_clients: int = 1) -> FedAvgState:
        return FedAvgState(params)

    def step(self, state: FedAvgState, summary: Summary) -> tuple[FedAvgState, Facts]:
        fused = fuse(0.0, observed(state, summary), gain=1.0)
        return keep(state, params=state.params + lane(self.server_lr) * fused), {}
