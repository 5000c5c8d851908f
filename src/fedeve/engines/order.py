"""How vectors lie in the lanes of a GPU: as everywhere, but kernels of convolutions may have their channels last.

Products then find weights, and leave gradients, as the lanes hold them. Vectors are turned on their way into a lane and
out of it, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout

_BLOCK = 1024
_APART = 128  # lanes begin at multiples of so many numbers, so that reads are aligned


@triton.jit
def _places(table, BLOCK: tl.constexpr):
    """Of a block of one part: where its numbers are in a vector, where in a lane, and which there are."""
    row = table + tl.program_id(0) * 5
    first, size, begin = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    channels, taps = tl.load(row + 3), tl.load(row + 4)
    at = begin + tl.arange(0, BLOCK)
    lies = at
    if taps > 1:
        whole = channels * taps
        lies = at // whole * whole + at % taps * channels + at // taps % channels
    return first + at, first + lies, at < size


@triton.jit
def _bring(vectors, APART, lanes, one, two, small, STRIDE, table, BLOCK: tl.constexpr):
    """Number by number of a vector into its lane of `one`, and of `two` and `small` where they are."""
    at, lies, inside = _places(table, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    value = tl.load(vectors + row * APART + at, mask=inside)
    lies += tl.load(lanes + row) * STRIDE
    tl.store(one + lies, value, mask=inside)
    if two is not None:
        tl.store(two + lies, value, mask=inside)
    if small is not None:
        tl.store(small + lies, value.to(small.dtype.element_ty), mask=inside)


@triton.jit
def _moved(ends, starts, lanes, out, STRIDE, D, table, BLOCK: tl.constexpr):
    """out[row] = ends[lane] - starts[lane], as vectors lie elsewhere."""
    at, lies, inside = _places(table, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    lies += tl.load(lanes + row) * STRIDE
    value = tl.load(ends + lies, mask=inside) - tl.load(starts + lies, mask=inside)
    tl.store(out + row * D + at, value, mask=inside)


class Order:
    """The order of a layout's vectors in lanes: kernels [O, C, rows, columns] as [O, rows, columns, C] where `last`."""

    def __init__(self, layout: Layout, last: Sequence[bool], device: torch.device) -> None:
        self.layout, self.last = layout, last
        rows, first = [], 0
        for shape, size, turned in zip(layout.shapes, layout.sizes, self.last, strict=True):
            kind = (shape[1], shape[2] * shape[3]) if turned else (1, 1)
            rows += [(first, size, begin, *kind) for begin in range(0, size, _BLOCK)]
            first += size
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)

    def room(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[width, D] of zeros for so many lanes."""
        dim = self.layout.num_params
        apart = triton.cdiv(dim, _APART) * _APART
        return torch.zeros(width, apart, dtype=dtype, device=self.table.device)[:, :dim]

    def unflatten(self, lanes: Tensor) -> dict[str, Tensor]:
        """Named views into lanes [..., D], each [..., *shape]."""
        layout = self.layout
        shapes = [
            torch.Size((shape[0], *shape[2:], shape[1])) if turned else shape
            for shape, turned in zip(layout.shapes, self.last, strict=True)
        ]
        named = Layout(layout.names, tuple(shapes)).unflatten(lanes)
        turns = zip(named.items(), self.last, strict=True)
        return {name: part.movedim(-1, -3) if turned else part for (name, part), turned in turns}

    def parts(self, named: dict[str, Tensor]) -> list[Tensor]:
        """Of tensors [lanes, ...] by name, the views whose axes are in the order of the vectors' parts."""
        pairs = zip(self.layout.names, self.last, strict=True)
        return [named[name].movedim(-3, -1) if turned else named[name] for name, turned in pairs]

    def bring(
        self, vectors: Tensor, lanes: Tensor, one: Tensor, two: Tensor | None = None, small: Tensor | None = None
    ) -> None:
        """Put a vector [D], or [n, D], into these lanes [n] of rooms."""
        apart = 0 if vectors.ndim == 1 else vectors.stride(0)
        assert vectors.stride(-1) == 1
        grid = (len(self.table), len(lanes))
        _bring[grid](vectors, apart, lanes, one, two, small, one.stride(0), self.table, BLOCK=_BLOCK)

    def moved(self, params: Tensor, start: Tensor, lanes: Tensor) -> Tensor:
        """[n, D] params minus start in these lanes [n]."""
        out = params.new_empty(len(lanes), self.layout.num_params)
        grid = (len(self.table), len(lanes))
        _moved[grid](params, start, lanes, out, params.stride(0), out.shape[1], self.table, BLOCK=_BLOCK)
        return out
