"""Folding replies into a Summary as they come, in O(D) memory, leaving out those far larger than the rest.

What counts as far larger, the cohort's median, is known only at the end. So the few largest replies so far are held
aside and everything below them is folded; at the end the median decides about those held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..summary import Summary
from .checks import MOVED, UPDATE, LeftOut, Reply

_PIECE = 1 << 16  # numbers at a time: half a MiB in float64
_ENOUGH = 3  # replies that moved, below which a median says nothing


@dataclass
class Gathering:
    """The replies of one round. `add` them in a fixed order, then `finish`."""

    outlier: float | None
    """How many times larger than the median a vector may be; None asks nothing."""
    max_outliers: int
    clip_norm: float | None
    left_out: list[LeftOut] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """The places of the replies that count."""
    clipped: int = 0
    updates: Running | None = None
    statistics: Running | None = None
    """Of the running statistics, where the model has some."""
    lost: str = ""
    """Why the round cannot be used, where it cannot."""
    _held: list[Reply] = field(default_factory=list)
    _norms: dict[str, list[float]] = field(default_factory=dict)
    _folded: dict[str, float] = field(default_factory=dict)

    @property
    def num_good(self) -> int:
        return len(self.used)

    def add(self, reply: Reply) -> None:
        """Take a checked reply in; at most `max_outliers` replies per vector are held, the others are folded."""
        for name, norm in reply.norms.items():
            self._norms.setdefault(name, []).append(norm)
        self._held.append(reply)
        if self.outlier is None:
            self._release([reply])
            return
        largest: set[int] = set()
        for name in reply.norms:
            ranked = sorted(self._held, key=lambda r: (r.norms[name], r.place))
            largest |= {r.place for r in ranked[-self.max_outliers :]}
        self._release([r for r in self._held if r.place not in largest])

    def finish(self) -> None:
        """Decide about the replies held aside, now that the median is known."""
        limits = {name: self.limit(name) for name in self._norms}
        if any(self._folded.get(name, 0.0) > limit for name, limit in limits.items()):
            self.lost = f"more than {self.max_outliers} replies are {self.outlier:g} times larger than the median"
        for reply in sorted(self._held, key=lambda r: r.place):
            name = next((n for n, norm in reply.norms.items() if norm > limits[n]), None)
            if name is None:
                self._release([reply])
                continue
            times = reply.norms[name] * self.outlier / limits[name] if self.outlier else 0.0
            self.left_out.append(LeftOut(reply.node, reply.place, f"its {name} is {times:.0f} times the median"))
        self._held = []

    def limit(self, name: str) -> float:
        """How large a vector may be: so many times the (lower) median of those that moved."""
        moved = sorted(norm for norm in self._norms[name] if norm > 0)
        if self.outlier is None or len(moved) < _ENOUGH:
            return float("inf")
        return self.outlier * moved[(len(moved) - 1) // 2]

    def _release(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._held = [held for held in self._held if held is not reply]
            self.used.append(reply.place)
            for name, norm in reply.norms.items():
                self._folded[name] = max(self._folded.get(name, 0.0), norm)
            update = self._clip(reply)
            extras = {n: v for n, v in reply.vectors.items() if n not in (UPDATE, MOVED)}
            self.updates = _joined(self.updates, update, reply.weight, extras)
            if MOVED in reply.vectors:
                self.statistics = _joined(self.statistics, reply.vectors[MOVED], reply.weight, {})

    def _clip(self, reply: Reply) -> Tensor:
        update, norm = reply.vectors[UPDATE], reply.norms[UPDATE]
        if self.clip_norm is None or norm <= self.clip_norm:
            return update
        self.clipped += 1
        return update * (self.clip_norm / norm)


class Running:
    """A Summary that grows in place by one client at a time: two vectors in float64, whatever the cohort.

    The arithmetic is that of `Summary.merge`, a piece of the vectors at a time, which stays in the cache.
    """

    def __init__(self, vector: Tensor, weight: float, extras: Mapping[str, Tensor]) -> None:
        self.count, self.weight, self.scatter = 1, weight, 0.0
        self.mean, self.center = vector.double(), vector.double()
        self.extras = {name: value.double() for name, value in extras.items()}

    def add(self, vector: Tensor, weight: float, extras: Mapping[str, Tensor]) -> None:
        """The client's vector joins with this weight."""
        count, total = self.count + 1, self.weight + weight
        share, share_by_weight = 1 / count, weight / total
        between = 0.0
        for begin in range(0, len(vector), _PIECE):
            piece = slice(begin, begin + _PIECE)
            value = vector[piece].double()
            gap = value - self.center[piece]
            between += float(gap.dot(gap))
            self.center[piece] += gap.mul_(share)
            self.mean[piece] += value.sub_(self.mean[piece]).mul_(share_by_weight)
            for name, mean in self.extras.items():
                mean[piece] += (extras[name][piece].double() - mean[piece]).mul_(share)
        self.scatter += self.count / count * between
        self.count, self.weight = count, total

    def summary(self) -> Summary:
        """What was added so far; it shares its vectors with this."""

        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float64)

        return Summary(
            scalar(self.count), scalar(self.weight), self.mean, self.center, scalar(self.scatter), self.extras
        )


def _joined(running: Running | None, vector: Tensor, weight: float, extras: Mapping[str, Tensor]) -> Running:
    if running is None:
        return Running(vector, weight, extras)
    running.add(vector, weight, extras)
    return running
