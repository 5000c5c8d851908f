"""Images are mirrored and shifted as they should be, the same in every engine, and runs without it keep their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from walking import assert_close, in_rows

from fedeve import FederatedData, FedEve, FedeveError, LocalWork, Run, augment, simulate
from fedeve.experiments import config
from fedeve.local import plan, views

SIZES = [1, 7, 0, 26, 13]


def by_hand(image: np.ndarray[Any, Any], *, mirrored: bool, down: int, right: int) -> np.ndarray[Any, Any]:
    """Mirror, pad, cut out."""
    if mirrored:
        image = image[:, :, ::-1]
    wide = np.pad(image, ((0, 0), (augment.SHIFT,) * 2, (augment.SHIFT,) * 2))
    top, left = augment.SHIFT + down, augment.SHIFT + right
    return wide[:, top : top + image.shape[1], left : left + image.shape[2]]


def test_every_view_is_the_image_mirrored_padded_and_cut() -> None:
    image = np.random.default_rng(0).integers(1, 256, (3, 5, 7), dtype=np.uint8)
    shifts = range(-augment.SHIFT, augment.SHIFT + 1)
    wanted = {
        augment.view(mirrored=mirrored, down=down, right=right): by_hand(
            image, mirrored=mirrored, down=down, right=right
        )
        for mirrored in (False, True)
        for down in shifts
        for right in shifts
    }
    assert sorted(wanted) == list(range(augment.VIEWS))
    which = torch.tensor(list(wanted)).reshape(2, -1)
    ours = augment.seen(torch.from_numpy(image).expand(*which.shape, 3, 5, 7), which)
    assert ours.dtype == torch.uint8
    assert np.array_equal(ours.flatten(0, 1).numpy(), np.stack(list(wanted.values())))
    grey = augment.seen(torch.from_numpy(image[0]).expand(*which.shape, 5, 7), which)
    assert torch.equal(grey, ours[:, :, 0])


def test_views_are_drawn_for_every_step_uniformly_and_by_seed_round_and_client_alone() -> None:
    work, stream = LocalWork(batch=20, epochs=40, augment="flip-crop"), {"seed": 1, "round": 2, "client": 3}
    batches = plan(work, 500, **stream)
    drawn = views(work, batches, **stream)
    assert drawn.shape == batches.shape and np.array_equal(drawn, views(work, batches, **stream))
    counts = np.bincount(drawn.ravel(), minlength=augment.VIEWS)
    assert len(counts) == augment.VIEWS and abs(counts / counts.mean() - 1).max() < 0.5  # 123 each, give or take 11
    for other in ({"seed": 2}, {"round": 3}, {"client": 4}):
        assert not np.array_equal(drawn, views(work, batches, **(stream | other)))
    assert np.array_equal(plan(LocalWork(batch=20, epochs=40), 500, **stream), batches)  # the same batches without it
    assert not views(LocalWork(), batches, **stream).any()


def images() -> FederatedData:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (sum(SIZES) + 20, 2, 9, 8), dtype=np.uint8), rng.integers(0, 3, sum(SIZES) + 20)
    clients = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return FederatedData.from_arrays(
        x, y, clients, x_test=x[-20:], y_test=y[-20:], shift=[[[100.0]], [[120.0]]], scale=0.01
    )


def some_run(**local: Any) -> Run:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 7 * 6, 3))
    work = LocalWork(**({"lr": 0.05, "batch": 4, "epochs": 2, "augment": "flip-crop"} | local))
    options: dict[str, Any] = {"rounds": 4, "cohort": 3, "eval_every": 2, "empty": "keep", "dtype": "float64"}
    return Run(method=FedEve(), data=images(), model=model, local=work, **options)


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
def test_engines_agree_on_augmented_images(local: dict[str, Any]) -> None:
    run = some_run(**local)
    reference = simulate(run, engine="reference")
    assert_close(simulate(run, engine="lanes", width=2), reference, 1e-12)
    assert_close(in_rows(run, width=3), reference, 1e-12)
    plain = simulate(some_run(**local, augment="none"), engine="reference")
    assert (plain.params - reference.params).norm() > 1e-3


def test_a_run_without_it_is_described_as_ever_and_one_with_it_is_built_again() -> None:
    table = {"data": "digits", "model": "linear", "rounds": 2, "cohort": 3}
    assert (
        "augment" not in config.check(table).describe()["local"]
        and "augment" not in some_run(augment="none").describe()["local"]
    )
    with_it = config.check({**table, "local": {"augment": "flip-crop"}})
    assert with_it.describe()["local"]["augment"] == "flip-crop"
    run = config.check(with_it.describe()).build()
    assert run.local.augments and run.describe() == with_it.describe()
    assert run.identity() != config.check(table).build(run.data).identity()


def test_what_is_no_image_cannot_be_mirrored() -> None:
    flat = FederatedData.from_arrays(np.zeros((6, 4), np.float32), [0, 1, 0, 1, 0, 1], [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(FedeveError, match=r"only images.* got inputs of shape \(4,\); leave local.augment out"):
        Run(method=FedEve(), data=flat, model="linear", cohort=2, local=LocalWork(augment="flip-crop"))
    with pytest.raises(FedeveError, match=r"local.augment.*got 'flip'"):
        LocalWork(augment="flip")
