"""FedEveParts: FedEve taken apart, to see which of its parts does what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import FedeveError, Words
from ..method import Facts, Scalar, Sent, Vector, Vectors, keep, lane, observed
from ..settings import setting
from ..summary import Summary
from . import kalman
from .fedeve import FedEve, FedEveState
from .kalman import Posterior


@dataclass(frozen=True, kw_only=True)
class FedEveParts(FedEve):
    """FedEve with its look-ahead, its gain and the gain's reach as settings; at its defaults it is FedEve.

    Equations (b a block of consecutive parameters, n_b its size; the rest as FedEve's):
        (15a) w_hat = w                                          without look_ahead
        (16)  Q_b = |M_b - u_b|^2 / (S n_b),  R_b = sum_k |u_kb - u_b|^2 / (S^2 n_b)
        (15c) G_b = v_hat_b / (v_hat_b + R_b), or the gain given
        (15d) M_b <- M_b + G_b (u_b - M_b)
        (15f) v_b <- (1 - G_b) v_hat_b

    With `layers` the state's variance is [..., B], one for each block, and facts are means over the blocks, weighted by
    their sizes. Clients then send their squared updates, too: R_b comes from the plain means c of the updates and q of
    the squares, `sum_k |u_kb - u_b|^2 = S sum_b (q - c^2) + S |c_b - u_b|^2`, whatever the weights. The first term is a
    difference, so it is as accurate as the squares, about 1e-7 of them in float32; to that, one block is FedEve.

    What differs from the paper: all of it but the defaults. `look_ahead=False, gain=1 - beta` is FedAvgM with beta,
    `look_ahead=False, gain=1` is FedAvg.
    Cost: 1 vector down, 1 up, none remembered; 2 up with `layers`.
    Reference: Shen et al., FedEve: On Bridging the Client Drift and Period Drift for Cross-device Federated Learning.
    """

    look_ahead: bool = setting(True, help="whether clients start at the prediction; else at the model")
    gain: float | None = setting(None, help="a fixed gain instead of the Kalman gain", above=0, high=1)
    layers: str = setting("", help="sizes of consecutive blocks that have a gain each, such as 150,6; empty: one gain")

    neutral: ClassVar[Mapping[str, float] | None] = {"look_ahead": False, "gain": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(size.strip().isdecimal() and int(size) for size in self.layers.split(",") if self.layers):
            raise FedeveError(
                f"{self.name}.layers must be sizes", got=self.layers, do="write whole numbers and commas, such as 150,6"
            )

    @property
    def replies(self) -> tuple[str, ...]:  # type: ignore[override]
        """The squares, where their sums are needed layer by layer."""
        return ("square",) if self.layers else ()

    def init(self, params: Vector, *, num_clients: int = 1) -> FedEveState:
        plain = super().init(params)
        if not self.layers:
            return plain
        sizes = self._sizes(params)
        if sum(sizes) != params.shape[-1]:
            raise FedeveError(
                f"{self.name}.layers does not fit the model",
                got=Words(f"{len(sizes)} sizes that add up to {sum(sizes)}"),
                do=f"give sizes that add up to its {params.shape[-1]} parameters",
            )
        return FedEveState(params, plain.momentum, params.new_zeros(*params.shape[:-1], len(sizes)))

    def send(self, state: FedEveState) -> Sent:
        return super().send(state) if self.look_ahead else Sent(state.params)

    def finish(
        self, update: Vector, num_steps: float | Scalar, lr: float | Scalar, sent: Sent, memory: Vectors
    ) -> tuple[Vectors, Vectors]:
        return ({"square": update.square()} if self.layers else {}), {}

    def step(self, state: FedEveState, summary: Summary) -> tuple[FedEveState, Facts]:
        u, momentum = observed(state, summary), state.momentum.double()
        sizes = self._sizes(u)
        variances = state.variance.double().unbind(-1) if self.layers else (state.variance,)
        blocks: list[Posterior] = []
        facts: Facts = dict.fromkeys(
            ("gain", "period_drift", "client_drift", "variance"), torch.zeros_like(summary.count)
        )
        rows = zip(momentum.split(sizes, -1), u.split(sizes, -1), self._spreads(summary, sizes), variances, strict=True)
        for size, (mine, seen, spread, variance) in zip(sizes, rows, strict=True):
            period = kalman.period_drift(mine if self.drift == "paper" else 0.0, seen, summary.count)  # (16)
            client = kalman.client_drift(spread, summary.count, size)  # (16)
            prior = kalman.predict(variance, period)  # (15b)
            fused = self._fused(mine, prior, seen, client + self.observation_noise)
            blocks.append(fused)
            values = (fused.gain, period, client, fused.variance)
            facts = {name: facts[name] + size / sum(sizes) * value for name, value in zip(facts, values, strict=True)}
        mean = torch.cat([fused.mean for fused in blocks], -1)
        variance = torch.stack([fused.variance for fused in blocks], -1) if self.layers else blocks[0].variance
        params = state.params + lane(self.server_lr) * mean  # (15e)
        return keep(state, params=params, momentum=mean, variance=variance), facts

    def _fused(self, prediction: Vector, prior: Scalar, observation: Vector, noise: Scalar) -> Posterior:
        if self.gain is None:
            return kalman.update(prediction, prior, observation, noise)  # (15c, 15d, 15f)
        gain = torch.zeros_like(prior) + self.gain
        return Posterior(kalman.fuse(prediction, observation, gain), (1 - gain) * prior, gain)

    def _sizes(self, vector: Vector) -> list[int]:
        return [int(size) for size in self.layers.split(",")] if self.layers else [vector.shape[-1]]

    def _spreads(self, summary: Summary, sizes: list[int]) -> list[Scalar]:
        """`sum_k |u_kb - u_b|^2` of every block; around the plain mean where the drift is the released code's."""
        paper = self.drift == "paper"
        if not self.layers:
            return [summary.spread if paper else summary.scatter]
        square = summary.extras.get("square")
        if square is None:
            raise FedeveError(
                "a gain per layer needs the clients' squares",
                got=Words("replies without squares"),
                do="let clients send what the method's finish gives, or leave layers empty",
            )
        scatter = (square - summary.center.square()).split(sizes, -1)
        offset = (summary.center - summary.mean).square().split(sizes, -1)
        # Rounding may leave the difference below zero where all clients agree.
        within = [summary.count * part.sum(-1).clamp(min=0.0) for part in scatter]
        return [w + summary.count * part.sum(-1) for w, part in zip(within, offset, strict=True)] if paper else within
