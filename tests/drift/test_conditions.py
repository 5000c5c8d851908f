"""The four conditions: what is dealt, that it is the same in both engines, and the extremes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedeve import FedAvg, FederatedData, FedeveError, LocalWork, Run, Scaffold, Summary, simulate
from fedeve.drift.conditions import CONDITIONS, DEALINGS, deal
from fedeve.engines.reference import Reference

SIZES = [1, 12, 0, 30, 7, 20]


def federation(seed: int = 0) -> FederatedData:
    """Six clients of very different sizes: one has one example, one has none, one has a single class."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(SIZES) + 30, 4))
    y = (x @ rng.normal(size=(4, 3))).argmax(1)
    clients = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    y[clients[4]] = 1
    return FederatedData.from_arrays(x, y, clients, x_test=x[-30:], y_test=y[-30:], num_classes=3)


DATA = federation()


def some_run(**changes: Any) -> Run:
    options: dict[str, Any] = {"method": FedAvg(), "data": DATA, "model": nn.Linear(4, 3), "rounds": 4, "cohort": 4}
    torch.manual_seed(3)
    options["model"] = nn.Linear(4, 3)
    options |= {"seed": 5, "eval_every": 1, "dtype": "float64", "empty": "keep", "local": LocalWork(lr=0.1, batch=5)}
    return Run(**(options | changes))


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 1e6])
@pytest.mark.parametrize("size", [1, 3, 6])
@pytest.mark.parametrize("dealing", DEALINGS)
def test_every_row_of_the_cohort_is_dealt_once_and_no_other(dealing: str, size: int, alpha: float) -> None:
    for round in range(10):
        cohort = np.random.default_rng(round).permutation(6)[:size].astype(np.int64)
        dealt = deal(DATA, cohort, dealing=dealing, alpha=alpha, seed=1, round=round)
        assert list(dealt) == cohort.tolist()
        everything = np.concatenate([DATA.rows(client) for client in cohort.tolist()])
        assert sorted(np.concatenate(list(dealt.values())).tolist()) == sorted(everything.tolist())


def test_dealing_evenly_gives_sizes_that_differ_by_one_at_most_and_mixes_clients() -> None:
    dealt = deal(DATA, np.arange(6), dealing="evenly", seed=0, round=0)
    sizes = [len(rows) for rows in dealt.values()]
    assert max(sizes) - min(sizes) <= 1
    owners = [np.unique(np.searchsorted(DATA.offsets, rows, side="right")) for rows in dealt.values()]
    assert min(map(len, owners)) > 1


def test_dealing_evenly_leaves_a_client_the_cohorts_label_mix_on_average() -> None:
    shares = []
    for round in range(300):
        dealt = deal(DATA, np.arange(6), dealing="evenly", seed=0, round=round)
        shares.append(np.bincount(DATA.y[dealt[0]], minlength=3) / len(dealt[0]))
    pool = np.bincount(DATA.y[DATA.order], minlength=3) / sum(SIZES)
    assert np.mean(shares, axis=0) == pytest.approx(pool, abs=4 * np.std(shares, axis=0).max() / np.sqrt(300))


def test_a_vanishing_alpha_gives_each_class_to_one_client_and_a_huge_one_deals_classes_evenly() -> None:
    for round in range(20):
        dealt = deal(DATA, np.array([1, 3, 5]), dealing="dirichlet", alpha=1e-6, seed=0, round=round)
        counts = np.stack([np.bincount(DATA.y[rows], minlength=3) for rows in dealt.values()])
        assert ((counts > 0).sum(0) <= 1).all()
        even = deal(DATA, np.array([1, 3, 5]), dealing="dirichlet", alpha=1e6, seed=0, round=round)
        counts = np.stack([np.bincount(DATA.y[rows], minlength=3) for rows in even.values()])
        assert (counts.max(0) - counts.min(0) <= 1).all()


@pytest.mark.parametrize("dealing", ["evenly", "dirichlet"])
def test_what_is_dealt_follows_from_seed_and_round(dealing: str) -> None:
    def rows(seed: int, round: int) -> list[list[int]]:
        return [part.tolist() for part in some_run(seed=seed, dealing=dealing, cohort=6).dealt(round).values()]

    assert rows(1, 2) == rows(1, 2)
    assert sorted(map(tuple, rows(1, 2))) != sorted(map(tuple, rows(1, 3)))
    assert sorted(map(tuple, rows(1, 2))) != sorted(map(tuple, rows(2, 2)))


