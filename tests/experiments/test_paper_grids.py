"""Beyond the paper: small grids of every method, and FedEve taken apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from sweeping import fedeve

from fedeve import FedeveError, Layout, Record, models
from fedeve.experiments import config
from fedeve.experiments.paper_grids import layer_sizes
from fedeve.experiments.paper_tables import TABLES, build
from fedeve.experiments.sweep import Sweep
from fedeve.experiments.sweep_folder import Status, SweepFolder, read_manifest
from fedeve.experiments.sweep_view import Board
from fedeve.report import results, tables

IMAGES = ["CIFAR-100, Dirichlet 1", "CIFAR-100, Dirichlet 0.1", "CIFAR-100, Dirichlet 0.01"]
FEMNIST = ["FEMNIST, natural", "FEMNIST, Dirichlet 1", "FEMNIST, Dirichlet 0.1", "FEMNIST, Dirichlet 0.01"]


def rows(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(point.row for point in sweep.points))


def columns(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(point.column for point in sweep.points))


@pytest.mark.parametrize(("name", "runs"), [("tuned", 25 * 9), ("ablation", 19 * 8)])
def test_every_row_is_in_every_column_once(name: str, runs: int) -> None:
    sweep = build(TABLES[name], seeds=1)
    assert len(sweep.points) == runs == len({point.name for point in sweep.points})
    assert set(Counter((point.row, point.column) for point in sweep.points).values()) == {1}
    assert not sweep.printed and "accuracy" in sweep.metrics and "ndcg@10" in sweep.metrics


def test_grids_have_the_values_their_rows_say() -> None:
    sweep = build(TABLES["tuned"])
    assert {point.seed for point in sweep.points} == {192}
    movies = [f"MovieLens-1M, lr {lr}" for lr in ("0.01", "0.001")]
    assert columns(sweep) == [*IMAGES, *movies, *FEMNIST]
    for point in sweep.points:
        method, (_, *said) = point.config["method"], point.row.split(", ")
        assert said and all(f"{method[word.split()[0]]:g}" == word.split()[1] for word in said)
        if "tau" in method:
            assert method["tau"] == (3e-4 if point.column in FEMNIST else 1e-4)
    assert Counter(row.split(",")[0] for row in rows(sweep)) == {
        "FedAvg": 3, "FedAvgM": 4, "FedProx": 4, "FedAdam": 5, "FedEve": 4, "FedEveAdam": 5,
    }  # fmt: skip
    one = build(TABLES["tuned"], methods=["fedadam"], only=["movielens1m,lr=0.001"])
    assert rows(one) == [f"FedAdam, server_lr {lr}" for lr in ("0.0003", "0.001", "0.003", "0.01", "0.03")]
    assert columns(one) == ["MovieLens-1M, lr 0.001"]


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    sweep = build(TABLES["ablation"], seeds=1, only=["femnist"], data="mnist")
    assert columns(sweep) == [f"mnist in place of {column}" for column in FEMNIST]
    assert sweep.title == "FedEve taken apart (mnist in place of FEMNIST)"
    first = {point.row: point.config for point in sweep.points if point.column.endswith("natural")}
    assert len(first) == 19
    usual = {"cohort": 10, "epochs": 1}
    for row, found in first.items():
        cohort = int(row.split("cohort ")[1]) if "cohort" in row else usual["cohort"]
        epochs = int(row.split(", E ")[1]) if ", E " in row else usual["epochs"]
        assert (found["cohort"], found["local"]["epochs"]) == (cohort, epochs), row
    parts = {"server_lr": 1.0, "drift": "paper", "observation_noise": 0.0}
    assert first["FedEve"]["method"] == {"name": "fedeve", **parts} == first["FedEve, cohort 50"]["method"]
    whole = {"name": "fedeveparts", **parts, "look_ahead": True, "gain": None, "layers": ""}
    assert first["FedEve, no look-ahead"]["method"] == {**whole, "look_ahead": False}
    assert first["FedEve, gain 0.3"]["method"] == {**whole, "gain": 0.3}
    assert first["FedEve (released)"]["method"]["drift"] == "released"
    assert first["FedEve, server_lr 1.5"]["method"]["server_lr"] == 1.5
    sizes = first["FedEve, gain per layer"]["method"]["layers"].split(",")
    assert sum(map(int, sizes)) == Layout.of(models.create("lenet5", (28, 28), 10)).num_params and len(sizes) == 5


@pytest.mark.parametrize(("only", "params"), [("cifar100", 11_220_132), ("movielens1m", 201_668), ("femnist", None)])
def test_layers_add_up_to_each_model_and_no_data_is_read(
    only: str, params: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDEVE_DATA", str(tmp_path))  # nothing there
    sweep = build(TABLES["ablation"], seeds=1, only=[only], methods=["FedEve, gain per layer"])
    totals = {sum(map(int, point.config["method"]["layers"].split(","))) for point in sweep.points}
    expected = params or Layout.of(models.create("lenet5", (28, 28), 62)).num_params
    assert totals == {expected}


def test_layers_known_beforehand_are_those_of_the_data() -> None:
    table = {"model": "lenet5", "data": {"name": "glyphs", "num_writers": 5, "num_images": 30, "num_test": 5}}
    plan = config.check(table)
    assert layer_sizes(plan) == layer_sizes(plan, load=True)


def test_one_row_is_picked_by_its_name_though_it_has_a_comma(tmp_path: Path) -> None:
    ask = ("paper", "ablation", "--tiny", "--seeds", 1, "--only", "cifar100", "--out", tmp_path, "--dry-run")
    assert "3 runs" in fedeve(*ask, "--methods", "FedEve, gain 0.3").stdout
    assert "6 runs" in fedeve(*ask, "--methods", "FedEve, gain 0.3", "--methods", "fedeve, gain per layer").stdout
    with pytest.raises(FedeveError):
        build(TABLES["ablation"], methods=["gain 0.3"])


def test_a_tiny_ablation_goes_the_whole_way_and_its_tables_keep_kinds_of_data_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    ended = fedeve(
        "paper", "ablation", "--tiny", "--seeds", 1, "--only", "dirichlet-0.1,lr=0.01", "--out", out, "--no-calibration"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    listed = read_manifest(out)
    assert len(listed["runs"]) == 3 * 19 and "tiny" in listed["title"]
    for run in listed["runs"]:
        facts = Record.read(out / run["folder"] / "record.jsonl").lines[-1]["facts"]
        if "gain 0." in run["row"]:
            assert set(facts["gain"]) == {float(run["row"].split()[-1])}
    found = {table.title: table for table in tables.tables(results.read([out]).sections[0])}
    assert [heading.column for heading in found["accuracy, %"].headings] == [
        "glyphs in place of FEMNIST, Dirichlet 0.1", "digits in place of CIFAR-100, Dirichlet 0.1",
    ]  # fmt: skip
    assert len(found["AUC"].headings) == 1 and found["AUC"].chosen == "FedEve"


@pytest.mark.slow
def test_tiny_grids_go_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    ended = fedeve("paper", "tuned", "--tiny", "--out", tmp_path / "out", "--no-calibration")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(read_manifest(tmp_path / "out")["runs"]) == 25 * 9


def test_the_list_says_how_much_there_is_to_run() -> None:
    listed = {entry["name"]: entry for entry in json.loads(fedeve("paper", "list", "--json").stdout)}
    assert listed["tuned"]["runs"] == 225 and listed["ablation"]["runs"] == 3 * 152


def test_the_view_shows_of_every_column_the_first_metric_it_has(tmp_path: Path) -> None:
    sweep = build(TABLES["tuned"], methods=["FedAvg, server_lr 1"], only=["cifar100", "movielens1m"])
    board = Board(SweepFolder(tmp_path, sweep), [Status("waiting") for _ in sweep.points], {})
    for point in sweep.points:
        line = {"loss": 1.0, "auc": 0.75} if "Movie" in point.column else {"accuracy": 0.5, "loss": 1.0}
        board.apply({"run": point.name, "event": "round", "round": 10, "metrics": line})
    row = "FedAvg, server_lr 1"
    assert board.value(row, IMAGES[0]) == "50.00 %" and board.value(row, "MovieLens-1M, lr 0.01") == "0.7500"
    assert board.metric == "accuracy or auc"


def test_a_sweep_that_was_not_calibrated_says_how_far_it_is_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("fedeve.experiments.sweep_view.time.monotonic", lambda: now[0])
    sweep = build(TABLES["tuned"], methods=["FedAvg, server_lr 1"], only=["cifar100"], seeds=1)
    first, *others = sweep.points
    assert others
    others_done = [Status("finished", num_rounds=other.rounds) for other in others]
    statuses = [Status("begun", num_rounds=first.rounds - 30), *others_done]
    board = Board(SweepFolder(tmp_path, sweep), statuses, {})
    assert board.time_left is None and "left" not in board.words()  # nothing was played yet
    for number in range(10):
        now[0] += 6.0
        board.apply({"run": first.name, "event": "round", "round": first.rounds - 29 + number, "metrics": {}})
    played = sum(point.rounds for point in sweep.points) - 20
    assert board.time_left == pytest.approx(20 * 6.0)
    assert f"{played:,} of {played + 20:,} rounds" in board.words() and board.words().endswith("2.0 min left")
