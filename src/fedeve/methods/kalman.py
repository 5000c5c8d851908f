"""Predict and update: the rule FedAvg, FedAvgM and FedEve share, as pure functions.

A server step is `fuse(prediction, observation, gain)`; the methods differ in the prediction and in the gain: FedAvg
predicts nothing and has gain 1, FedAvgM predicts its momentum and has a fixed gain, FedEve computes the Kalman gain.
Numbers in brackets are the paper's equations. The general filter, for any noise, is in `bayes.py`.

Legend: Q period drift, R client drift, v variance, G gain, S cohort size, d number of parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..method import lane


class Posterior(NamedTuple):
    """What an update leaves: the fused mean `[..., D]`, its variance `[...]` and the gain `[...]` that was used."""

    mean: Tensor
    variance: Tensor
    gain: Tensor


def period_drift(prediction: Tensor | float, observation: Tensor, count: Tensor) -> Tensor:
    """(16) `Q = |M - u|^2 / (S d)`: how far the cohort's update is from the predicted one."""
    return (observation - prediction).double().square().sum(-1) / (count * observation.shape[-1])


def client_drift(spread: Tensor, count: Tensor, dim: int) -> Tensor:
    """(16) `R = sum_k |u_k - u|^2 / (S^2 d)`: how far the clients' updates are from each other."""
    return spread / (count.square() * dim)


def predict(variance: Tensor, drift: Tensor) -> Tensor:
    """(15b) `v_hat = v + Q`: the prediction is as uncertain as the last estimate and the period drift together."""
    return variance + drift


def kalman_gain(variance: Tensor, noise: Tensor) -> Tensor:
    """(15c) `G = v_hat / (v_hat + R)`; 1 where both are zero, since then nothing contradicts the observation."""
    total = variance + noise
    return torch.where(total == 0, 1.0, variance / total)


def fuse(prediction: Tensor | float, observation: Tensor, gain: Tensor | float) -> Tensor:
    """(15d) `M + G (u - M)`: the observation counts with weight G, the prediction with 1 - G."""
    return prediction + lane(gain) * (observation - prediction)


def update(prediction: Tensor, variance: Tensor, observation: Tensor, noise: Tensor) -> Posterior:
    """(15c, 15d, 15f) Fuse a prediction of `variance` with an observation of variance `noise`.

    The posterior variance `v_hat R / (v_hat + R)` is at most the smaller of the two (Theorem 1).
    """
    gain = kalman_gain(variance, noise)
    # The minimum changes nothing but rounding: 1 - G loses digits where the noise is tiny.
    remaining = torch.minimum((1 - gain) * variance, noise)
    return Posterior(fuse(prediction, observation, gain), remaining, gain)
