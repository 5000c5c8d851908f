"""Configurations become runs, and a run's record becomes the same run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedeve import FedEve, FedeveError, simulate
from fedeve.experiments import config

TABLE: dict[str, Any] = {
    "rounds": 3,
    "cohort": 5,
    "model": "linear",
    "method": {"name": "fedavgm", "beta": 0.5},
    "data": {"name": "digits", "num_clients": 20, "alpha": 0.5},
    "local": {"lr": 0.1, "optimizer": "adam"},
}


def test_a_table_becomes_the_run_it_describes() -> None:
    run = config.check(TABLE).build()
    assert run.rounds == 3 and run.method.name == "fedavgm" and run.data.num_clients == 20
    assert run.local.optimizer == "adam" and run.model == "linear"


def test_a_name_stands_for_a_table() -> None:
    short = config.check({**TABLE, "method": "fedeve"})
    assert short.method == config.check({**TABLE, "method": {"name": "fedeve"}}).method == FedEve()


def test_what_is_left_out_has_defaults() -> None:
    plan = config.check({})
    assert plan.method == FedEve() and plan.dataset.name == "glyphs" and plan.plain["model"] == "lenet5"


def test_a_recorded_run_is_built_again_as_it_was() -> None:
    run = config.check(TABLE).build()
    header = json.loads(json.dumps(simulate(run).header))
    again = config.check(header["config"]).build()
    assert again.identity() == run.identity() == header["identity"]


def test_assignments_reach_into_tables_and_leave_the_original_alone() -> None:
    changed = config.override(TABLE, ["local.lr=0.5", "method=fedavg", "seed=7", "data.partition=iid", "local.clip=1"])
    assert changed["local"] == {"lr": 0.5, "optimizer": "adam", "clip": 1}
    assert changed["method"] == "fedavg" and changed["seed"] == 7 and changed["data"]["partition"] == "iid"
    assert TABLE["local"] == {"lr": 0.1, "optimizer": "adam"} and TABLE["method"]["name"] == "fedavgm"


def test_an_assignment_into_a_short_form_keeps_the_name() -> None:
    assert config.override({"method": "fedavgm"}, ["method.beta=0.8"])["method"] == {"name": "fedavgm", "beta": 0.8}


def test_whole_numbers_and_decimals_that_are_equal_give_one_identity() -> None:
    one = config.check(config.override(TABLE, ["method.server_lr=1"])).build()
    same = config.check(config.override(TABLE, ["method.server_lr=1.0"])).build()
    assert one.identity() == same.identity()


def test_json_is_read_like_toml(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(TABLE))
    assert config.read(tmp_path / "run.json") == TABLE


@pytest.mark.parametrize("name", config.presets())
def test_every_preset_is_valid_and_says_what_the_paper_leaves_open(name: str) -> None:
    plan = config.check(config.read(name))
    assert plan.method == FedEve() and plan.plain["empty"] == "keep"
    assert "open" in config.presets()[name].read_text()


def test_the_presets_are_the_settings_of_the_paper() -> None:
    femnist = config.check(config.read("paper/femnist-dirichlet-0.01"))
    assert (femnist.plain["rounds"], femnist.plain["cohort"], femnist.plain["model"]) == (1500, 10, "lenet5")
    assert (femnist.local.lr, femnist.local.batch, femnist.local.epochs, femnist.local.optimizer) == (
        0.01,
        20,
        1,
        "sgd",
    )
    assert (femnist.dataset.alpha, femnist.dataset.num_clients) == (0.01, 3400)
    movies = config.check(config.read("paper/movielens1m"))
    assert (movies.plain["rounds"], movies.plain["cohort"], movies.plain["model"]) == (1000, 20, "din")
    assert (movies.local.lr, movies.local.batch, movies.local.optimizer) == (0.01, 100, "adam")
    cifar = config.check(config.read("paper/cifar100-dirichlet-1"))
    assert cifar.dataset.num_clients == 100 and cifar.plain["model_options"] == {"stem": "cifar", "groups": 2}


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(FedeveError, match="unknown preset: got 'paper/movielens'; did you mean 'paper/movielens1m'"):
        config.read("paper/movielens")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"name": "lenet5", "stem": "x"}}, "lenet5 has no options: got 'model.stem'; --set model=lenet5"),
        (
            {"model": {"name": "resnet18", "stam": "x"}},
            "unknown option 'model.stam' of resnet18: got 'stam'; did you mean",
        ),
        ({"model": {"stem": "x"}}, r"\[model\] needs a name"),
        ({"local": 3}, "local must be a table"),
        ({"rounds": "many"}, "rounds must be a whole number"),
    ],
)
def test_bad_tables_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FedeveError, match=words):
        config.check({**TABLE, **change})
