"""SCAFFOLD: control variates correct the clients' drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..method import Correction, Facts, Method, Scalar, Sent, Vector, Vectors, keep, lane, observed, scalar_like
from ..settings import setting
from ..summary import Summary


class ScaffoldState(NamedTuple):
    """`params` [..., D]: the model. `control` [..., D]: the server's control variate c. `num_clients` [...]: N."""

    params: Vector
    control: Vector
    num_clients: Scalar


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Stochastic controlled averaging, with control variates of Option II.

    Equations (c the server's control variate, c_k the client's, K local steps at rate lr):
        client: gradient + c - c_k
                c_k' = c_k - c + (start - end) / (K lr)
        server: w <- w + server_lr u
                c <- c + (S/N) mean_k(c_k' - c_k)

    What differs from the paper: u is the mean weighted by examples, as for every method here (Karimireddy et al. take
    the plain mean). `control="released"` sets `c <- mean_k c_k'` without S/N, as FedEve's authors published it; that
    is the likely cause of the rows of 5.13 % and 1.00 % in their tables. A client without a step keeps its c_k. The
    formula for c_k' is a mean gradient only when the local optimiser is plain SGD.
    Cost: 2 vectors down, 2 up, 1 remembered by every client.
    Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020.
    """

    server_lr: float = setting(1.0, help="how far the server moves along the averaged update", above=0)
    control: str = setting("paper", help="how the server's variate follows the clients'", choices=("paper", "released"))

    remembers: ClassVar[tuple[str, ...]] = ("control",)
    replies: ClassVar[tuple[str, ...]] = ("control",)

    def init(self, params: Vector, *, num_clients: int = 1) -> ScaffoldState:
        return ScaffoldState(params, torch.zeros_like(params), scalar_like(params, num_clients))

    def send(self, state: ScaffoldState) -> Sent:
        return Sent(state.params, {"control": state.control})

    def correction(self, sent: Sent, memory: Vectors) -> Correction:
        return Correction(shift=sent.extras["control"] - memory["control"])

    def finish(
        self, update: Vector, num_steps: float | Scalar, lr: float | Scalar, sent: Sent, memory: Vectors
    ) -> tuple[Vectors, Vectors]:
        old = memory["control"]
        steps = torch.as_tensor(num_steps, dtype=update.dtype, device=update.device)
        # steps = 0 divides by one instead and is overruled below.
        mean_gradient = -update / (steps.clamp(min=1) * lr)[..., None]
        new = torch.where(steps[..., None] > 0, old - sent.extras["control"] + mean_gradient, old)
        return {"control": new - old if self.control == "paper" else new}, {"control": new}

    def step(self, state: ScaffoldState, summary: Summary) -> tuple[ScaffoldState, Facts]:
        params = state.params + lane(self.server_lr) * observed(state, summary)
        # A population that is unknown (1) or smaller than the cohort counts as full participation.
        share = (summary.count / state.num_clients).clamp(max=1.0)
        reply = summary.extras.get("control")
        if reply is None:  # clients that know nothing of control variates leave them as they are
            control = state.control
        else:
            control = state.control + lane(share) * reply if self.control == "paper" else reply
        return keep(state, params=params, control=control), {"control_norm": control.double().norm(dim=-1)}
