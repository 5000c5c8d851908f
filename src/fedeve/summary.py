"""Summary: all that a server needs of a cohort's updates, in one pass and O(D) memory.

Sums are kept as means and scatters in float64 and merged pairwise (Chan, Golub & LeVeque 1983), so the spread stays
exact where the mean dominates it, and neither order nor grouping of the clients matters beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from .errors import FedeveError, Words

_BLOCK = 2**17  # numbers of every update in float64 at once: what a cache holds, not what a large model fills


@dataclass(frozen=True)
class Summary:
    """Mean and spread of the updates of `count` clients. Closed under `merge`.

    >>> summary = Summary.of(torch.tensor([[1.0, 0.0], [4.0, 0.0]]), torch.tensor([1.0, 2.0]))
    >>> summary.mean.tolist(), summary.spread.item()
    ([3.0, 0.0], 5.0)
    """

    count: Tensor
    """[...] how many clients, S."""
    weight: Tensor
    """[...] their total weight, sum n_k."""
    mean: Tensor
    """[..., D] weighted mean, u = sum_k n_k u_k / sum_k n_k; zero where the weight is zero."""
    center: Tensor
    """[..., D] plain mean of the updates."""
    scatter: Tensor
    """[...] sum_k |u_k - center|^2."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """[..., D] plain mean of whatever else clients sent, by name."""

    @property
    def spread(self) -> Tensor:
        """[...] `sum_k |u_k - u|^2`, a plain sum over clients around the weighted mean."""
        # Around any point: sum |u_k - u|^2 = sum |u_k - center|^2 + S |center - u|^2 (both terms positive).
        return self.scatter + self.count * (self.center - self.mean).square().sum(-1)

    @classmethod
    def of(
        cls,
        updates: Tensor,
        weights: Tensor,
        extras: Mapping[str, Tensor] | None = None,
        *,
        trusted: bool = False,
    ) -> Summary:
        """Summary of `updates` [..., S, D] with `weights` [..., S] and `extras` [..., S, D] by name.

        What an engine made itself is `trusted`: looking at weights on a GPU would wait for it.
        """
        if not trusted:
            _check(updates, weights, extras or {})
        weights = weights.double()
        weight = weights.sum(-1)
        # Divided before summing: exact for one client, and no overflow for large example counts.
        shares = weights / torch.where(weight > 0, weight, 1.0)[..., None]
        blocks = (_moments(block.double(), shares) for block in updates.split(_BLOCK, -1))
        means, centers, scatters = zip(*blocks, strict=True)
        return cls(
            count=torch.full_like(weight, updates.shape[-2]),
            weight=weight,
            mean=torch.where((weight > 0)[..., None], torch.cat(means, -1), 0.0),
            center=torch.cat(centers, -1),
            scatter=torch.stack(scatters).sum(0),
            extras={
                name: torch.cat([block.double().mean(-2) for block in value.split(_BLOCK, -1)], -1)
                for name, value in (extras or {}).items()
            },
        )

    @classmethod
    def from_sums(
        cls,
        count: float | Tensor,
        updates: Tensor,
        squares: float | Tensor,
        extras: Mapping[str, Tensor] | None = None,
    ) -> Summary:
        """Summary of `count` clients of equal weight from sums alone: `sum_k u_k` [..., D] and `sum_k |u_k|^2` [...].

        All that secure aggregation reveals, and enough for every method. `extras` are sums, too. The scatter is a
        difference here, so it has the accuracy of the squares: about 1e-16 of them, or what their quantisation leaves.

        >>> summary = Summary.from_sums(2, torch.tensor([4.0, 0.0]), 10.0)  # of [1, 0] and [3, 0]
        >>> summary.mean.tolist(), summary.spread.item()
        ([2.0, 0.0], 2.0)
        """
        total = updates.double()
        number = torch.as_tensor(count, dtype=torch.float64, device=total.device).expand(total.shape[:-1])
        square = torch.as_tensor(squares, dtype=torch.float64, device=total.device).expand(total.shape[:-1])
        _check_sums(number, total, square)
        center = total / number[..., None]
        return cls(
            count=number,
            weight=number,
            mean=center,
            center=center,
            # sum |u_k - c|^2 = sum |u_k|^2 - S |c|^2; rounding may leave it below zero where all clients agree.
            scatter=(square - number * center.square().sum(-1)).clamp(min=0.0),
            extras={name: value.double() / number[..., None] for name, value in (extras or {}).items()},
        )

    def merge(self, other: Summary) -> Summary:
        """The summary of both groups of clients together."""
        if self.mean.shape != other.mean.shape or set(self.extras) != set(other.extras):
            raise FedeveError(
                "summaries of different models cannot be merged",
                got=Words(f"{_words(self)} and {_words(other)}"),
                do="merge updates of one model, sent by clients of one method",
            )
        count, weight = self.count + other.count, self.weight + other.weight
        share = (other.count / count)[..., None]
        share_by_weight = torch.where(weight > 0, other.weight / torch.where(weight > 0, weight, 1.0), 0.0)[..., None]
        gap = other.center - self.center
        return Summary(
            count=count,
            weight=weight,
            mean=self.mean + share_by_weight * (other.mean - self.mean),
            center=self.center + share * gap,
            # Chan et al. (1983), eq. 2.1b: the scatter between the two groups.
            scatter=self.scatter + other.scatter + self.count * other.count / count * gap.square().sum(-1),
            extras={n: mean + share * (other.extras[n] - mean) for n, mean in self.extras.items()},
        )

    @staticmethod
    def merged(parts: Iterable[Summary]) -> Summary:
        """All `parts` merged from left to right; there must be at least one."""
        return reduce(Summary.merge, parts)


def _moments(values: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean, plain mean and scatter of `values` [..., S, D], all in float64."""
    # Around the first client, so that clients who agree agree exactly: no spread, and FedEve's gain is 1.
    gaps = values - values[..., :1, :]
    middle = gaps.mean(-2, keepdim=True)
    center = (values[..., :1, :] + middle).squeeze(-2)
    gaps -= middle
    # The mean of what is left after the centre is taken away keeps all digits of the differences.
    return center + (shares[..., None] * gaps).sum(-2), center, gaps.square().sum((-2, -1))


