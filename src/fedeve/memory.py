"""Memory: the vectors every client keeps between rounds (SCAFFOLD's control variate), zero until first written.

Clients get a slot in one growing tensor when they first write, so a million clients of whom ten thousand took part
cost ten thousand vectors. It lies where the model is as long as it fits there, then on the host, then in a file that is
mapped. It is part of a checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

HOMES = ("device", "host", "file")
_SHARE = 0.5  # of what is free, what memories may take


def free_on(device: torch.device) -> int:
    """Bytes that are free on a device, or on the host where it is the CPU."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def _rows(numbers: Sequence[int], of: Tensor) -> Tensor:
    """Row numbers where a tensor is, without waiting for a GPU that is busy."""
    index = torch.tensor(numbers, dtype=torch.int64)
    return index.pin_memory().to(of.device, non_blocking=True) if of.is_cuda else index


class Memory:
    """Named vectors [D] per client.

    >>> memory = Memory(("control",), like=torch.zeros(2))
    >>> memory.put({7: {"control": torch.ones(2)}})
    >>> memory.get(7)["control"], memory.get(8)["control"]
    (tensor([1., 1.]), tensor([0., 0.]))
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        like: Tensor,
        most: int | None = None,
        free: Callable[[str], int] | None = None,
    ) -> None:
        """`most` clients will ever write, where that is known: no room is made for more of them."""
        self.names = tuple(names)
        self.home = "device"
        self._most = most
        self._like, self._free = like, free or self._free_at
        self._slots: dict[int, int] = {}
        self._vectors = {name: like.new_zeros((0, like.shape[-1])) for name in self.names}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """The size of what is remembered."""
        return sum(len(self) * vectors.shape[-1] * vectors.element_size() for vectors in self._vectors.values())

    def get(self, client: int) -> dict[str, Tensor]:
        """What a client remembers."""
        return {name: vectors[0] for name, vectors in self.gather([client]).items()}

    def gather(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """What these clients remember, [clients, D] by name; copies, which do not change when a slot is written."""
        if not self.names:
            return {}
        places = [place for place, client in enumerate(clients) if client in self._slots]
        slots = [self._slots[clients[place]] for place in places]
        found = {}
        for name, vectors in self._vectors.items():
            rows = self._like.new_zeros((len(clients), self._like.shape[-1]))
            if len(slots) == len(clients):
                rows = vectors[_rows(slots, vectors)].to(self._like.device)
            elif slots:
                rows[_rows(places, rows)] = vectors[_rows(slots, vectors)].to(self._like.device)
            found[name] = rows
        return found

    def put(self, vectors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write what these clients remember from now on; writing the same twice changes nothing."""
        if not self.names or not vectors:
            return
        for client in vectors:
            self._slots.setdefault(client, len(self._slots))
        self._grow(len(self._slots))
        slots = [self._slots[client] for client in vectors]
        for name, mine in self._vectors.items():
            mine[_rows(slots, mine)] = torch.stack([named[name] for named in vectors.values()]).to(mine)

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
        self.clear()
        self._grow(len(tensors["clients"]))
        self._slots = {int(client): slot for slot, client in enumerate(tensors["clients"].tolist())}
        for name, mine in self._vectors.items():
            mine[: len(self)] = tensors[name].to(mine)

    def clear(self) -> None:
        """Forget everything: after the last round nobody asks."""
        self._slots = {}
        self._vectors = {name: self._like.new_zeros((0, self._like.shape[-1])) for name in self.names}

    def _grow(self, needed: int) -> None:
        now = len(next(iter(self._vectors.values())))
        if now >= needed:
            return
        # Doubling keeps the copies O(1) per written client.
        rows = max(needed, 2 * now if self._most is None else min(2 * now, self._most))
        self.home = self._fitting(rows)
        for name, vectors in self._vectors.items():
            grown = self._room(rows)
            grown[:now] = vectors.to(grown.device)
            self._vectors[name] = grown

    def _fitting(self, rows: int) -> str:
        """The first home with room for so many rows; it never moves back."""
        size = rows * self._like.shape[-1] * self._like.element_size() * len(self.names)
        for home in HOMES[HOMES.index(self.home) : 2]:
            if size <= _SHARE * self._free(home):
                return home
        return "file"

    def _free_at(self, home: str) -> int:
        return free_on(self._like.device if home == "device" else torch.device("cpu"))

    def _room(self, rows: int) -> Tensor:
        shape = (rows, self._like.shape[-1])
        if self.home == "device":
            return self._like.new_zeros(shape)
        if self.home == "host":
            return torch.zeros(shape, dtype=self._like.dtype)
        # The file has no name any more once it is mapped, so that nothing is left however the process ends.
        with tempfile.NamedTemporaryFile(prefix="fedeve-memory-") as file:
            size = rows * shape[1]
            os.posix_fallocate(file.fileno(), 0, size * self._like.element_size())  # a full disk says so here
            return torch.from_file(file.name, shared=True, size=size, dtype=self._like.dtype).reshape(shape)
