"""The paper's tables as sweeps: every method with the authors' values, printed numbers beside their cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweeping import fedeve

from fedeve import FedeveError, Record
from fedeve.drift import paper_figures
from fedeve.experiments.manifest import read_manifest
from fedeve.experiments.paper_tables import TABLES, build
from fedeve.experiments.sweep import Sweep
from fedeve.seeds import SEEDS

ROWS = [
    "FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "SCAFFOLD (released)", "FedOpt (FedAdam)", "FedEve",
    "FedEve (released)", "FedEveAdam (ours)",
]  # fmt: skip


def methods_of(sweep: Sweep, data: str) -> dict[str, dict[str, Any]]:
    return {point.row: point.config["method"] for point in sweep.points if point.config["data"]["name"] == data}


@pytest.mark.parametrize(("name", "columns"), [("table1", 7), ("table2", 2), ("table3", 12)])
def test_a_table_is_every_method_in_every_setting_with_the_papers_seeds(name: str, columns: int) -> None:
    sweep = build(TABLES[name])
    cells = {(point.row, point.column, point.seed) for point in sweep.points}
    assert len(cells) == len(sweep.points) == len(ROWS) * columns * 5
    assert list(dict.fromkeys(point.row for point in sweep.points)) == ROWS
    assert {point.seed for point in sweep.points} == {192, 225, 226, 230, 231} == set(SEEDS)


def test_methods_have_the_authors_values_which_differ_by_data_set() -> None:
    first = build(TABLES["table1"], seeds=1)
    for data, tau in (("femnist", 3e-4), ("cifar100", 1e-4)):
        found = methods_of(first, data)
        assert found["FedOpt (FedAdam)"] == {
            "name": "fedadam", "server_lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "tau": tau,
        }  # fmt: skip
        assert found["FedProx"]["mu"] == 1.0 and found["FedAvgM"]["beta"] == 0.9
        assert found["FedEveAdam (ours)"] == {"name": "fedeveadam", "server_lr": 1e-3, "beta2": 0.99, "tau": tau}
        assert found["SCAFFOLD"]["control"] == "paper" and found["SCAFFOLD (released)"]["control"] == "released"
        assert found["FedEve"]["drift"] == "paper" and found["FedEve (released)"]["drift"] == "released"
    ours = build(TABLES["table1"], seeds=1, methods=["fedeveprox"])
    assert {point.row for point in ours.points} == {"FedEveProx (ours)"}
    assert methods_of(ours, "femnist")["FedEveProx (ours)"]["mu"] == 1.0
    movies = methods_of(build(TABLES["table2"], seeds=1, methods=["fedprox", "fedadam", "fedeveprox"]), "movielens1m")
    assert movies["FedEveProx (ours)"]["mu"] == 0.01
    assert movies["FedProx"]["mu"] == 0.01 and movies["FedOpt (FedAdam)"]["tau"] == 1e-4


def test_settings_are_the_presets_and_epochs_the_tables() -> None:
    third = build(TABLES["table3"], seeds=1, methods=["fedavg"])
    for point in third.points:
        config = point.config
        assert (config["rounds"], config["cohort"], config["empty"]) == (1500, 10, "keep")
        assert point.column.endswith(f"E = {config['local']['epochs']}")
        way = config["data"]["partition"]
        assert way in point.column or f"Dirichlet {config['data']['alpha']:g}," in point.column
    cifar = build(TABLES["table1"], seeds=1, only=["cifar100"], methods=["fedeve"])
    assert {point.config["data"]["num_clients"] for point in cifar.points} == {100}
    assert {point.config["model"]["name"] for point in cifar.points} == {"resnet18"}


def test_every_printed_number_stands_beside_a_cell_of_ours() -> None:
    count = {}
    for name in ("table1", "table2", "table3"):
        sweep = build(TABLES[name])
        cells = {(point.row, point.column) for point in sweep.points}
        placed = [
            (row, column)
            for by_row in sweep.printed.values()
            for row, by_column in by_row.items()
            for column in by_column
        ]
        assert set(placed) <= cells and set(sweep.printed) == set(sweep.metrics) and "as printed" in sweep.source
        count[name] = len(placed)
    assert count == {"table1": 8 * 7, "table2": 5 * 6 * 2, "table3": 8 * 12}  # SCAFFOLD is not printed in Table 2
    first = build(TABLES["table1"]).printed["accuracy"]
    assert (
        first["FedEve"]["FEMNIST, Dirichlet 0.01"]
        == [75.99, 1.61]
        == first["FedEve (released)"]["FEMNIST, Dirichlet 0.01"]
    )
    second = build(TABLES["table2"]).printed["ndcg@10"]["FedEve"]
    assert second == {f"MovieLens-1M, lr {lr}": [0.2407, 0.0037] for lr in ("0.01", "0.001")}
    assert not build(TABLES["gains"]).printed


def test_movielens_is_there_at_the_papers_rate_and_at_the_released_codes() -> None:
    rates = {point.column: point.config["local"]["lr"] for point in build(TABLES["table2"], seeds=1).points}
    assert rates == {"MovieLens-1M, lr 0.01": 0.01, "MovieLens-1M, lr 0.001": 0.001}
    one = build(TABLES["table2"], seeds=1, only=["lr=0.001"], methods=["fedeve"])
    assert {point.config["local"]["lr"] for point in one.points} == {0.001} and one.printed


def test_cifar_in_other_clients_is_called_what_it_is_and_has_no_printed_number_beside_it() -> None:
    sweep = build(TABLES["table1"], seeds=1, clients=500)
    assert {point.column for point in sweep.points} == {
        f"CIFAR-100 in 500 clients, Dirichlet {alpha}" for alpha in ("1", "0.1", "0.01")
    }
    assert {point.config["data"]["num_clients"] for point in sweep.points} == {500}
    assert sweep.title == "Table 1: CIFAR-100 in 500 clients" and not sweep.printed
    same = build(TABLES["table1"], seeds=1, clients=500, only=["dirichlet-0.1"], methods=["fedeve"])
    assert {point.name for point in same.points} <= {point.name for point in sweep.points} and len(same.points) == 2
    with pytest.raises(FedeveError, match="no CIFAR-100"):
        build(TABLES["table3"], clients=500)


def test_the_gain_is_fedeves_alone_in_four_partitions_and_three_epochs() -> None:
    sweep = build(TABLES["gains"], seeds=1)
    assert {point.row for point in sweep.points} == {"FedEve", "FedEve (released)"} and len(sweep.points) == 2 * 12


def test_rows_and_columns_can_be_chosen() -> None:
    some = build(TABLES["table1"], methods=["fedeve", "FedAvg"], only=["cifar100,dirichlet-0.1"], seeds=2)
    assert {(point.row, point.column) for point in some.points} == {
        (row, "CIFAR-100, Dirichlet 0.1") for row in ("FedAvg", "FedEve", "FedEve (released)")
    }
    assert {point.row for point in build(TABLES["table2"], methods=["fedyogi"]).points} == {"FedOpt (FedYogi)"}
    cell = build(TABLES["table3"], methods=["FedEve"], only=["dirichlet-0.01,E=3,E=5"], seeds=1)
    assert [p.column for p in cell.points] == ["FEMNIST, Dirichlet 0.01, E = 3", "FEMNIST, Dirichlet 0.01, E = 5"]
    two = build(
        TABLES["table3"], methods=["FedEve"], only=["natural,E=5", "dirichlet-0.01, E=3", "natural,E=5"], seeds=1
    )
    assert [p.column for p in two.points] == ["FEMNIST, natural, E = 5", "FEMNIST, Dirichlet 0.01, E = 3"]
    with pytest.raises(FedeveError, match="table1 has no column with all of these: got 'natural,cifar100'; leave some"):
        build(TABLES["table1"], only=["cifar100", "natural,cifar100"])
    for wrong in ({"methods": ["fedevil"]}, {"only": ["cifar10"]}, {"data": "mnist", "tiny": True}, {"data": "mnst"}):
        with pytest.raises(FedeveError):
            build(TABLES["table1"], **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_a_command_of_its_own(name: str, tmp_path: Path) -> None:
    ended = fedeve("paper", name, "--tiny", "--seeds", 1, "--dry-run", "--out", tmp_path)
    assert ended.returncode == 0 and ended.stdout.startswith(TABLES[name].title), ended.stderr
    assert name not in paper_figures.HELP


def test_the_title_says_what_is_not_as_in_the_paper() -> None:
    chosen = {"seeds": 1, "methods": ["FedEve"], "only": ["cifar100"]}
    plain = build(TABLES["table1"], **chosen).title  # type: ignore[arg-type]
    assignments = ["eval_every=50", "local.augment=flip-crop", "rounds=150"]
    changed = build(TABLES["table1"], **chosen, assignments=iter(assignments))  # type: ignore[arg-type]
    assert changed.title == f"{plain}, 150 rounds instead of 1500, local.augment=flip-crop"
    assert all(point.config["local"]["augment"] == "flip-crop" for point in changed.points)


def test_a_seed_can_be_chosen_by_itself(tmp_path: Path) -> None:
    def seeds(chosen: int | list[int]) -> list[int]:
        sweep = build(TABLES["table1"], seeds=chosen, methods=["FedEve"], only=["cifar100,dirichlet-1"])
        return [point.config["seed"] for point in sweep.points]

    assert seeds(2) == list(SEEDS[:2]) and seeds([SEEDS[1], 7, SEEDS[1]]) == [SEEDS[1], 7]
    ask = ("paper", "table2", "--tiny", "--methods", "FedEve", "--only", "lr=0.01", "--dry-run", "--out", tmp_path)
    assert "seeds    3; 7\n" in fedeve(*ask, "--seed", 3, "--seed", 7).stdout
    refused = fedeve(*ask, "--seeds", 2, "--seed", 225)
    assert refused.returncode == 2 and "got '--seeds 2 and --seed 225'; leave one of them out" in refused.stderr


@pytest.mark.parametrize("setting", ["model=lenet5", "model=cnn"])
def test_another_model_has_no_printed_number_beside_it(setting: str) -> None:
    sweep = build(TABLES["table1"], only=["cifar100"], assignments=[setting])
    assert sweep.title.endswith(setting) and not sweep.printed and not sweep.notes and not sweep.source
    same = build(TABLES["table1"], only=["cifar100"], assignments=["model.stem=imagenet", "local.lr=0.03"])
    assert same.printed == build(TABLES["table1"], only=["cifar100"]).printed and same.notes


def test_a_stand_in_is_called_what_it_is_and_has_no_printed_number_beside_it() -> None:
    sweep = build(TABLES["table1"], data="mnist", seeds=1, root="/data")
    columns = {point.column for point in sweep.points}
    assert "mnist in place of FEMNIST, Dirichlet 0.1" in columns and "CIFAR-100, Dirichlet 0.1" in columns
    assert {column for row in sweep.printed["accuracy"].values() for column in row} == {
        f"CIFAR-100, Dirichlet {alpha}" for alpha in ("1", "0.1", "0.01")
    }
    assert sweep.title.endswith("(mnist in place of FEMNIST)")
    data = {json.dumps(p.config["data"], sort_keys=True) for p in sweep.points if "FEMNIST, natural" in p.column}
    assert len(data) == 1 and '"num_clients": null' in data.pop()
    glyphs = build(TABLES["gains"], data="glyphs", seeds=1, root="/data")
    sizes = {
        tuple(point.config["data"][key] for key in ("num_writers", "num_images", "num_test")) for point in glyphs.points
    }
    assert sizes == {(3400, 671_585, 77_483)}  # FEMNIST's


def test_a_table_played_in_parts_keeps_its_rows_and_columns_in_order(tmp_path: Path) -> None:
    common = ("paper", "table1", "--tiny", "--seeds", "1", "--rounds", "1", "--no-calibration", "--out", tmp_path / "t")
    parts = [("FedEve", "dirichlet-0.1"), ("FedAvgM,FedAvg", "dirichlet-0.1"), ("FedAvgM", "dirichlet-1")]
    for methods, column in parts:
        assert fedeve(*common, "--methods", methods, "--only", f"cifar100,{column}").returncode == 0
    listed = [(run["column"][-13:], run["row"]) for run in read_manifest(tmp_path / "t")["runs"]]
    rows = [("Dirichlet 0.1", row) for row in ("FedAvg", "FedAvgM", "FedEve")]
    assert listed == [(", Dirichlet 1", "FedAvgM"), *rows]


def test_paper_list_says_what_there_is() -> None:
    text = fedeve("paper", "list").stdout
    for word in (
        "table1",
        "table2",
        "table3",
        "gain",
        "tuned",
        "ablation",
        "315 runs",
        "SCAFFOLD (released)",
        "47.26",
        "NGCG for NDCG",
    ):
        assert word in text
    listed = json.loads(fedeve("paper", "list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(TABLES)


@pytest.mark.parametrize(
    ("name", "runs", "metric"),
    [
        ("table1", 7 * 9, "accuracy"),
        ("table2", 2 * 9, "ndcg@10"),
        pytest.param("table3", 12 * 9, "accuracy", marks=pytest.mark.slow),
        pytest.param("gains", 12 * 2, "accuracy", marks=pytest.mark.slow),
    ],
)
def test_a_tiny_table_goes_the_whole_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, runs: int, metric: str
) -> None:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    ended = fedeve("paper", name, "--tiny", "--seeds", 1, "--out", tmp_path / "out")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    listed = read_manifest(tmp_path / "out")
    assert len(listed["runs"]) == runs and metric in listed["metrics"] and "tiny" in listed["title"]
    assert all("in place of" in run["column"] for run in listed["runs"])
    for run in listed["runs"]:
        record = Record.read(tmp_path / "out" / run["folder"] / "record.jsonl")
        assert 0 <= record.final(metric) <= 1
        assert "gain" in record.lines[0]["facts"]


def test_a_table_may_be_asked_for_in_parts_and_comes_together(tmp_path: Path) -> None:
    ask = ("paper", "table1", "--tiny", "--seeds", 1, "--only", "cifar100", "--out", tmp_path / "out")
    for method, finished in (("fedavg", 3), ("fedeve", 6), ("fedavg", 3)):
        ended = fedeve(*ask, "--methods", method, "--no-calibration")
        assert ended.returncode == 0 and f"{finished} finished" in ended.stdout
    listed = read_manifest(tmp_path / "out")
    assert {run["row"] for run in listed["runs"]} == {"FedAvg", "FedEve", "FedEve (released)"}
    assert len(listed["runs"]) == 9
    refused = fedeve("paper", "table2", "--tiny", "--out", tmp_path / "out")
    assert refused.returncode == 2 and "holds another sweep" in refused.stderr


def test_a_row_by_its_very_name_is_that_row_alone_and_a_method_is_all_its_variants() -> None:
    def rows(*methods: str) -> set[str]:
        return {point.row for point in build(TABLES["table2"], methods=methods, seeds=1).points}

    assert rows("FedEve") == {"FedEve"}
    assert rows("fedeve") == {"FedEve", "FedEve (released)"}
    assert rows("SCAFFOLD", "FedAvg") == {"SCAFFOLD", "FedAvg"}


@pytest.mark.parametrize(("data", "writers"), [("mnist", 539), ("glyphs", 3400)])
def test_a_stand_in_is_dealt_by_label_to_as_many_clients_as_it_has_writers(data: str, writers: int) -> None:
    for point in build(TABLES["table1"], data=data, only=["femnist"], methods=["fedavg"], seeds=1).points:
        table = point.config["data"]
        dealt = table.get("num_clients") or table.get("num_writers")
        assert table["partition"] == "natural" or dealt == writers, table
