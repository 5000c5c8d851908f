"""The bare loop: FedAvg as most people would write it in PyTorch, without this library. What speed is compared with.

`bare_rounds` trains one client after another; `BareWorkers` deals a round's clients to processes that stay alive.
"""

from __future__ import annotations

import copy
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy

Clients = list[tuple[torch.Tensor, torch.Tensor]]


def train_client(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, lr: float, batch: int) -> nn.Module:
    """One epoch of SGD on a copy of the model."""
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=lr)
    for rows in torch.randperm(len(y)).split(batch):
        optimiser.zero_grad()
        cross_entropy(local(x[rows]), y[rows]).backward()
        optimiser.step()
    return local


def bare_rounds(model: nn.Module, clients: Clients, *, rounds: int, cohort: int, lr: float, batch: int) -> nn.Module:
    """Plain FedAvg with deep copies and state dicts, one client after another."""
    for _ in range(rounds):
        chosen = torch.randperm(len(clients))[:cohort].tolist()
        total = sum(len(clients[client][1]) for client in chosen)
        mean = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for client in chosen:
            x, y = clients[client]
            local = train_client(model, x, y, lr=lr, batch=batch)
            for name, value in local.state_dict().items():
                mean[name] += value * (len(y) / total)
        model.load_state_dict(mean)
    return model


class BareWorkers:
    """The same loop with a round's clients dealt to processes of one thread each, on a CPU.

    The processes live as long as this object. The model, all clients' data and one sum per process lie in shared
    memory, so what goes through a pipe is a list of client numbers and an empty answer.

        with BareWorkers(model, clients, lr=0.1, batch=20, num_workers=2) as workers:
            workers.play(rounds=30, cohort=10)
    """

    def __init__(self, model: nn.Module, clients: Clients, *, lr: float, batch: int, num_workers: int = 2) -> None:
        self.model = model.share_memory()
        self.sizes = [len(y) for _, y in clients]
        # Two large tensors, not two for every client: each shared tensor costs an open file in every process.
        x = torch.cat([x for x, _ in clients]).share_memory_()
        y = torch.cat([y for _, y in clients]).share_memory_()
        self.sums: list[dict[str, torch.Tensor]] = []
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = mp.get_context("spawn")
        for number in range(num_workers):
            total = {name: torch.zeros_like(value).share_memory_() for name, value in model.state_dict().items()}
            ours, theirs = context.Pipe()
            seed = int(torch.randint(2**31, ()))
            arguments = (theirs, model, x, y, self.sizes, total, lr, batch, seed)
            process = context.Process(target=_work, args=arguments, name=f"bare-{number}", daemon=True)
            process.start()
            theirs.close()  # or a process that died would leave us waiting
            self.sums.append(total)
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:  # all are up before anybody's clock starts
            _answer(pipe)

    def play(self, *, rounds: int, cohort: int) -> nn.Module:
        """So many rounds of FedAvg; the model given at the start is moved and returned."""
        for _ in range(rounds):
            chosen = torch.randperm(len(self.sizes))[:cohort].tolist()
            total = sum(self.sizes[client] for client in chosen)
            for pipe, share in zip(self.pipes, _deal(chosen, self.sizes, len(self.pipes)), strict=True):
                pipe.send([(client, self.sizes[client] / total) for client in share])
            for pipe in self.pipes:
                _answer(pipe)
            with torch.no_grad():
                for name, value in self.model.state_dict().items():
                    value.copy_(sum(part[name] for part in self.sums))
        return self.model

    def __enter__(self) -> BareWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()  # the process on the other side ends
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
                process.join()


def _work(
    pipe: Connection,
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    sizes: list[int],
    total: dict[str, torch.Tensor],
    lr: float,
    batch: int,
    seed: int,
) -> None:
    """A process: for every list of (client, weight), the weighted sum of their models into `total`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    # A fresh process gives every freed block back to the system and faults it in again, 30,000 pages a round. Once a
    # large block has been freed, glibc keeps them; in the one-process loop, reading the data has done that.
    block = torch.empty(30 << 20, dtype=torch.uint8)
    del block
    clients = list(zip(x.split(sizes), y.split(sizes), strict=True))
    pipe.send(None)
    while True:
        try:
            share = pipe.recv()
        except EOFError:
            return
        for value in total.values():
            value.zero_()
        for client, weight in share:
            local = train_client(model, *clients[client], lr=lr, batch=batch)
            for name, value in local.state_dict().items():
                total[name] += value * weight
        pipe.send(None)


def _deal(chosen: list[int], sizes: list[int], num_workers: int) -> list[list[int]]:
    """The large clients first, each to the process with the least to do."""
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for client in sorted(chosen, key=lambda client: -sizes[client]):
        least = loads.index(min(loads))
        shares[least].append(client)
        loads[least] += sizes[client]
    return shares


def _answer(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the bare loop died; its error stands above") from None
