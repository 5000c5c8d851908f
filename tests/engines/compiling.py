"""Compiles every kernel that a step of some models would start for a Hopper GPU, which need not be there.

A program of its own: `python compiling.py`, without TRITON_INTERPRET. Triton's interpreter, by which kernels are tested
on a CPU, is Python and accepts more than the compiler does. Prints the names of the kernels, each with its module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from fedeve import FederatedData, LocalWork
from fedeve.engines.batched import Batched
from fedeve.engines.pool import Batch, OnDevice
from fedeve.engines.tally import tally
from fedeve.layout import Layout
from fedeve.models.norm import NormReLU
from fedeve.models.resnet import _Block

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    int: "i32",
    float: "fp32",
}
LANES, ROWS = 2, 4
seen: dict[str, str] = {}


def instead_of_start(kernel: JITFunction, _grid: Any) -> Callable[..., None]:
    """What `kernel[grid]` is here."""

    def launch(*args: Any, **named: Any) -> None:
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
        options = {k: v for k, v in named.items() if k not in names}
        fixed = {param.name for param in kernel.params if param.is_constexpr or given[param.name] is None}
        kinds = {n: v.dtype if isinstance(v, Tensor) else type(v) for n, v in given.items() if n not in fixed}
        constants = {n: given[n] for n in names if n in fixed}
        key = repr((kernel.fn.__module__, kernel.fn.__name__, kinds, constants, options))
        if key in seen:
            return
        signature = {n: "constexpr" if n in fixed else TYPES[kinds[n]] for n in names}
        aligned = {(at,): [["tt.divisibility", 16]] for at, n in enumerate(names) if signature[n].startswith("*")}
        source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
        compile(source, target=HOPPER, options=options)
        seen[key] = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"

    return launch


def step(model: nn.Module, x: Tensor, *precisions: str) -> None:
    """The gradients of all lanes."""
    named = {name: torch.zeros(LANES, *param.shape) for name, param in model.named_parameters()}
    ways = [(precision, torch.zeros(LANES, dtype=torch.bool)) for precision in precisions] + [(precisions[-1], None)]
    for precision, busy in ways:
        with Batched(precision, busy):
            vmap(grad(lambda p, x: functional_call(model, p, (x,)).float().sum()))(named, x)


def walk(model: nn.Module, x: Tensor, **work: Any) -> None:
    """A pool's client, from its seat to its update."""
    images, labels = x.flatten(0, 1).numpy(), torch.zeros(LANES * ROWS, dtype=torch.int64).numpy()
    data = OnDevice(FederatedData.from_arrays(images, labels, [range(8)]), torch.float32, torch.device("cpu"))
    model = nn.Sequential(model, nn.Flatten(), nn.LazyLinear(2))
    model(x[0])
    some = LocalWork(**work)
    pool = Batch(model, Layout.of(model), data, some, "classes", LANES, precision="bf16", by_hand=True)
    at, start = torch.zeros(1, dtype=torch.int64), torch.zeros(pool.vectors.layout.num_params)
    pool.vectors.begin(at, start, start[None])
    pool._step()
    pool.vectors.updates(at)


def main() -> None:
    JITFunction.__getitem__ = instead_of_start  # type: ignore[method-assign]
    images = torch.zeros(LANES, ROWS, 3, 12, 12)
    wide = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.GroupNorm(2, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(2, 64), nn.Conv2d(64, 32, 1, stride=2), nn.MaxPool2d(2),
    )  # fmt: skip
    step(wide, images, "tf32", "tf32x3", "bf16")
    residual = nn.Sequential(nn.Conv2d(3, 32, 1), NormReLU(2, 32), _Block(32, 64, 2, groups=2))
    step(residual, images, "tf32", "bf16")
    walk(residual, images)
    walk(residual, images, optimizer="adam")
    step(nn.Sequential(nn.Conv2d(3, 6, 5, padding=2), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5)), images, "tf32", "tf32x3")
    for length in (7, 5000):  # a few rows, and so many that they are sorted and summed in blocks
        step(nn.Embedding(30, 5), torch.zeros(LANES, length, dtype=torch.int64), "tf32")
    tally(torch.zeros(LANES, 7), torch.ones(LANES, dtype=torch.float64), {})
    print("\n".join(sorted(set(seen.values()))))


if __name__ == "__main__":
    main()
