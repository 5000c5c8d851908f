"""The contract in whole runs: through the simulator, and on quadratics whose optimum is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from contract import METHODS, WITH_NEUTRAL, every_method, quadratics

from fedeve import (
    FedAvg,
    FederatedData,
    LocalWork,
    Method,
    Run,
    Sent,
    Summary,
    local,
    simulate,
)
from fedeve.memory import Memory

# Through the simulator.


def blobs(sizes: list[int], *, seed: int = 0, dim: int = 4, num_classes: int = 3) -> FederatedData:
    """Clients of these sizes, whose labels follow a linear rule that differs a little from client to client."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), dim))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    rules = rng.normal(size=(dim, num_classes)) + 0.5 * rng.normal(size=(len(sizes), dim, num_classes))
    y = np.einsum("nd,ndc->nc", x, rules[owners]).argmax(-1)
    clients = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return FederatedData.from_arrays(x, y, clients, num_classes=num_classes)


@pytest.mark.parametrize("cls", WITH_NEUTRAL, ids=[cls.__name__.lower() for cls in WITH_NEUTRAL])
def test_neutral_hyper_parameters_are_fedavg(cls):
    data, work = blobs([5, 9, 1, 30, 12, 7]), LocalWork(lr=0.3, batch=4, epochs=2)
    run = Run(method=FedAvg(), data=data, model="linear", rounds=6, cohort=3, dtype="float64", seed=3, local=work)
    fedavg = simulate(run, device="cpu")
    neutral = simulate(dataclasses.replace(run, method=cls(**cls.neutral)), device="cpu")
    torch.testing.assert_close(neutral.params, fedavg.params, rtol=0, atol=1e-9)


def test_every_other_method_differs_from_fedavg_at_its_defaults():
    run = Run(method=FedAvg(), data=blobs([5, 9, 1, 30]), model="linear", rounds=3, cohort=3, dtype="float64", seed=3)
    fedavg = simulate(run, device="cpu").params
    for name, method in METHODS.items():
        moved = (simulate(dataclasses.replace(run, method=method), device="cpu").params - fedavg).abs().max()
        assert (moved > 1e-6) == (name != "fedavg"), name


def plain_client(method: Method, data: FederatedData, run: Run, client: int, round: int, sent: Sent, memory: dict):
    """Local work written once more, with torch's optimiser and a line after `backward`."""
    weight, bias = sent.params.split([12, 3])
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    model.load_state_dict({"weight": weight.reshape(3, 4), "bias": bias})
    start = [param.detach().clone() for param in model.parameters()]
    correction = method.correction(sent, memory)
    shift = torch.zeros_like(sent.params) if correction.shift is None else correction.shift
    shifts = [part.reshape(param.shape) for part, param in zip(shift.split([12, 3]), start, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=run.local.lr)
    x, y = torch.from_numpy(data.x[data.rows(client)]), torch.from_numpy(data.y[data.rows(client)])
    batches = local.plan(run.local, len(y), seed=run.seed, round=round, client=client)
    for batch in batches:
        rows = batch[batch >= 0]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        for param, begun, moved in zip(model.parameters(), start, shifts, strict=True):
            param.grad += correction.prox * (param.detach() - begun) + moved
        optimizer.step()
    end = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    return end - sent.params, len(batches)


@every_method
def test_ragged_local_steps_through_the_simulator_are_the_clients_one_by_one(method):
    sizes = [1, 2, 3, 5, 8, 13, 21, 34, 55, 60]
    data, rounds = blobs(sizes), 3
    run = Run(
        method=method, data=data, model="linear", rounds=rounds, cohort=6, dtype="float64", seed=5,
        local=LocalWork(lr=0.2, batch=8),
    )  # fmt: skip
    record = simulate(run, device="cpu")
    linear = run.build_model()[1]
    params = torch.cat([linear.weight.detach().reshape(-1), linear.bias.detach()])
    state, memories = method.init(params, num_clients=len(sizes)), {}
    for round in range(rounds):
        sent, updates, extras, cohort = method.send(state), [], [], run.cohort_of(round).tolist()
        for client in cohort:
            memory = memories.get(client, {name: torch.zeros_like(params) for name in method.remembers})
            update, num_steps = plain_client(method, data, run, client, round, sent, memory)
            assert num_steps == -(-sizes[client] // 8)
            extra, memories[client] = method.finish(update, num_steps, run.local.lr, sent, memory)
            updates.append(update)
            extras.append(extra)
        weights = torch.tensor([sizes[client] for client in cohort])
        stacked = {name: torch.stack([extra[name] for extra in extras]) for name in method.replies}
        state, _ = method.step(state, Summary.of(torch.stack(updates), weights, stacked))
    torch.testing.assert_close(record.params, state.params, rtol=1e-9, atol=1e-11)
    assert record.lines[-1]["answered"] == [6] * rounds


@every_method
def test_a_cohort_of_one_client_learns_through_the_simulator(method):
    data = blobs([40, 3, 17])
    run = Run(method=method, data=data, model="linear", rounds=4, cohort=1, dtype="float64", seed=2)
    assert torch.isfinite(simulate(run, device="cpu").params).all()


# Convergence. Clients agree on the curvature, so the mean of their centres is where every method has to end.
# The scale is 0.01 because the adaptive servers move a parameter by about `server_lr` (1e-3 by default) a round: from
# two scales away they arrive in some 20 rounds. All others are linear in the scale and do not care.


@every_method
def test_converges_on_a_quadratic_when_all_clients_take_part(method):
    # Three steps at 0.1 take a client 27 % of its way, so plain averaging shrinks the distance by 0.73^200 = 1e-27.
    # What is asked, a factor of 50, leaves room for momentum that rings and for adaptive steps that shrink slowly.
    problem = quadratics(scale=0.01, cohort=8)
    start = problem.optimum + 0.02
    states = problem.play(method, method.init(start, num_clients=8), Memory(method.remembers, like=start), range(200))
    far = (start - problem.optimum).norm()
    for state in states[150:]:
        assert (state.params - problem.optimum).norm() < far / 50


@every_method
def test_converges_on_a_quadratic_on_average_when_half_the_clients_are_sampled(method):
    # The cohort's mean centre has standard deviation 0.01 sqrt((1/4)(1 - 4/8)(8/7)) = 0.0038 per number, a fifth of the
    # 0.02 at the start; over 200 rounds, correlated over about 10, the mean wobbles by a fifth / sqrt(20) = 4 % of it.
    problem = quadratics(scale=0.01, cohort=4)
    start = problem.optimum + 0.02
    states = problem.play(method, method.init(start, num_clients=8), Memory(method.remembers, like=start), range(400))
    far = (start - problem.optimum).norm()
    late = torch.stack([state.params for state in states[200:]]) - problem.optimum
    assert late.mean(0).norm() < far / 15
    assert late.norm(dim=-1).max() < far / 2
