"""FedEveAdam between its parents: FedEve where nothing is scaled, FedAdam's scaling where it is."""

from __future__ import annotations

import torch

from fedeve import FedEve, FedEveAdam, Summary


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rounds(dtype: torch.dtype, count: int = 20) -> list[Summary]:
    return [
        Summary.of(0.1 + normal(6, 9, seed=seed, dtype=dtype), normal(6, seed=99 + seed).abs()) for seed in range(count)
    ]


def test_where_nothing_is_scaled_it_is_fedeve_to_the_last_digit() -> None:
    for dtype in (torch.float32, torch.float64):
        fedeve, ours = FedEve(), FedEveAdam(server_lr=1.0, beta2=1.0, tau=1.0)
        state, mine = fedeve.init(normal(9, seed=1, dtype=dtype)), ours.init(normal(9, seed=1, dtype=dtype))
        for summary in rounds(dtype):
            assert torch.equal(ours.send(mine).params, fedeve.send(state).params)
            (state, facts), (mine, own) = fedeve.step(state, summary), ours.step(mine, summary)
            assert torch.equal(mine.params, state.params) and torch.equal(mine.momentum, state.momentum)
            assert not mine.square.any() and own == facts


def test_the_scale_of_the_updates_does_not_matter_where_tau_is_small() -> None:
    method = FedEveAdam(tau=1e-12)
    ends = []
    for scale in (1.0, 1e4):
        state = method.init(torch.zeros(9, dtype=torch.float64))
        for seed in range(10):
            state, _ = method.step(state, Summary.of(scale * normal(6, 9, seed=seed), torch.ones(6)))
        ends.append(state.params)
    torch.testing.assert_close(*ends, rtol=1e-8, atol=0)


def test_clients_start_where_the_next_step_would_go_if_they_confirmed_the_momentum() -> None:
    method = FedEveAdam(beta2=1.0)  # s as it is
    state = method.init(normal(9, seed=1))._replace(momentum=normal(9, seed=2), square=normal(9, seed=3).square())
    moved, _ = method.step(state, Summary.of(state.momentum.expand(4, 9), torch.ones(4)))
    torch.testing.assert_close(moved.params, method.send(state).params, rtol=1e-12, atol=0)