@pytest.mark.parametrize("dealing", DEALINGS)
@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=lambda method: method.name)
def test_both_engines_train_on_what_was_dealt(dealing: str, method: Any) -> None:
    run = some_run(dealing=dealing, method=method, dropout=0.2)
    reference, lanes = (simulate(run, engine=engine, device="cpu") for engine in ("reference", "lanes"))
    torch.testing.assert_close(lanes.params, reference.params, rtol=1e-9, atol=1e-12)
    assert [line["answered"] for line in lanes.lines] == [line["answered"] for line in reference.lines]


@pytest.mark.parametrize("dealing", ["evenly", "dirichlet"])
def test_updates_are_weighted_by_the_examples_dealt(dealing: str) -> None:
    run = some_run(dealing=dealing, rounds=1, cohort=6)
    learner = Reference(run, torch.device("cpu"))
    sent = run.method.send(run.method.init(learner.start))
    parts = [
        Summary.of(learner.train(client, 0, sent, {}, rows)[0][None], torch.tensor([float(len(rows))]))
        for client, rows in run.dealt(0).items()
    ]
    expected = learner.start + Summary.merged(parts).mean
    assert [len(rows) for rows in run.dealt(0).values()] != [SIZES[client] for client in run.cohort_of(0).tolist()]
    torch.testing.assert_close(simulate(run, engine="reference").params, expected)


def test_a_cohort_of_one_has_nothing_to_deal_and_a_cohort_without_data_is_lost() -> None:
    alone = some_run(cohort=1, empty="skip", rounds=5)
    for round in range(5):
        own, again = alone.dealt(round), some_run(cohort=1, empty="skip", dealing="evenly").dealt(round)
        assert {k: sorted(rows.tolist()) for k, rows in own.items()} == {
            k: sorted(r.tolist()) for k, r in again.items()
        }
    empty = FederatedData.from_arrays(np.zeros((1, 4)), [0], [[0], [], []], num_classes=3)
    run = some_run(data=empty, cohort=2, dealing="dirichlet", rounds=6)
    for engine in ("reference", "lanes"):
        lost = [round + 1 for round in range(6) if 0 not in run.cohort_of(round)]
        assert lost and simulate(run, engine=engine, device="cpu").lost == lost


def test_a_stopped_run_goes_on_with_what_it_would_have_dealt(tmp_path: Path) -> None:
    run = some_run(dealing="dirichlet", rounds=6)

    def stop(progress: Any) -> None:
        if progress.num_rounds == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(run, engine="reference", out=tmp_path, watch=stop)
    resumed, whole = simulate(run, engine="reference", out=tmp_path, resume=True), simulate(run, engine="reference")
    assert resumed.lines == whole.lines and torch.equal(resumed.params, whole.params)


def test_a_condition_is_part_of_what_a_run_is_and_bad_ones_are_refused() -> None:
    runs = [some_run(), some_run(dealing="evenly"), some_run(dealing="dirichlet"), some_run(dealing_alpha=0.2)]
    assert len({run.identity() for run in runs}) == 4
    assert runs[1].describe()["dealing"] == "evenly"
    with pytest.raises(FedeveError, match="dealing"):
        some_run(dealing="odd")
    with pytest.raises(FedeveError, match="dealing_alpha must be above 0"):
        some_run(dealing_alpha=0.0)


def test_the_four_conditions_are_those_of_the_paper() -> None:
    assert {name: (c.partition, c.dealing) for name, c in CONDITIONS.items()} == {
        "iid": ("iid", "own"),
        "period": ("dirichlet", "evenly"),
        "client": ("iid", "dirichlet"),
        "both": ("dirichlet", "own"),
    }
    assert CONDITIONS["client"].run_options(0.01) == {"dealing": "dirichlet", "dealing_alpha": 0.01}
    assert CONDITIONS["period"].data_options(0.01) == {"partition": "dirichlet", "alpha": 0.01}
    assert CONDITIONS["iid"].data_options(0.01) == {"partition": "iid"}
