"""FedProx: FedAvg whose clients are held near their start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..method import Correction, Sent, Vectors
from ..settings import setting
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg on local losses with a proximal term, `F_k(w) + mu/2 |w - start|^2`.

    Equations:
        client: gradient + mu (w - start)
        server: as FedAvg

    What differs from the paper: Li et al. also let clients stop early (gamma-inexact solutions); here local work is
    what `LocalWork` says.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Li et al., Federated Optimization in Heterogeneous Networks, 2020.
    """

    mu: float = setting(
        1.0, help="how strongly a client is held near its start (authors: 1 images, 0.01 MovieLens)", low=0
    )

    neutral: ClassVar[Mapping[str, float] | None] = {"mu": 0.0}

    def correction(self, sent: Sent, memory: Vectors) -> Correction:
        return Correction(prox=self.mu)
