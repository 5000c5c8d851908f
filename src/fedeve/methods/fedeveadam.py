"""FedEveAdam: FedEve's fused momentum and look-ahead in front of FedAdam's scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..method import Facts, Method, Scalar, Sent, Vector, keep, lane, observed, scalar_like
from ..settings import setting
from ..summary import Summary
from . import kalman


class FedEveAdamState(NamedTuple):
    """`params` [..., D]: the model w. `momentum` [..., D]: the fused update M. `variance` [...]: its variance v.
    `square` [..., D]: s, the running mean of squared updates."""

    params: Vector
    momentum: Vector
    variance: Scalar
    square: Vector


@dataclass(frozen=True, kw_only=True)
class FedEveAdam(Method):
    """FedEve's filter in front of FedAdam's scaling: the Kalman gain takes the place of Adam's beta1.

    Equations (u the clients' averaged update, observed from the prediction; numbers as in FedEve's paper):
        (15a) w_hat = w + server_lr M / (sqrt(s) + tau)          clients start here
        (16)  Q = |M - u|^2 / (S d),  R = sum_k |u_k - u|^2 / (S^2 d)
        (15b) v_hat = v + Q
        (15c) G = v_hat / (v_hat + R)                            1 where both are zero
        (15d) M <- M + G (u - M)
              s <- beta2 s + (1 - beta2) u^2
        (15e) w <- w + server_lr M / (sqrt(s) + tau)             from w, not from w_hat
        (15f) v <- (1 - G) v_hat

    What differs from the paper: no paper has it. With beta2 = tau = server_lr = 1 it is FedEve; with a gain fixed at
    1 - beta1 it would be FedAdam with a look-ahead. As in FedAdam here, s starts at zero and no bias is corrected.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Shen et al., FedEve (the filter); Reddi et al., Adaptive Federated Optimization, 2021 (the scaling).
    """

    server_lr: float = setting(1e-3, help="server learning rate, about the largest move of one parameter", above=0)
    beta2: float = setting(0.99, help="how much of the mean square stays", low=0, high=1)
    tau: float = setting(1e-4, help="what is added to the root (as FedAdam: 3e-4 FEMNIST, 1e-4 others)", above=0)

    def init(self, params: Vector, *, num_clients: int = 1) -> FedEveAdamState:
        zeros = torch.zeros_like(params)
        return FedEveAdamState(params, zeros, scalar_like(params, 0.0), zeros.clone())

    def send(self, state: FedEveAdamState) -> Sent:
        return Sent(keep(state, params=state.params + self._move(state.momentum, state.square)).params)  # (15a)

    def step(self, state: FedEveAdamState, summary: Summary) -> tuple[FedEveAdamState, Facts]:
        u, momentum = observed(state, summary), state.momentum.double()
        period = kalman.period_drift(momentum, u, summary.count)  # (16)
        client = kalman.client_drift(summary.spread, summary.count, u.shape[-1])  # (16)
        prior = kalman.predict(state.variance, period)  # (15b)
        fused = kalman.update(momentum, prior, u, client)  # (15c, 15d, 15f)
        square = lane(self.beta2) * state.square.double() + lane(1 - self.beta2) * u.square()
        params = state.params + self._move(fused.mean, square)  # (15e)
        facts = {"gain": fused.gain, "period_drift": period, "client_drift": client, "variance": fused.variance}
        return keep(state, params=params, momentum=fused.mean, variance=fused.variance, square=square), facts

    def _move(self, momentum: Vector, square: Vector) -> Vector:
        return lane(self.server_lr) * momentum / (square.sqrt() + lane(self.tau))
