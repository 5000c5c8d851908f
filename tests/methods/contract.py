"""Every method in the folder, made-up replies for it, and quadratics to train on: what tests of the contract share."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedeve import (
    FedEve,
    FedEveParts,
    LocalWork,
    Method,
    Scaffold,
    Sent,
    Summary,
    all_methods,
    local,
    seeds,
)
from fedeve.memory import Memory

METHODS = {name: cls() for name, cls in all_methods().items()}
METHODS |= {"fedeve-released": FedEve(drift="released"), "scaffold-released": Scaffold(control="released")}
METHODS |= {"fedeveparts-apart": FedEveParts(look_ahead=False, gain=0.3)}
WITH_NEUTRAL = [cls for cls in all_methods().values() if cls.neutral is not None]

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
every_class = pytest.mark.parametrize("cls", all_methods().values(), ids=all_methods().keys())
every_device = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

DIM = 5


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def replies(method: Method, *shape: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Made-up extras [..., S, D] for a method whose clients send some."""
    return {name: normal(*shape, seed=seed + 1000 + i, dtype=dtype) for i, name in enumerate(method.replies)}


def made_up_summary(method: Method, num_clients: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Summary:
    weights = torch.arange(1.0, num_clients + 1, dtype=torch.float64)
    extras = replies(method, num_clients, DIM, seed=seed, dtype=dtype)
    return Summary.of(normal(num_clients, DIM, seed=seed, dtype=dtype), weights, extras)


def assert_same_state(a, b, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert a._fields == b._fields
    for name in a._fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=rtol, atol=atol)


def lane_of(state, index: int):
    return type(state)(*(tensor[index] for tensor in state))


# A federation of quadratics, 0.5 |w - center_k|^2: gradients without a model, in numbers one can follow.


@dataclasses.dataclass(frozen=True)
class Quadratics:
    centers: torch.Tensor
    work: LocalWork
    cohort: int

    @property
    def optimum(self) -> torch.Tensor:
        return self.centers.mean(0)

    def play(self, method: Method, state, memory: Memory, rounds: range):
        """The states after each of these rounds; the memory is written."""
        states = []
        for round in rounds:
            sent, updates, extras, writes = method.send(state), [], [], {}
            for client in seeds.cohort(len(self.centers), self.cohort, seed=7, round=round).tolist():
                update, extra, writes[client] = self.train(method, client, sent, memory)
                updates.append(update)
                extras.append(extra)
            stacked = {name: torch.stack([extra[name] for extra in extras]) for name in method.replies}
            state, _ = method.step(state, Summary.of(torch.stack(updates), torch.ones(self.cohort), stacked))
            memory.put(writes)
            states.append(state)
        return states

    def train(self, method: Method, client: int, sent: Sent, memory: Memory):
        remembered = memory.get(client)
        correction = method.correction(sent, remembered)
        walk = local.begin(self.work, sent.params)
        for _ in range(self.work.steps):
            grad = walk.params - self.centers[client]
            walk = local.advance(self.work, walk, grad, start=sent.params, correction=correction)
        update = walk.params - sent.params
        return update, *method.finish(update, walk.num_steps, self.work.lr, sent, remembered)


def quadratics(*, scale: float, cohort: int, num_clients: int = 8) -> Quadratics:
    centers = scale * normal(num_clients, DIM, seed=1)
    return Quadratics(centers, LocalWork(lr=0.1, steps=3), cohort)
