"""Metrics of many models at once: leading axes are models, the last one or two the test set. Pure tensors."""

from __future__ import annotations

from torch import Tensor


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """[...] top-1: the share of rows of `logits` [..., n, C] whose largest entry is at `y` [n]."""
    return (logits.argmax(-1) == y).double().mean(-1)
