"""Embeddings of many lanes on a GPU: tables are read where they lie; for their gradient a lane sorts its own indices.

Under vmap PyTorch's own copies every table and sorts the indices of all lanes together. No atomics and no tuning by the
clock, so a lane's bits depend on its own numbers alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import lanes_first

_BLOCK = 1024  # numbers that a program looks up
_FEW = 128  # entries that one program sorts and sums; more are sorted by PyTorch
_SIDE = 32  # sorted entries that are summed at once, by one warp
_WIDTH = 16  # numbers of each that are summed at once
_AHEAD = 64  # blocks of sorted entries in which a segment is followed at once


@triton.jit
def _look_up(
    table, index, out, N, V, TABLE_LANE, INDEX_LANE, INDEX_ENTRY, E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[lane, n] = table[lane, index[lane, n]]; where there is no such row, what is not a number."""
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at // E < N
    row = tl.load(index + lane * INDEX_LANE + at // E * INDEX_ENTRY, mask=inside, other=0).to(tl.int64)
    known = inside & (row >= 0) & (row < V)
    value = tl.load(table + lane * TABLE_LANE + row * E + at % E, mask=known, other=float("nan"))
    tl.store(out + lane * N * E + at, value, mask=inside)


@triton.jit
def _rank(index, rows, order, N, STRIDE, SIDE: tl.constexpr):
    """Sort a lane's few indices into `rows`, and where they stood into `order`: each counts who comes before it."""
    here, there = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    mine = tl.load(index + here * STRIDE, mask=here < N, other=0).to(tl.int32)
    other = tl.load(index + there * STRIDE, mask=there < N, other=0).to(tl.int32)
    before = (there < N) & ((other < mine) | ((other == mine) & (there < here)))
    place = tl.sum(before.to(tl.int32), 1)[:, None]
    tl.store(rows + place, mine, mask=here < N)
    tl.store(order + place, here.to(tl.int64), mask=here < N)
    tl.debug_barrier()


@triton.jit
def _follow(row, total, next_row, next_total):
    """The sum of the last row's entries so far; of sorted rows that is associative."""
    return next_row, tl.where(row == next_row, total, 0.0) + next_total


@triton.jit
def _sum(
    grad, index, rows, order, out, heads, N, V, GRAD_LANE, GRAD_ENTRY, INDEX_LANE, INDEX_ENTRY,
    E: tl.constexpr, FEW: tl.constexpr, SIDE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[row] = the sum of grad over the entries of that row in a block of sorted ones, number order[n] the n-th.

    What belongs to a row that began in a block before goes to `heads`. FEW entries are a single block, sorted here.
    """
    block, lane = tl.program_id(0), tl.program_id(2).to(tl.int64)
    number = (tl.program_id(1) * BE + tl.arange(0, BE))[None, :]
    rows += lane * N
    order += lane * N
    if FEW:
        _rank(index + lane * INDEX_LANE, rows, order, N, INDEX_ENTRY, SIDE)
    mine = (block * SIDE + tl.arange(0, SIDE))[:, None]
    inside = mine < N
    row = tl.load(rows + mine, mask=inside, other=-1).to(tl.int32)
    after = tl.load(rows + mine + 1, mask=mine + 1 < N, other=-1).to(tl.int32)
    before = tl.load(rows + block * SIDE - 1, mask=block > 0, other=-1).to(tl.int32)
    entry = tl.load(order + mine, mask=inside, other=0)
    value = tl.load(grad + lane * GRAD_LANE + entry * GRAD_ENTRY + number, mask=inside & (number < E), other=0.0)
    _, total = tl.associative_scan((tl.broadcast_to(row, (SIDE, BE)), value), 0, _follow)
    is_last = inside & (row >= 0) & (row < V) & ((mine % SIDE == SIDE - 1) | (row != after)) & (number < E)
    head = heads + (lane * tl.num_programs(0) + mine // SIDE) * E + number
    tl.store(head, total, mask=is_last & (row == before))
    tl.store(out + lane * V * E + row.to(tl.int64) * E + number, total, mask=is_last & (row != before))


@triton.jit
def _join(rows, out, heads, N, V, E: tl.constexpr, SIDE: tl.constexpr, BE: tl.constexpr, AHEAD: tl.constexpr):
    """To the row whose segment begins in this block and goes on in the next ones, add their heads."""
    block, lane, blocks = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(0) + 1
    rows += lane * N
    row = tl.load(rows + block * SIDE + SIDE - 1)
    goes_on = tl.load(rows + block * SIDE + SIDE) == row
    began_before = tl.load(rows + block * SIDE - 1, mask=block > 0, other=-1) == row
    if goes_on & ~began_before & (row >= 0) & (row < V):
        number = tl.program_id(1) * BE + tl.arange(0, BE)
        total = tl.zeros((BE,), tl.float32)
        start = block + 1
        while goes_on:
            ahead = start + tl.arange(0, AHEAD)
            of_row = tl.load(rows + ahead * SIDE, mask=ahead < blocks, other=-1) == row
            at = (lane * blocks + ahead[:, None]) * E + number[None, :]
            total += tl.sum(tl.load(heads + at, mask=of_row[:, None] & (number < E)[None, :], other=0.0), 0)
            start += AHEAD
            goes_on = tl.load(rows + start * SIDE, mask=start < blocks, other=-1) == row
        at = out + (lane * V + row) * E + number
        tl.store(at, tl.load(at, mask=number < E, other=0.0) + total, mask=number < E)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """[lanes, *shape, E] of table [lanes, V, E] and index [lanes, *shape]."""
    (lanes, rows, size), shape = table.shape, index.shape
    table = table if table[0].is_contiguous() else table.contiguous()
    index = index.reshape(lanes, -1)
    num = index.shape[1]
    out = table.new_empty(*shape, size)
    grid = (triton.cdiv(num * size, _BLOCK), lanes)
    _look_up[grid](table, index, out, num, rows, table.stride(0), *index.stride(), E=size, BLOCK=_BLOCK)
    return out


def table_gradient(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """What `look_up` passes back to a table of so many rows: [lanes, rows, E] of grad [lanes, *shape, E]."""
    lanes, size, num = grad.shape[0], grad.shape[-1], index[0].numel()
    grad = grad.reshape(lanes, num, size)
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    is_few = num <= _FEW
    if is_few:
        index = index.reshape(lanes, num)
        keys, order = (index.new_empty(lanes, num, dtype=dtype) for dtype in (torch.int32, torch.int64))
    else:
        # Short keys: a radix sort passes over the entries once for every few bits.
        short = torch.int16 if rows <= torch.iinfo(torch.int16).max else torch.int32
        index = index.to(short).reshape(lanes, num)
        keys, order = index.sort(dim=1, stable=True)
    sizes = {"E": size, "SIDE": max(16, triton.next_power_of_2(num)) if is_few else _SIDE}
    sizes["BE"] = min(_WIDTH, triton.next_power_of_2(size))
    blocks, parts = triton.cdiv(num, sizes["SIDE"]), triton.cdiv(size, sizes["BE"])
    out, heads = grad.new_zeros(lanes, rows, size), grad.new_empty(lanes, blocks, size)
    strides = (grad.stride(0), grad.stride(1), index.stride(0), index.stride(1))
    inputs = (grad, index, keys, order, out, heads, num, rows, *strides)
    _sum[(blocks, parts, lanes)](*inputs, **sizes, FEW=is_few, num_warps=4 if is_few else 1)
    if blocks > 1:
        _join[(blocks - 1, parts, lanes)](keys, out, heads, num, rows, **sizes, AHEAD=_AHEAD, num_warps=1)
    return out


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, index: Tensor, rows: int) -> Tensor:
        return table_gradient(grad[None], index[None], rows)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return table_gradient(*lanes_first(info, dims, inputs, packed=False)), 0


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(table: Tensor, index: Tensor) -> Tensor:
        return look_up(table[None], index[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows = inputs[0].shape[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Backward.apply(grad, *ctx.saved_tensors, ctx.rows), None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return look_up(*lanes_first(info, dims, inputs, packed=False)), 0


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """As `torch.nn.functional.embedding`, to which it leaves tables of other types, and what else is not plain."""
    special = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
    if special or weight.dtype != torch.float32 or weight.ndim != 2 or not (input.numel() and weight.numel()):
        theirs: Any = torch.nn.functional.embedding
        return theirs(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    looked_up: Tensor = _Lookup.apply(weight, input)
    return looked_up
