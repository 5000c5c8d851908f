"""Local work: the batches a client sees and the steps it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedeve import Correction, FedeveError, LocalWork, local

STEPS, DIM = 20, 6


def gradients(seed: int = 0) -> torch.Tensor:
    """[STEPS, DIM] of norms from far below to far above any clip used here."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, STEPS, dtype=torch.float64)
    return sizes[:, None] * torch.randn(STEPS, DIM, generator=generator, dtype=torch.float64)


def start() -> torch.Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def torch_walk(work: LocalWork, grads: torch.Tensor) -> list[torch.Tensor]:
    """The parameters after every step of torch's own optimiser."""
    param = torch.nn.Parameter(start())
    if work.optimizer == "adam":
        optimizer = torch.optim.Adam([param], lr=work.lr, weight_decay=work.weight_decay)
    else:
        optimizer = torch.optim.SGD([param], lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay)
    seen = []
    for grad in grads:
        param.grad = grad.clone()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_([param], work.clip)
        optimizer.step()
        seen.append(param.detach().clone())
    return seen


def our_walk(work: LocalWork, grads: torch.Tensor, begun: torch.Tensor, correction=Correction()) -> list[torch.Tensor]:  # noqa: B008
    walk, seen = local.begin(work, begun), []
    for grad in grads:
        walk = local.advance(work, walk, grad, start=begun, correction=correction)
        seen.append(walk.params)
    assert walk.num_steps == len(grads)
    return seen


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)])
def test_steps_are_those_of_torch(optimizer, momentum, weight_decay, clip):
    work = LocalWork(lr=0.05, optimizer=optimizer, momentum=momentum, weight_decay=weight_decay, clip=clip)
    ours, theirs = our_walk(work, gradients(), start()), torch_walk(work, gradients())
    for step in range(STEPS):
        torch.testing.assert_close(ours[step], theirs[step], rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_lanes_take_the_steps_of_clients_one_by_one(optimizer):
    work = LocalWork(lr=0.05, optimizer=optimizer, weight_decay=0.1, clip=0.5)
    grads = torch.stack([gradients(seed) for seed in range(3)], dim=1)
    begun = torch.stack([start(), 2 * start(), -start()])
    together = our_walk(work, grads, begun)[-1]
    for index in range(3):
        alone = our_walk(work, grads[:, index], begun[index])[-1]
        torch.testing.assert_close(together[index], alone, rtol=0, atol=1e-14)


def test_a_clipped_gradient_has_the_largest_norm_allowed_and_its_direction():
    work, grad = LocalWork(lr=1.0, clip=0.5), 10 * torch.ones(DIM, dtype=torch.float64)
    moved = our_walk(work, grad[None], start())[0] - start()
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-6)
    torch.testing.assert_close(-moved / moved.norm(), grad / grad.norm())


def test_the_gradient_is_clipped_after_its_correction_and_before_weight_decay():
    work = LocalWork(lr=1.0, clip=0.5, weight_decay=0.1)
    shift = 100 * torch.ones(DIM, dtype=torch.float64)
    moved = our_walk(work, torch.zeros(1, DIM, dtype=torch.float64), start(), Correction(shift=shift))[0] - start()
    expected = -(0.5 * shift / (shift.norm() + 1e-6) + 0.1 * start())
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-12)


def test_a_corrected_gradient_is_grad_plus_prox_times_distance_plus_shift():
    grad, params, begun = gradients()[0], 2 * start(), start()
    shift = torch.arange(DIM, dtype=torch.float64)
    got = local.corrected(grad, params, begun, Correction(prox=0.3, shift=shift))
    torch.testing.assert_close(got, grad + 0.3 * (params - begun) + shift, rtol=0, atol=1e-14)
    assert torch.equal(local.corrected(grad, params, begun, Correction()), grad)


