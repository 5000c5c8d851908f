"""Augmentation: images seen mirrored and shifted, drawn anew for every local step.

A view is a number. A plan of rows carries it together with the row, so that engines move one number and no more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import seeds
from .seeds import Indices

CHOICES = ("none", "flip-crop")
SHIFT = 4  # pixels at most, either way and in both directions: an eighth of CIFAR's 32, as is usual
_SHIFTS = 2 * SHIFT + 1
VIEWS = 2 * _SHIFTS**2


def view(*, mirrored: bool, down: int, right: int) -> int:
    """The number of the view that begins so many pixels down and right, mirrored or not."""
    return ((down + SHIFT) * _SHIFTS + right + SHIFT) * 2 + mirrored


def draw(plan: Indices, *, seed: int, round: int, client: int) -> Indices:
    """A view for every place of a client's plan [steps, batch]."""
    return seeds.generator(seed, round, client, "views").integers(VIEWS, size=plan.shape)


def folded(rows: Any, views: Any) -> Any:
    """Rows and views, arrays or tensors, as one number each."""
    return rows * VIEWS + views


def unfolded(both: Any) -> tuple[Any, Any]:
    """The rows and the views again; -1, which is no row, stays that.

    >>> unfolded(folded(7, 5)), unfolded(-1)[0]
    ((7, 5), -1)
    """
    return both // VIEWS, both % VIEWS


def seen(images: Tensor, views: Tensor) -> Tensor:
    """Stored images [..., C, H, W] or [..., H, W] in these views [...]: mirrored or not, then shifted, zeros around.

    >>> seen(torch.tensor([[[1, 2, 3]]]), torch.tensor(view(mirrored=True, down=0, right=1)))
    tensor([[[2, 1, 0]]])
    """
    height, width = images.shape[-2:]
    mirrored, shift = views % 2, views // 2
    i, j = (torch.arange(length, device=images.device) for length in (height, width))
    i = i + (shift // _SHIFTS - SHIFT)[..., None]
    j = j + (shift % _SHIFTS - SHIFT)[..., None]
    there = ((i >= 0) & (i < height))[..., :, None] & ((j >= 0) & (j < width))[..., None, :]
    j = torch.where(mirrored[..., None] == 1, width - 1 - j, j)
    at = i.clamp(0, height - 1)[..., :, None] * width + j.clamp(0, width - 1)[..., None, :]
    between = (1,) * (images.ndim - views.ndim - 2)  # views are of all channels alike
    pixels, at = images.flatten(-2), at.reshape(*views.shape, *between, -1)
    found = pixels.gather(-1, at.expand(pixels.shape)).unflatten(-1, (height, width))
    return torch.where(there.reshape(*views.shape, *between, height, width), found, found.new_zeros(()))
