"""What a Flower model is made of: which of its arrays are filtered, which are averaged, which are left alone.

Flower sends a state dict. Floating-point arrays are the parameters, one vector as everywhere here; BatchNorm's running
statistics are averaged but are no part of that vector; whole numbers and truth values stay as the server has them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FedeveError, Words

STATISTICS = ("running_mean", "running_var")
"""How the names of running statistics end, as PyTorch's BatchNorm and InstanceNorm name them."""
_HEADER = 4096  # bytes that an array's own description may take besides its numbers
_LONGEST = 200  # characters of a reason


class MisfitError(Exception):
    """A reply that is not what was asked for; the text says in what way, on one line: clients write parts of it."""

    def __init__(self, text: str) -> None:
        line = " ".join(text[:_LONGEST].split())
        super().__init__(line if len(text) <= _LONGEST else line[: _LONGEST - 3] + "...")


@dataclass(frozen=True)
class Spec:
    """An array's shape and dtype, and whether it is part of `params`, of `statistics`, or `kept`."""

    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Wire:
    """The arrays of a model in the order of their record, and how they make vectors."""

    specs: Mapping[str, Spec]
    kept: Mapping[str, Array]
    """The arrays that are left alone, as they were given first."""

    @classmethod
    def of(cls, record: ArrayRecord, *, statistics: tuple[str, ...] = STATISTICS) -> Wire:
        """How the arrays of a model are sent; refuses what cannot be trained."""
        specs = {name: _spec(name, array, statistics) for name, array in record.items()}
        if not any(spec.kind == "params" for spec in specs.values()):
            raise FedeveError(
                "the model has nothing to train",
                got=Words(f"arrays {list(specs)[:5]}"),
                do="give ArrayRecord(model.state_dict()) of a model with floating-point parameters",
            )
        return cls(specs, {name: array for name, array in record.items() if specs[name].kind == "kept"})

    def named(self, kind: str) -> dict[str, Spec]:
        return {name: spec for name, spec in self.specs.items() if spec.kind == kind}

    @property
    def dtype(self) -> torch.dtype:
        """What vectors are kept in: float64 where an array is, else float32."""
        wide = any(spec.dtype == "float64" for spec in self.specs.values() if spec.kind != "kept")
        return torch.float64 if wide else torch.float32

    def vector(self, record: Mapping[str, Array], kind: str = "params") -> Tensor:
        """The vector [D] of the arrays of one kind; raises `MisfitError` if one is not as it should be."""
        specs = self.named(kind)
        vector = torch.empty(sum(spec.size for spec in specs.values()), dtype=self.dtype)
        numbers, begin = vector.numpy(), 0
        for name, spec in specs.items():
            numbers[begin : begin + spec.size] = read(name, record[name], spec)
            begin += spec.size
        return vector

    def check(self, record: Mapping[str, Array]) -> None:
        """Raise `MisfitError` unless a record has these arrays, no more and no less."""
        missing, extra = [n for n in self.specs if n not in record], [n for n in record if n not in self.specs]
        if missing or extra:
            raise MisfitError(
                "; ".join([f"misses {n!r}" for n in missing[:3]] + [f"has {n!r} too many" for n in extra[:3]])
            )
        for name in self.kept:
            _check_header(name, record[name], self.specs[name])

    def record(self, params: Tensor, statistics: Tensor) -> ArrayRecord:
        """The arrays of a model as they were given, with these numbers in them."""
        parts = {
            "params": iter(self._split(params, "params")),
            "statistics": iter(self._split(statistics, "statistics")),
        }
        made = {n: self.kept[n] if spec.kind == "kept" else next(parts[spec.kind]) for n, spec in self.specs.items()}
        return ArrayRecord(made)

    def _split(self, vector: Tensor, kind: str) -> list[Array]:
        specs = list(self.named(kind).values())
        pieces = vector.detach().cpu().split([spec.size for spec in specs]) if specs else ()
        arrays = (
            np.ascontiguousarray(p.numpy(), dtype=s.dtype).reshape(s.shape) for p, s in zip(pieces, specs, strict=True)
        )
        return [Array(array) for array in arrays]

    def describe(self) -> list[Any]:
        """Names, shapes and dtypes as plain values."""
        return [[name, list(spec.shape), spec.dtype, spec.kind] for name, spec in self.specs.items()]


def _spec(name: str, array: Array, statistics: tuple[str, ...]) -> Spec:
    if array.dtype in ("float16", "float32", "float64"):
        kind = "statistics" if name.rsplit(".", 1)[-1] in statistics else "params"
    elif np.dtype(array.dtype).kind in "iub":
        kind = "kept"
    else:
        raise FedeveError(f"array {name!r} cannot be averaged", got=array.dtype, do="use floating-point parameters")
    spec = Spec(tuple(array.shape), array.dtype, kind)
    try:
        values = read(name, array, spec)
    except MisfitError as error:
        raise FedeveError("the initial arrays cannot be used", got=Words(str(error)), do="give finite arrays") from None
    del values
    return spec


def read(name: str, array: Array, spec: Spec) -> NDArray[Any]:
    """The numbers of an array [n], read-only; raises `MisfitError` unless shape and dtype are as expected, all finite.

    Its own header is compared before anything is allocated, so that a false one costs no memory.
    """
    offset, fortran = _check_header(name, array, spec)
    flat = np.frombuffer(array.data, dtype=spec.dtype, count=spec.size, offset=offset)
    values = flat.reshape(spec.shape, order="F").reshape(-1) if fortran else flat
    if spec.kind != "kept" and not np.isfinite(values).all():
        raise MisfitError(f"{name!r} is not finite")
    if name.rsplit(".", 1)[-1] == "running_var" and (values < 0).any():
        raise MisfitError(f"{name!r} has a negative variance")
    return values


def _check_header(name: str, array: Array, spec: Spec) -> tuple[int, bool]:
    """Where an array's numbers begin, and whether columns come first; raises `MisfitError` if it is of another kind."""
    if array.stype != "numpy.ndarray":
        raise MisfitError(f"{name!r} is in an unknown format")
    if tuple(array.shape) != spec.shape:
        raise MisfitError(f"{name!r} has shape {tuple(array.shape)} instead of {spec.shape}")
    if array.dtype != spec.dtype:
        raise MisfitError(f"{name!r} has dtype {array.dtype} instead of {spec.dtype}")
    stream = io.BytesIO(array.data[:_HEADER])
    try:
        version = np.lib.format.read_magic(stream)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = reader(stream)
    except Exception:  # whatever numpy makes of arbitrary bytes
        raise MisfitError(f"{name!r} cannot be read") from None
    if tuple(shape) != spec.shape or dtype != np.dtype(spec.dtype):
        raise MisfitError(f"{name!r} holds {dtype} of shape {tuple(shape)}, which is not what it says")
    if len(array.data) - stream.tell() != spec.size * dtype.itemsize:
        raise MisfitError(f"{name!r} has the wrong number of bytes")
    return stream.tell(), bool(fortran)
