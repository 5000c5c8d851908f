"""FedDyn: local losses are regularised so that their optima agree with the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..method import Correction, Facts, Method, Scalar, Sent, Vector, Vectors, keep, lane, observed, scalar_like
from ..settings import setting
from ..summary import Summary


class FedDynState(NamedTuple):
    """`params` [..., D]: the model. `drag` [..., D]: h of the paper. `num_clients` [...]: N."""

    params: Vector
    drag: Vector
    num_clients: Scalar


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """Dynamic regularisation.

    Equations (g_k what client k remembers, u_bar the plain mean of the updates):
        client: gradient - g_k + alpha (w - start)
                g_k <- g_k - alpha u_k
        server: h <- h - alpha (S/N) u_bar
                w <- w + u_bar - h / alpha

    What differs from the paper: nothing but the sign of the update; a population that is unknown or smaller than the
    cohort counts as full participation.
    Cost: 1 vector down, 1 up, 1 remembered by every client.
    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, 2021.
    """

    alpha: float = setting(0.01, help="strength of the regularisation", above=0)

    remembers: ClassVar[tuple[str, ...]] = ("gradient",)

    def init(self, params: Vector, *, num_clients: int = 1) -> FedDynState:
        return FedDynState(params, torch.zeros_like(params), scalar_like(params, num_clients))

    def correction(self, sent: Sent, memory: Vectors) -> Correction:
        return Correction(prox=self.alpha, shift=-memory["gradient"])

    def finish(
        self, update: Vector, num_steps: float | Scalar, lr: float | Scalar, sent: Sent, memory: Vectors
    ) -> tuple[Vectors, Vectors]:
        return {}, {"gradient": memory["gradient"] - lane(self.alpha) * update}

    def step(self, state: FedDynState, summary: Summary) -> tuple[FedDynState, Facts]:
        observed(state, summary)  # FedDyn takes the plain mean instead; this checks the shape
        share = (summary.count / state.num_clients).clamp(max=1.0)
        drag = state.drag - lane(self.alpha) * lane(share) * summary.center
        params = state.params + summary.center - drag / lane(self.alpha)
        return keep(state, params=params, drag=drag), {"drag_norm": drag.norm(dim=-1)}
