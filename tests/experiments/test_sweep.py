"""A sweep's file becomes points: expanded, checked, without duplicates, with names for people and for folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedeve import FedeveError
from fedeve.experiments import config as configs
from fedeve.experiments import sweep as sweeps
from fedeve.experiments.sweep import Sweep, portable

BASE = """
[base]
rounds = 6
cohort = 5
model = "linear"
eval_every = 2
method = "fedavg"
[base.data]
name = "digits"
partition = "dirichlet"
num_clients = 30
[base.local]
lr = 0.1
"""


def read(tmp_path: Path, text: str, **options: Any) -> Sweep:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return sweeps.read(path, **options)


def test_a_grid_is_every_combination_and_labels_say_what_differs(tmp_path: Path) -> None:
    grid = '[grid]\nmethod = ["fedavg", "fedeve"]\ndata.alpha = [1, 0.1]\nseed = [1, 2, 3]\n'
    found = read(tmp_path, f'title = "T"\n{grid}{BASE}')
    assert found.title == "T" and found.last == 100 and len(found.points) == 12
    cells = {(point.row, point.column, point.seed) for point in found.points}
    assert cells == {(m, f"alpha {a}", s) for m in ("FedAvg", "FedEve") for a in ("1", "0.1") for s in (1, 2, 3)}


def test_points_are_added_seeds_go_to_all_and_duplicates_count_once(tmp_path: Path) -> None:
    text = (
        'seeds = [1, 2]\n[grid]\nmethod = ["fedavg", "fedprox"]\n'
        '[[points]]\nmethod.name = "fedprox"\nmethod.mu = [0.5, 1]\n'  # mu = 1 is the default: there already
        '[[points]]\nseed = 9\nrow = "Nine"\n' + BASE
    )
    found = read(tmp_path, text)
    rows = [(point.row, point.seed) for point in found.points]
    assert rows == [
        ("FedAvg", 1), ("FedAvg", 2), ("FedProx (mu 1)", 1), ("FedProx (mu 1)", 2),
        ("FedProx (mu 0.5)", 1), ("FedProx (mu 0.5)", 2), ("Nine", 9),
    ]  # fmt: skip
    assert {point.column for point in found.points} == {"digits"}


def test_a_folder_is_named_by_the_configuration_alone(tmp_path: Path) -> None:
    """A run is found again when the sweep around it grows, is labelled otherwise, or its files lie elsewhere."""
    small = read(tmp_path, '[grid]\nmethod = ["fedprox"]\n' + BASE)
    large = read(tmp_path, "[grid]\nmethod.name = ['fedprox']\nmethod.mu = [0.1, 1.0]\nseed = [0, 1]\n" + BASE)
    assert small.points[0].row == "FedProx" and small.points[0].name in {point.name for point in large.points}
    changed = read(tmp_path, '[grid]\nmethod = ["fedprox"]\n' + BASE, assignments=["local.lr=0.2"])
    assert changed.points[0].name != small.points[0].name
    assert len({point.name for point in large.points}) == 4


@pytest.mark.parametrize("name", ["examples/digits.toml", *configs.presets()])
def test_a_plan_says_what_its_run_will_say(name: str) -> None:
    plan = configs.check(configs.override(configs.read(name), ["data.name=digits"] if "paper" not in name else []))
    described = plan.describe()
    again = configs.check(portable(described)).describe()
    assert again == described
    if "paper" not in name:
        assert plan.build().describe() == described


def test_numbers_are_described_alike_however_they_are_written(tmp_path: Path) -> None:
    found = read(tmp_path, "[grid]\ndropout = [0, 0.0]\nlocal.lr = [1, 1.0]\n" + BASE)
    assert len(found.points) == 1


def test_runs_that_share_model_data_and_local_work_share_lanes(tmp_path: Path) -> None:
    found = read(tmp_path, '[grid]\nmethod = ["fedavg", "fedeve"]\nlocal.lr = [0.1, 0.2]\nseed = [1, 2]\n' + BASE)
    assert len({point.shares for point in found.points}) == 1
    assert len({point.shares for point in read(tmp_path, f"[grid]\ndata.alpha = [1, 2]\n{BASE}").points}) == 1
    for key in ("local.batch = [5, 10]", "data.seed = [1, 2]", 'dtype = ["float32", "float64"]'):
        assert len({point.shares for point in read(tmp_path, f"[grid]\n{key}\n{BASE}").points}) == 2


def test_a_base_is_a_file_beside_a_preset_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("rounds = 3\nmodel = 'linear'\n[data]\nname = 'digits'\nnum_clients = 20\n")
    assert read(tmp_path, 'base = "mine.toml"\n[grid]\nseed = [1]\n').points[0].rounds == 3
    assert read(tmp_path, 'base = "paper/movielens1m"\n[grid]\nseed = [1]\n').points[0].rounds == 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[grid]\nroundz = [1]\n", ["unknown key 'roundz'", "did you mean 'rounds'?"]),
        ("[grid]\nlocal.lrr = [1]\n", ["unknown setting 'local.lrr'", "did you mean 'lr'?"]),
        ('[grid]\nmethod = ["fedavgg"]\n', ["unknown method", "did you mean 'fedavg'?"]),
        ("[grid]\nseed = []\n", ["seed has no values", "[]"]),
        ("[grid]\nlocal.lr = [0.1, -1]\n", ["local.lr must be above 0", "-1"]),
        ("[grid]\n", ["must be a table that is not empty"]),
        ("", ["the sweep has no runs"]),
        ("seeds = [1]\n", ["the sweep has no runs"]),
        ("seeds = []\n[grid]\nmethod = ['fedavg']\n", ["seed has no values"]),
        ("grd = 3\n", ["unknown key 'grd' of a sweep", "did you mean 'grid'?"]),
        ("grid = 3\n", ["must be a table", "3"]),
        ("points = [3]\n", ["must be a table", "3"]),
        ("title = 3\n[grid]\nseed = [1]\n", ["title must be a text"]),
        ("last = 0\n[grid]\nseed = [1]\n", ["last must be a number of rounds", "0"]),
        ("metrics = 'auc'\n[grid]\nseed = [1]\n", ["metrics must be a list"]),
        ("base = 'no.toml'\n[grid]\nseed = [1]\n", ["cannot read the configuration", "no.toml"]),
        ("base = 'paper/no'\n[grid]\nseed = [1]\n", ["unknown preset"]),
        ("[grid]\nrounds.x = [1]\n", ["rounds is not a table"]),
    ],
)
def test_bad_sweeps_are_refused_with_what_to_do(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(FedeveError) as refused:
        read(tmp_path, text + ("" if "base =" in text else BASE))
    for word in words:
        assert word in str(refused.value)