def _words(summary: Summary) -> str:
    return f"a summary of shape {tuple(summary.mean.shape)} with extras {sorted(summary.extras)}"


def _check_sums(count: Tensor, updates: Tensor, squares: Tensor) -> None:
    fine = torch.isfinite(squares) & (squares >= 0) & (count >= 1) & torch.isfinite(updates).all(-1)
    if updates.ndim < 1 or not bool(fine.all()):
        raise FedeveError(
            "these are no sums of updates",
            got=Words(f"count {count.tolist()}, squares {squares.tolist()}"),
            do="give a count of at least 1, the sum of the updates [..., D] and the sum of their squared norms",
        )


def _check(updates: Tensor, weights: Tensor, extras: Mapping[str, Tensor]) -> None:
    if updates.ndim < 2 or updates.shape[:-1] != weights.shape or updates.shape[-2] == 0:
        raise FedeveError(
            "updates and weights do not fit together",
            got=Words(f"updates of shape {tuple(updates.shape)}, weights of shape {tuple(weights.shape)}"),
            do="give updates [..., S, D], one row per client, and weights [..., S] with S at least 1",
        )
    for name, value in extras.items():
        if value.shape != updates.shape:
            raise FedeveError(
                f"{name!r} does not fit the updates",
                got=Words(f"shape {tuple(value.shape)}"),
                do=f"give one row per client: {tuple(updates.shape)}",
            )
    if not bool((torch.isfinite(weights.double()) & (weights >= 0)).all()):
        raise FedeveError(
            "weights must be finite and not negative",
            got=weights.tolist(),
            do="give the number of examples each client trained on",
        )
