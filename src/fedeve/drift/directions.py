"""Directions: whether noise is the same noise round after round, and in how many directions it points.

For cohorts and for iid batches of as many examples, so that period drift and the noise of SGD can be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FedeveError
from .cohorts import Floats


@dataclass(frozen=True)
class Directions:
    """Statistics of a sequence of T vectors."""

    num_rounds: int
    square: float
    """Mean squared length."""
    cosine: float
    """Mean cosine between one round's vector and the next one's."""
    cosine_error: float
    """Its standard error, as if the cosines were independent."""
    autocorrelation: Floats
    """[lags] of the vectors, at lags 1, 2, ...: mean inner product over the mean square."""
    effective_rank: float
    """`(sum of eigenvalues)^2 / sum of squares` of the second moments: about how many directions there are."""
    top_share: float
    """The share of the mean square that lies along the first ten directions."""


def directions(vectors: NDArray[np.floating], *, lags: int = 20) -> Directions:
    """Statistics of vectors [T, D], a round a row; the effective rank is at most T."""
    count = len(vectors)
    if count < 3:
        raise FedeveError("directions need rounds", got=count, do="trace 3 or more")
    inner = np.asarray(vectors, dtype=np.float64)
    inner = inner @ inner.T
    squares = np.diag(inner)
    lengths = np.sqrt(np.where(squares > 0, squares, 1.0))
    cosines = np.diag(inner, 1) / (lengths[:-1] * lengths[1:])
    mean = float(squares.mean())
    depth = min(lags, count - 2)
    falling = [float(np.diag(inner, lag).mean()) / mean if mean else 0.0 for lag in range(1, depth + 1)]
    eigenvalues = np.linalg.eigvalsh(inner)[::-1].clip(min=0)
    total = float(eigenvalues.sum())
    return Directions(
        num_rounds=count,
        square=mean,
        cosine=float(cosines.mean()),
        cosine_error=float(cosines.std(ddof=1) / np.sqrt(len(cosines))),
        autocorrelation=np.array(falling),
        effective_rank=total**2 / float(np.square(eigenvalues).sum()) if total else 0.0,
        top_share=float(eigenvalues[:10].sum()) / total if total else 0.0,
    )
