"""Small examples in arrays, as somebody may have them, and what a federation of them must hold."""

from __future__ import annotations

import numpy as np

from fedeve import FederatedData

SIZES = [4, 0, 7]


def examples(count: int, *, seed: int = 0, shape: tuple[int, ...] = (5, 6)) -> tuple[np.ndarray, np.ndarray]:
    """Byte images [count, *shape] and labels [count] of three classes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 3


def parts(sizes: list[int] = SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    return [examples(size, seed=number) for number, size in enumerate(sizes)]


def assert_is(data: FederatedData, expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Every client has these examples, in this order, in the type they had."""
    assert data.num_clients == len(expected)
    for client, (x, y) in enumerate(expected):
        rows = data.rows(client)
        assert np.array_equal(data.y[rows], y)
        if len(y):
            assert np.array_equal(data.x[rows], x)
            assert data.x.dtype == x.dtype
