"""The yardstick must be right before it is fast: two processes do what one does."""

from __future__ import annotations

import copy

import pytest
import torch
from bare import BareWorkers, _deal, bare_rounds
from torch import nn


def ragged_clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    sizes = (7, 1, 12, 4, 9)
    return [(torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]


def test_two_processes_give_the_model_that_one_gives() -> None:
    clients = ragged_clients()
    start = nn.Linear(6, 3).double()
    # Everybody takes part with all data in one batch, so no draw matters; only the order of sums differs.
    settings = {"lr": 0.5, "batch": 20}
    alone = bare_rounds(copy.deepcopy(start), clients, rounds=4, cohort=5, **settings)
    with BareWorkers(copy.deepcopy(start), clients, num_workers=2, **settings) as workers:
        workers.play(rounds=1, cohort=5)
        together = workers.play(rounds=3, cohort=5)
        processes = workers.processes
    for name, value in alone.state_dict().items():
        assert not torch.equal(value, start.state_dict()[name])
        torch.testing.assert_close(together.state_dict()[name], value, rtol=1e-12, atol=1e-14)
    assert not any(process.is_alive() for process in processes)


def test_a_process_that_dies_is_an_error_and_not_a_wait() -> None:
    clients = [(torch.zeros(4, 6), torch.full((4,), 99))] * 3  # no such class
    with (
        BareWorkers(nn.Linear(6, 3), clients, lr=0.1, batch=2, num_workers=1) as workers,
        pytest.raises(RuntimeError, match="process of the bare loop died"),
    ):
        workers.play(rounds=1, cohort=3)


def test_clients_are_dealt_so_that_nobody_waits_long() -> None:
    sizes = [1, 5, 1, 1, 1, 1]
    shares = _deal([0, 1, 2, 3, 4, 5], sizes, 2)
    assert sorted(client for share in shares for client in share) == [0, 1, 2, 3, 4, 5]
    assert [sum(sizes[client] for client in share) for share in shares] == [5, 5]
