"""Memory: the vectors every client keeps between rounds (SCAFFOLD's control variate), zero until first written.

Clients get a slot in one growing tensor when they first write, so a million clients of whom ten thousand took part
cost ten thousand vectors. It is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Memory:
    """Named vectors [D] per client.

    >>> memory = Memory(("control",), like=torch.zeros(2))
    >>> memory.put({7: {"control": torch.ones(2)}})
    >>> memory.get(7)["control"], memory.get(8)["control"]
    (tensor([1., 1.]), tensor([0., 0.]))
    """

    def __init__(self, names: Iterable[str], *, like: Tensor) -> None:
        self.names = tuple(names)
        self._like = like
        self._slots: dict[int, int] = {}
        self._vectors = {name: like.new_zeros((0, like.shape[-1])) for name in self.names}

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, client: int) -> dict[str, Tensor]:
        """What a client remembers."""
        if client not in self._slots:
            return {name: torch.zeros_like(self._like) for name in self.names}
        slot = self._slots[client]
        # A copy: what a client reads must not change under it when the slot is written.
        return {name: vectors[slot].clone() for name, vectors in self._vectors.items()}

    def put(self, vectors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write what these clients remember from now on; writing the same twice changes nothing."""
        if not self.names:
            return
        for client in vectors:
            self._slots.setdefault(client, len(self._slots))
        self._grow(len(self._slots))
        for client, named in vectors.items():
            for name in self.names:
                self._vectors[name][self._slots[client]] = named[name]

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors: `clients` [n] and each name's [n, D], for a checkpoint."""
        if not self.names:
            return {}
        used = {name: vectors[: len(self)] for name, vectors in self._vectors.items()}
        return {"clients": torch.tensor(list(self._slots), dtype=torch.int64), **used}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything by what `tensors()` gave."""
        if not self.names:
            return
        self._slots = {int(client): slot for slot, client in enumerate(tensors["clients"].tolist())}
        self._vectors = {name: tensors[name].to(self._like).clone() for name in self.names}

    def _grow(self, needed: int) -> None:
        for name, vectors in self._vectors.items():
            if len(vectors) < needed:
                # Doubling keeps the copies O(1) per written client.
                grown = vectors.new_zeros((max(needed, 2 * len(vectors)), vectors.shape[-1]))
                grown[: len(vectors)] = vectors
                self._vectors[name] = grown
