"""Local work: what a client does between receiving a model and sending its update, as arithmetic on vectors.

Which batches it sees (`plan`) and how a step moves it (`begin`, `advance`). Models, losses, loops are the engines'.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import augment, seeds, settings
from .errors import FedeveError
from .method import Correction, Vector, lane
from .seeds import Indices
from .settings import setting


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """The local optimiser and how long it runs: `epochs` over the client's data, or a fixed number of `steps`."""

    lr: float = setting(0.01, help="the client's learning rate", above=0)
    batch: int = setting(20, help="examples per local step", low=1)
    epochs: int = setting(1, help="passes over the client's data", low=1)
    steps: int | None = setting(None, help="a fixed number of local steps, instead of epochs", low=1)
    optimizer: str = setting("sgd", help="the local optimiser, fresh every round", choices=("sgd", "adam"))
    momentum: float = setting(0.0, help="momentum of SGD", low=0, below=1)
    weight_decay: float = setting(0.0, help="L2 penalty added to the gradient", low=0)
    clip: float | None = setting(None, help="largest norm of a gradient, after its correction", above=0)
    augment: str = setting("none", help="images as they are, or mirrored and shifted", choices=augment.CHOICES)

    def __post_init__(self) -> None:
        settings.check(self, where="local.")
        if self.optimizer == "adam" and self.momentum:
            raise FedeveError("Adam has no momentum", got=self.momentum, do="leave local.momentum out, or use sgd")

    @property
    def augments(self) -> bool:
        """Whether images are mirrored and shifted."""
        return self.augment != "none"

    def describe(self) -> dict[str, Any]:
        """The settings by name. What came later is there where it is used, so that names of earlier runs stay."""
        return {name: value for name, value in asdict(self).items() if name != "augment" or self.augments}


def plan(work: LocalWork, num_examples: int, *, seed: int, round: int, client: int) -> Indices:
    """The batches of one client in one round: positions in its data, [steps, batch], -1 where a batch is short.

    Every epoch is a fresh shuffle, cut into batches; the last one may be short. A client without data has no steps.
    """
    if num_examples == 0:
        return np.empty((0, work.batch), dtype=np.int64)
    per_epoch = -(-num_examples // work.batch)
    epochs = work.epochs if work.steps is None else -(-work.steps // per_epoch)
    rng = seeds.generator(seed, round, client, "batches")
    rows = np.full((epochs, per_epoch * work.batch), -1, dtype=np.int64)
    for epoch in range(epochs):
        rows[epoch, :num_examples] = rng.permutation(num_examples)
    return rows.reshape(epochs * per_epoch, work.batch)[: work.steps]


def views(work: LocalWork, plan: Indices, *, seed: int, round: int, client: int) -> Indices:
    """How each example of a client's plan is seen, [steps, batch]; all as they are stored unless `work` augments."""
    return augment.draw(plan, seed=seed, round=round, client=client) if work.augments else np.zeros_like(plan)


def num_steps(work: LocalWork, sizes: Indices) -> Indices:
    """How many batches clients with so many examples have in a round."""
    if work.steps is not None:
        return np.where(sizes > 0, work.steps, 0)
    return -(-sizes // work.batch) * work.epochs


class Walk(NamedTuple):
    """A client under way: its `params` [..., D], the optimiser's moments, and the steps taken."""

    params: Vector
    first: Tensor
    second: Tensor
    num_steps: int | Tensor
    """[...] per lane, in float64."""


def is_plain(work: LocalWork, optimizer: str = "sgd") -> bool:
    """Whether local steps are this optimiser and nothing else, for which there are short cuts."""
    return work.optimizer == optimizer and not (work.momentum or work.weight_decay or work.clip)


def begin(work: LocalWork, start: Vector) -> Walk:
    """A client at its start, with a fresh optimiser."""
    none = start.new_zeros(())
    first = torch.zeros_like(start) if work.momentum or work.optimizer == "adam" else none
    second = torch.zeros_like(start) if work.optimizer == "adam" else none
    return Walk(start, first, second, 0)


def advance(work: LocalWork, walk: Walk, grad: Vector, *, start: Vector, correction: Correction) -> Walk:
    """One local step along the corrected gradient `grad + prox (params - start) + shift`."""
    grad = _clipped(work, corrected(grad, walk.params, start, correction))
    if work.weight_decay:
        grad = grad + work.weight_decay * walk.params
    return (_adam if work.optimizer == "adam" else _sgd)(work, walk, grad)


def corrected(grad: Vector, params: Vector, start: Vector, correction: Correction) -> Vector:
    """`grad + prox (params - start) + shift`, the one line every client needs after its backward pass."""
    if not isinstance(correction.prox, float) or correction.prox:
        # Cast back: a strength per lane is float64, whatever the params are.
        grad = grad + (lane(correction.prox) * (params - start)).to(grad.dtype)
    return grad if correction.shift is None else grad + correction.shift


def _clipped(work: LocalWork, grad: Vector) -> Vector:
    if work.clip is None:
        return grad
    norm = grad.norm(dim=-1, keepdim=True)
    return grad * (work.clip / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as torch.nn.utils.clip_grad_norm_ has it


def _sgd(work: LocalWork, walk: Walk, grad: Vector) -> Walk:
    first = work.momentum * walk.first + grad if work.momentum else grad
    kept = first if work.momentum else walk.first
    return Walk(walk.params - lane(work.lr) * first, kept, walk.second, walk.num_steps + 1)


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # PyTorch's defaults


def _adam(work: LocalWork, walk: Walk, grad: Vector) -> Walk:
    step = walk.num_steps + 1
    first = BETA1 * walk.first + (1 - BETA1) * grad
    second = BETA2 * walk.second + (1 - BETA2) * grad.square()
    unbiased, unbiased_square = (_debias(mean, beta, step) for mean, beta in ((first, BETA1), (second, BETA2)))
    params = walk.params - lane(work.lr) * unbiased / (unbiased_square.sqrt() + EPSILON)
    return Walk(params, first, second, step)


def _debias(mean: Vector, beta: float, step: int | Tensor) -> Vector:
    if isinstance(step, Tensor):
        return mean / (1 - beta**step)[..., None].to(mean.dtype)
    return mean / (1 - beta**step)
