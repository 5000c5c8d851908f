"""The only source of randomness: every draw is a pure function of a seed and of what it is for.

A path such as `(seed, round, client, "batches")` names a stream. Streams are independent, so a client's batches do
not depend on who else is in the cohort, on the engine, or on where a run was stopped and resumed.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
SEEDS = (192, 225, 226, 230, 231)
"""The five that the paper's released code has."""


def generator(*path: int | str) -> np.random.Generator:
    """The random generator of a path, always at its beginning."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(path), "little")))


def torch_seed(*path: int | str) -> int:
    """A seed for `torch.manual_seed` that belongs to a path."""
    return int.from_bytes(_digest(path)[:7], "little")


def _digest(path: tuple[int | str, ...]) -> bytes:
    # repr keeps 1 and "1" apart; int() folds numpy integers into Python's.
    parts = [part if isinstance(part, str) else int(part) for part in path]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def cohort(population: Indices | int, size: int, *, seed: int, round: int) -> Indices:
    """The clients of one round: uniform, without replacement, in the order drawn, O(size) whatever the population."""
    chosen = generator(seed, round, "cohort").choice(population, size=size, replace=False)
    return np.asarray(chosen, dtype=np.int64)


def silent(cohort: Indices, *, share: float, seed: int, round: int) -> Indices:
    """Those of a cohort who never answer: each of them with probability `share`."""
    return cohort[generator(seed, round, "dropout").random(len(cohort)) < share]
