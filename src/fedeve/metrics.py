"""Metrics of many models at once: leading axes are models, the last one or two the test set. Pure tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """[...] top-1: the share of rows of `logits` [..., n, C] whose largest entry is at `y` [n].

    A row of NaN counts as class 0, as everywhere in PyTorch: a model that ran away has that class's share.
    """
    return (logits.argmax(-1) == y).double().mean(-1)


def auc(scores: Tensor, y: Tensor) -> Tensor:
    """[...] exact area under the ROC curve of `scores` [..., n]: how often a positive beats a negative, ties half.

    `y` [n] is 1 for positives and 0 for negatives. NaN where a score is NaN, or where either kind is missing.
    """
    positive = scores[..., y == 1].contiguous()
    negative = scores[..., y == 0].sort(-1).values
    below = torch.searchsorted(negative, positive).sum(-1)
    not_above = torch.searchsorted(negative, positive, right=True).sum(-1)
    # Whole numbers until here, so the order of the sums does not matter.
    area = (below + not_above).double() / (2 * positive.shape[-1] * negative.shape[-1])
    return torch.where(scores.isnan().any(-1), torch.nan, area)


def ranks(scores: Tensor) -> Tensor:
    """[..., users] the place, from 1, of each user's first candidate in `scores` [..., users, candidates].

    Ties count against it, as does a score that is NaN: a constant model has every positive last.
    """
    positive, others = scores[..., :1], scores[..., 1:]
    return 1 + (~(others < positive)).sum(-1)


def hit_rate(ranks: Tensor, k: int) -> Tensor:
    """[...] HR@k: the share of `ranks` [..., users] that are at most k."""
    return (ranks <= k).double().mean(-1)


def ndcg(ranks: Tensor, k: int) -> Tensor:
    """[...] NDCG@k with one relevant item: the mean over `ranks` [..., users] of 1 / log2(rank + 1) up to k, else 0."""
    return torch.where(ranks <= k, 1 / torch.log2(ranks.double() + 1), 0.0).mean(-1)