def test_prox_is_measured_from_the_start_and_not_from_the_last_step():
    work, correction = LocalWork(lr=0.1), Correction(prox=2.0)
    grads = torch.ones(3, DIM, dtype=torch.float64)
    expected = start()
    for grad in grads:
        expected = expected - 0.1 * (grad + 2.0 * (expected - start()))
    torch.testing.assert_close(our_walk(work, grads, start(), correction)[-1], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_keep_the_dtype(optimizer, dtype):
    work = LocalWork(optimizer=optimizer, clip=1.0, weight_decay=0.1)
    walk = local.begin(work, start().to(dtype))
    walk = local.advance(work, walk, gradients()[0].to(dtype), start=start().to(dtype), correction=Correction(prox=0.1))
    assert walk.params.dtype == dtype


def test_a_step_changes_nothing_it_was_given():
    work = LocalWork(momentum=0.9, weight_decay=0.1, clip=1.0)
    begun, grad = start(), gradients()[-1]
    walk = local.advance(work, local.begin(work, begun), grad, start=begun, correction=Correction())
    kept = [tensor.clone() for tensor in (walk.params, walk.first)]
    local.advance(work, walk, grad, start=begun, correction=Correction())
    assert torch.equal(walk.params, kept[0])
    assert torch.equal(walk.first, kept[1])
    assert torch.equal(begun, start())
    assert torch.equal(grad, gradients()[-1])


# Batches.


def planned(work: LocalWork, num_examples: int, *, seed: int = 1, round: int = 2, client: int = 3) -> np.ndarray:
    return local.plan(work, num_examples, seed=seed, round=round, client=client)


@pytest.mark.parametrize("num_examples", [1, 4, 5, 12, 13])
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_epoch_shows_every_example_once(num_examples, epochs):
    rows = planned(LocalWork(batch=4, epochs=epochs), num_examples)
    per_epoch = -(-num_examples // 4)
    assert rows.shape == (epochs * per_epoch, 4)
    for epoch in range(epochs):
        mine = rows[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(mine[mine >= 0].tolist()) == list(range(num_examples))


def test_only_the_last_batch_of_an_epoch_is_short_and_no_batch_is_empty():
    rows = planned(LocalWork(batch=4, epochs=2), 10)
    assert (rows >= 0).sum(1).tolist() == [4, 4, 2, 4, 4, 2]
    assert (rows[[2, 5], 2:] == -1).all()


def test_epochs_are_shuffled_afresh():
    rows = planned(LocalWork(batch=50, epochs=2), 50)
    assert rows[0].tolist() != rows[1].tolist()
    assert rows[0].tolist() != list(range(50))


@pytest.mark.parametrize(("num_examples", "steps"), [(10, 1), (10, 3), (10, 7), (3, 5), (100, 2)])
def test_a_fixed_number_of_steps_is_taken_whatever_the_epochs(num_examples, steps):
    rows = planned(LocalWork(batch=4, epochs=9, steps=steps), num_examples)
    assert rows.shape == (steps, 4)
    assert (rows[:, 0] >= 0).all()
    assert rows.max() < num_examples


def test_fixed_steps_walk_the_batches_of_the_epochs():
    by_epochs, by_steps = planned(LocalWork(batch=4, epochs=3), 10), planned(LocalWork(batch=4, steps=8), 10)
    assert by_steps.tolist() == by_epochs[:8].tolist()


@pytest.mark.parametrize("work", [LocalWork(batch=4), LocalWork(batch=4, steps=5), LocalWork(batch=4, epochs=3)])
def test_a_client_without_data_takes_no_steps(work):
    assert planned(work, 0).shape == (0, 4)


def test_batches_are_a_pure_function_of_seed_round_and_client():
    work = LocalWork(batch=5)
    first = planned(work, 40)
    np.random.seed(5)
    torch.manual_seed(5)
    assert planned(work, 40).tolist() == first.tolist()
    assert planned(work, 40, client=np.int64(3)).tolist() == first.tolist()


@pytest.mark.parametrize("other", [{"seed": 9}, {"round": 9}, {"client": 9}])
def test_another_seed_round_or_client_gets_other_batches(other):
    work = LocalWork(batch=5)
    assert planned(work, 40, **other).tolist() != planned(work, 40).tolist()


# Settings.


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0}, {"lr": -0.1}, {"batch": 0}, {"batch": 2.5}, {"epochs": 0}, {"steps": 0}, {"optimizer": "sgdd"},
        {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1}, {"clip": 0}, {"lr": float("nan")},
        {"lr": float("inf")}, {"epochs": True}, {"lr": "0.1"}, {"lr": None},
    ],
)  # fmt: skip
def test_bad_local_work_is_refused_by_name(bad):
    with pytest.raises(FedeveError, match=rf"local\.{next(iter(bad))}"):
        LocalWork(**bad)


def test_adam_with_momentum_is_refused():
    with pytest.raises(FedeveError, match="Adam has no momentum"):
        LocalWork(optimizer="adam", momentum=0.9)
