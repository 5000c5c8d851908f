"""FedEveProx: FedEve's server over FedProx' clients."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import Correction, Sent, Vectors
from ..settings import setting
from .fedeve import FedEve


@dataclass(frozen=True, kw_only=True)
class FedEveProx(FedEve):
    """FedEve whose clients are held near the prediction, as FedProx holds them near the model.

    Equations:
        client: gradient + mu (w - w_hat)
        server: as FedEve

    What differs from the paper: no paper has it. The clients are Li et al.'s, but they start, and are held, where
    FedEve predicts the next model to be. With mu = 0 it is FedEve.
    Cost: 1 vector down, 1 up, none remembered.
    Reference: Shen et al., FedEve (the server); Li et al., Federated Optimization in Heterogeneous Networks, 2020.
    """

    mu: float = setting(
        0.01, help="how strongly a client is held near its start (FedProx' authors: 1 images, 0.01 MovieLens)", low=0
    )

    def correction(self, sent: Sent, memory: Vectors) -> Correction:
        return Correction(prox=self.mu)
