"""FedEve: predicts with momentum, observes the clients, fuses both with a Kalman gain computed from the drifts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..method import Facts, Method, Scalar, Sent, Vector, keep, lane, observed, scalar_like
from ..settings import setting
from ..summary import Summary
from . import kalman


class FedEveState(NamedTuple):
    """`params` [..., D]: the model w. `momentum` [..., D]: the fused update M. `variance` [...]: its variance v."""

    params: Vector
    momentum: Vector
    variance: Scalar


@dataclass(frozen=True, kw_only=True)
class FedEve(Method):
    """The predict-observe framework with Nesterov momentum as prediction and a Kalman filter as fusion.

    Equations (u the clients' averaged update, observed from the prediction; numbers as in the paper):
        (15a) w_hat = w + server_lr M                            clients start here
        (16)  Q = |M - u|^2 / (S d)                              period drift
              R = sum_k |u_k - u|^2 / (S^2 d)                    client drift
        (15b) v_hat = v + Q
        (15c) G = v_hat / (v_hat + R)                            1 where both are zero
        (15d) M <- M + G (u - M)
        (15e) w <- w + server_lr M                               from w, not from w_hat
        (15f) v <- (1 - G) v_hat

    What differs from the paper: it writes `start - end` and subtracts, so its M is minus ours. Theorem 1's fused mean
    is printed without `+ v_hat` in the denominator, and the appendix prints `sigma_t` for its square; (15c) and (15d)
    are the correct forms. `drift="released"` is the authors' published code, which differs in two lines:
    `Q = |u|^2 / (S d)`, and R is taken around the plain mean of the updates. `observation_noise` is ours: where noise
    of known variance was added to u (differential privacy), (15c) uses R plus that variance.
    Cost: 1 vector down, 1 up, none remembered: what FedAvg costs.
    Reference: Shen et al., FedEve: On Bridging the Client Drift and Period Drift for Cross-device Federated Learning.
    """

    server_lr: float = setting(1.0, help="how far the server moves along the fused update", above=0)
    drift: str = setting("paper", help="which estimates of Q and R", choices=("paper", "released"))
    observation_noise: float = setting(
        0.0, help="variance of noise that was added to every number of the averaged update; adds to R", low=0
    )

    def init(self, params: Vector, *, num_clients: int = 1) -> FedEveState:
        return FedEveState(params, torch.zeros_like(params), scalar_like(params, 0.0))

    def send(self, state: FedEveState) -> Sent:
        return Sent(keep(state, params=state.params + lane(self.server_lr) * state.momentum).params)  # (15a)

    def step(self, state: FedEveState, summary: Summary) -> tuple[FedEveState, Facts]:
        u, momentum = observed(state, summary), state.momentum.double()
        paper = self.drift == "paper"
        period = kalman.period_drift(momentum if paper else 0.0, u, summary.count)  # (16)
        spread = summary.spread if paper else summary.scatter
        client = kalman.client_drift(spread, summary.count, u.shape[-1])  # (16)
        prior = kalman.predict(state.variance, period)  # (15b)
        fused = kalman.update(momentum, prior, u, client + self.observation_noise)  # (15c, 15d, 15f)
        params = state.params + lane(self.server_lr) * fused.mean  # (15e)
        facts = {"gain": fused.gain, "period_drift": period, "client_drift": client, "variance": fused.variance}
        return keep(state, params=params, momentum=fused.mean, variance=fused.variance), facts
