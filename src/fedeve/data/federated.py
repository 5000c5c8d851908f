"""FederatedData: arrays as stored (bytes, if they are bytes) and, for every client, which rows are its own."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ..errors import FedeveError, Words, unknown
from ..seeds import Indices
from ..tasks import TASKS


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Training rows dealt to clients, and one test set. A model's input is `(stored - shift) * scale`.

    >>> data = FederatedData.from_arrays(np.zeros((4, 3)), [0, 1, 1, 0], [[0, 1], [2], [], [3]])
    >>> data.num_clients, data.sizes.tolist(), data.rows(0).tolist()
    (4, [2, 1, 0, 1], [0, 1])
    """

    x: NDArray[np.generic]
    y: Indices
    order: Indices
    """Rows client by client; client k owns `order[offsets[k]:offsets[k + 1]]`."""
    offsets: Indices
    x_test: NDArray[np.generic]
    y_test: Indices
    num_classes: int
    shift: float | NDArray[np.floating] = 0.0
    scale: float | NDArray[np.floating] = 1.0
    name: str = "arrays"
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the data set of that name was asked for, so that it can be made again."""
    task: str = "classes"
    """What a model is asked, see `tasks.py`: which class, or, in `ranking`, how likely."""
    gather: nn.Module | None = None
    """Turns stored rows into a model's inputs by looking them up in tables, where they are more than pixels."""
    source: str = ""
    """A checksum of where `x`, `y` and the test set came from; spares reading them all for the fingerprint."""

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        clients: Sequence[ArrayLike],
        *,
        x_test: ArrayLike | None = None,
        y_test: ArrayLike | None = None,
        num_classes: int | None = None,
        shift: float | NDArray[np.floating] | None = None,
        scale: float | NDArray[np.floating] | None = None,
        name: str = "arrays",
        options: Mapping[str, Any] | None = None,
        task: str = "classes",
        gather: nn.Module | None = None,
        source: str = "",
    ) -> FederatedData:
        """Your own data: inputs [n, ...], labels [n], and one array of row numbers per client.

        A row may be several clients', or a client's several times. Bytes are scaled to 0..1 unless `shift` and
        `scale` say otherwise; without a test set there is no evaluation.
        """
        xs, ys = _inputs(x, "x"), _labels(y, "y")
        test_x = xs[:0] if x_test is None else _inputs(x_test, "x_test")
        test_y = ys[:0] if y_test is None else _labels(y_test, "y_test")
        _check_rows("x", xs, "y", ys)
        _check_rows("x_test", test_x, "y_test", test_y)
        if xs.shape[1:] != test_x.shape[1:]:
            raise FedeveError(
                "training and test inputs have different shapes",
                got=Words(f"{xs.shape[1:]} and {test_x.shape[1:]}"),
                do="give x and x_test rows of one shape",
            )
        if (xs.dtype == np.uint8) != (test_x.dtype == np.uint8):
            raise FedeveError(
                "training and test inputs are scaled differently, bytes from 0 to 255 and numbers as they are",
                got=Words(f"{xs.dtype} and {test_x.dtype}"),
                do="give both as bytes, or neither",
            )
        if task not in TASKS:
            raise unknown("task", task, TASKS)
        if isinstance(clients, Mapping):
            raise FedeveError(
                "clients must be a list of index arrays", got=Words("a mapping"), do="give list(clients.values())"
            )
        parts = [_row_numbers(rows) for rows in clients]
        if not parts:
            raise FedeveError("a federation needs clients", got=Words("none"), do="give one index array per client")
        order = np.concatenate(parts)
        if len(order) and (order.min() < 0 or order.max() >= len(ys)):
            raise FedeveError(
                "a client's row numbers lie outside the data",
                got=Words(f"rows {order.min()} to {order.max()}"),
                do=f"use row numbers from 0 to {len(ys) - 1}",
            )
        seen = int(max([0, *(values.max() + 1 for values in (ys, test_y) if len(values))]))
        if num_classes is not None and seen > num_classes:
            raise FedeveError("a label is out of range", got=seen - 1, do=f"use labels from 0 to {num_classes - 1}")
        is_bytes = xs.dtype == np.uint8
        return cls(
            x=xs,
            y=ys,
            order=order,
            offsets=np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
            x_test=test_x,
            y_test=test_y,
            num_classes=num_classes or seen,
            shift=0.0 if shift is None else shift,
            scale=(1 / 255 if is_bytes else 1.0) if scale is None else scale,
            name=name,
            options=options or {},
            task=task,
            gather=gather,
            source=source,
        )

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def sizes(self) -> Indices:
        """[N] how many examples each client has."""
        return np.diff(self.offsets)

    @functools.cached_property
    def with_data(self) -> Indices:
        """The clients that are not empty."""
        return np.flatnonzero(self.sizes).astype(np.int64)

    def has_examples_of(self, other: FederatedData) -> bool:
        """Whether both deal the same rows to their clients, seen alike: then these can train in the same lanes."""
        ours, theirs = (
            (data.num_classes, data.task, np.asarray(data.shift).tolist(), np.asarray(data.scale).tolist())
            for data in (self, other)
        )
        names = ("y", "y_test", "x_test", "x")  # the largest last
        same = (_same(getattr(self, name), getattr(other, name)) for name in names)
        return ours == theirs and self.gather is other.gather and all(same)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def num_outputs(self) -> int:
        """How many numbers a model must give for an example."""
        return self.num_classes if self.task == "classes" else 1

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """How many values each categorical input has, where there are such."""
        return tuple(getattr(self.gather, "cardinalities", ()))

    def rows(self, client: int) -> Indices:
        """The row numbers of one client."""
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def inputs(self, stored: NDArray[np.generic], dtype: torch.dtype = torch.float32) -> Tensor:
        """What a model sees of stored inputs: `(stored - shift) * scale`, or what `gather` makes of them."""
        rows = torch.from_numpy(np.array(stored))  # a copy, since what a cache maps is read-only
        return self.transform(dtype)(rows)

    def transform(self, dtype: torch.dtype, device: torch.device | None = None) -> Callable[[Tensor], Tensor]:
        """The function from stored rows to inputs, with its tables on this device."""
        if self.gather is not None:
            return self.gather if device is None else copy.deepcopy(self.gather).to(device)
        shift = torch.as_tensor(self.shift, dtype=dtype, device=device)
        scale = torch.as_tensor(self.scale, dtype=dtype, device=device)
        return lambda rows: (rows.to(dtype) - shift) * scale

    @functools.cached_property
    def fingerprint(self) -> str:
        """A checksum of everything in here, so that a record can say what it was made from."""
        digest = hashlib.sha256(
            repr((self.num_classes, np.asarray(self.shift).tolist(), np.asarray(self.scale).tolist())).encode()
        )
        digest.update(self.source.encode())
        if not self.source and self.task != "classes":
            digest.update(self.task.encode())
        everything = (self.x, self.y, self.x_test, self.y_test, self.order, self.offsets)
        for array in everything[4:] if self.source else everything:
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def _same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    """Whether arrays are equal; two views of the same memory are not read."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    is_one_place = one.ctypes.data == other.ctypes.data and one.strides == other.strides
    return is_one_place or bool(np.array_equal(one, other))


def _labels(values: ArrayLike, name: str) -> Indices:
    labels = np.asarray(values)
    whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    if labels.size and not whole:
        found = f"{labels.dtype} of shape {labels.shape}"
    elif labels.size and labels.min() < 0:
        found = f"the label {labels.min()}"
    else:
        return labels.astype(np.int64, copy=False).reshape(-1)
    raise FedeveError(
        f"{name} must hold class numbers", got=Words(found), do="give one whole number per example, counting from 0"
    )


def _inputs(values: ArrayLike, name: str) -> NDArray[np.generic]:
    array = np.asarray(values)
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        found = f"{array.dtype} of shape {array.shape}"
        raise FedeveError(f"{name} must hold numbers", got=Words(found), do="give one array with a row per example")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise FedeveError(f"{name} has numbers that are not finite", got=Words(f"the first in row {row}"), do="mend it")
    return array


def _row_numbers(values: ArrayLike) -> Indices:
    rows = np.asarray(values)
    if rows.ndim != 1:
        raise FedeveError(
            "a client's rows must be a list of row numbers",
            got=Words(f"an array of shape {rows.shape}"),
            do="give one list per client: [[0, 1], [2]]",
        )
    if len(rows) and not np.issubdtype(rows.dtype, np.integer):
        raise FedeveError(
            "a client's rows must be row numbers",
            got=Words(f"an array of {rows.dtype}"),
            do="give whole numbers, for a mask np.flatnonzero(mask)",
        )
    return rows.astype(np.int64, copy=False)


def _check_rows(name_x: str, x: NDArray[np.generic], name_y: str, y: Indices) -> None:
    if len(x) != len(y):
        raise FedeveError(
            f"{name_x} and {name_y} have different lengths",
            got=Words(f"{len(x)} inputs and {len(y)} labels"),
            do="give one label per input",
        )
