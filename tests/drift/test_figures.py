"""Figures are made, whole, in all their files, and gone on with after a stop."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from commandline import in_process as fedeve
from fedeve import FedeveError, cli, simulate
from fedeve.drift import figures, grids, lab, paper_figures, style
from fedeve.drift.conditions import CONDITIONS
from fedeve.experiments import sweep_play
from fedeve.report import results


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All figures at the size that takes seconds."""
    out = tmp_path_factory.mktemp("figures")
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=2, num_clients=20, trace_rounds=20, trace_clients=10)
    small = dataclasses.replace(small, epochs=(1, 2), num_cohorts=50, trace_params=5)
    figures.make(lab.Lab(small, out))
    return out


def rows(made: Path, name: str) -> list[dict[str, str]]:
    with (made / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_figure_has_its_three_files_and_its_reading(made: Path) -> None:
    entries = json.loads((made / "figures.json").read_text())
    assert {Path(entry["svg"]).stem for entry in entries} == set(figures.FIGURES)
    for entry in entries:
        assert set(entry) == {"title", "svg", "png", "csv", "reading", "caption"}
        assert entry["reading"].count(". ") >= 1 and entry["reading"].endswith(".") and "nan" not in entry["reading"]
        assert ElementTree.parse(made / entry["svg"]).getroot().tag.endswith("svg")
        assert (made / entry["png"]).read_bytes().startswith(b"\x89PNG")
        assert len(rows(made, Path(entry["csv"]).stem)) > 5


def test_the_grid_of_conditions_is_whole_and_iid_is_played_once(made: Path) -> None:
    found = rows(made, "fig2b")
    cells = {(row["condition"], row["alpha"], row["epochs"]) for row in found}
    assert len(cells) == 2 * (1 + 3 * 2) and ("iid", "", "1") in cells
    assert len(list((made / "fig2b" / "runs").glob("*/record.jsonl"))) == len(cells)


def test_boxes_hold_the_gains_of_the_records(made: Path) -> None:
    (section,) = results.read([made / "gain"]).sections
    (record,) = (e.record for e in section.entries if (e.row, e.column) == ("FedEve, alpha 0.01", "E 2"))
    mine = [float(r["gain"]) for r in rows(made, "gain") if r["partition"] == "alpha 0.01" and r["epochs"] == "2"]
    assert record is not None
    gains = record.facts("gain")
    assert mine == pytest.approx(gains[np.isfinite(gains)], rel=1e-9)


def test_dots_are_the_cohorts_labels(made: Path) -> None:
    found = [row for row in rows(made, "fig2a") if row["partition"] == "alpha 1" and row["round"] == "1"]
    place = lab.Lab(dataclasses.replace(lab.SIZES["tiny"], num_clients=20), made)
    data = place.data(partition="dirichlet", alpha=1.0)
    cohort = place.run(data, "fedavg").cohort_of(0).tolist()
    assert {int(row["client"]) for row in found} <= set(cohort)
    assert sum(int(row["examples"]) for row in found) == sum(len(data.rows(k)) for k in cohort)


def test_the_laws_points_are_at_the_closed_form(made: Path) -> None:
    for row in rows(made, "law"):
        gap = abs(float(row["measured"]) - float(row["closed_form"]))
        assert gap <= 5 * float(row["standard_error"]) + 1e-12


def test_made_again_from_what_is_there_nothing_is_played(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in made.glob("fig2b.*")}
    assert before
    monkeypatch.setattr(sweep_play, "simulate", None)
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=2, num_clients=20)
    figures.make(lab.Lab(small, made), ["fig2b"])
    assert {path: path.read_bytes() for path in made.glob("fig2b.*")} == before
    assert len(json.loads((made / "figures.json").read_text())) == len(figures.FIGURES)


def test_runs_of_a_figure_have_the_numbers_they_have_alone(tmp_path: Path) -> None:
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=3, num_clients=20, eval_every=1)
    place = lab.Lab(small, tmp_path)
    grid = grids.conditions(place)
    for cell, record in grids.played(place, grid):
        keys, condition = cell.keys, CONDITIONS[cell.keys["condition"]]
        alpha = keys["alpha"] or small.alphas[0]
        options = condition.run_options(alpha) | {"epochs": keys["epochs"], "seed": keys["seed"]}
        alone = place.run(place.data(**condition.data_options(alpha)), "fedavg", **options)
        assert record.lines == simulate(alone).lines
    assert len(grid.cells) == 14


TINY = ("--size", "tiny", "--alpha", 0.1, "--epochs", 1, "--rounds", 4)


def test_a_figure_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(progress: Any) -> None:
        if progress.num_rounds == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep_play, "simulate", lambda runs, **rest: simulate(runs, **(rest | {"watch": stop})))
        stopped = fedeve("paper", "gain", *TINY, "--out", tmp_path / "a")
    assert stopped.returncode == 130 and not (tmp_path / "a" / "gain.csv").exists()
    for out in ("a", "b"):
        assert fedeve("paper", "gain", *TINY, "--out", tmp_path / out).returncode == 0
    assert (tmp_path / "a" / "gain.csv").read_bytes() == (tmp_path / "b" / "gain.csv").read_bytes()


def test_a_folder_may_hold_runs_of_other_sizes_and_a_figure_shows_its_own(tmp_path: Path) -> None:
    for changes in ((), ("--rounds", 2), ("--epochs", 2)):
        for out in (tmp_path, fresh := tmp_path / "-".join(map(str, changes or ("first",)))):
            assert fedeve("paper", "gain", *TINY, *changes, "--out", out).returncode == 0
        assert (tmp_path / "gain.csv").read_bytes() == (fresh / "gain.csv").read_bytes()


def test_a_figures_runs_are_played_by_several_processes_if_wanted(tmp_path: Path) -> None:
    only = ("--only", "law", "--only", "fig2b", "--dry-run")
    shown = fedeve("drift", "figures", *TINY, *only, "--out", tmp_path / "two")
    assert shown.returncode == 0 and "law: no runs" in shown.stdout and "4 waiting" in shown.stdout
    assert not (tmp_path / "two").exists()
    for out, number in (("one", "1"), ("two", "2")):
        ended = fedeve("paper", "fig2b", *TINY, "--processes", number, "--out", tmp_path / out)
        assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "one" / "fig2b.csv").read_bytes() == (tmp_path / "two" / "fig2b.csv").read_bytes()
    assert "2 processes" in ended.stdout


def test_a_packed_grid_gives_the_figure(tmp_path: Path) -> None:
    for name in grids.GRIDS:
        assert fedeve("paper", name, *TINY, "--out", tmp_path / "made").returncode == 0
        assert fedeve("pack", tmp_path / "made" / name, "--out", tmp_path / "kept").returncode == 0
        ended = fedeve("paper", name, *TINY, "--out", tmp_path / "kept")
        assert ended.returncode == 0 and "All runs that have not failed are finished" in ended.stdout
        mine, packed = (rows(tmp_path / out, name) for out in ("made", "kept"))
        assert [row["round"] for row in packed] == [row["round"] for row in mine if int(row["round"]) % 2 == 0]
    mine, packed = ([float(row["accuracy"]) for row in rows(tmp_path / out, "fig2b")] for out in ("made", "kept"))
    assert packed == pytest.approx(mine, rel=1e-4)


def test_a_precision_that_only_a_gpu_has_is_refused_without_one(tmp_path: Path) -> None:
    ended = fedeve("paper", "gain", "--size", "tiny", "--device", "cpu", "--precision", "tf32", "--out", tmp_path)
    assert ended.returncode == 2 and "only a GPU has this precision: got 'tf32'" in ended.stderr


def test_figures_without_runs_have_no_options_of_runs(tmp_path: Path) -> None:
    assert set(paper_figures.FROM_RUNS) == set(grids.GRIDS)
    ended = fedeve("paper", "fig2a", "--size", "tiny", "--processes", 2, "--out", tmp_path)
    assert ended.returncode == 2 and "--processes" in ended.stderr


@pytest.mark.parametrize("command", [("paper", "gain"), ("drift", "figures", "--only", "gain")], ids=" ".join)
def test_seeds_are_as_many_of_the_papers_as_are_asked_for(command: tuple[str, ...], tmp_path: Path) -> None:
    ended = fedeve(*command, "--size", "tiny", "--alpha", 1, "--epochs", 1, "--seeds", 2, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name.split("-")[2] for path in (tmp_path / "gain" / "runs").iterdir()) == ["s192", "s225"]


def test_the_federation_in_which_gradients_are_traced_can_be_chosen(tmp_path: Path) -> None:
    options = ("--size", "tiny", "--alpha", 1, "--rounds", 20, "--trace-clients", 7, "--trace-examples", 3)
    ended = fedeve("paper", "gaussian", *options, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    (entry,) = json.loads((tmp_path / "figures.json").read_text())
    assert "20 rounds in a federation of up to 7 clients with up to 3 examples each" in entry["caption"]


def test_sizes_and_figures_have_names_and_mistakes_get_advice(tmp_path: Path) -> None:
    assert set(paper_figures.HELP) == set(figures.FIGURES)
    assert lab.size("tiny", rounds=3, data=None).rounds == 3
    assert lab.size("quick", data="glyphs").natural and not lab.size("quick", data="digits").natural
    with pytest.raises(FedeveError, match=r"unknown size.*did you mean 'tiny'"):
        lab.size("tinny")
    with pytest.raises(FedeveError, match="unknown data set"):
        lab.size("tiny", data="nothing")
    with pytest.raises(FedeveError, match="unknown figure"):
        figures.make(lab.Lab(lab.SIZES["tiny"], tmp_path), ["fig9"])
    (tmp_path / "figures.json").write_text("{")
    with pytest.raises(FedeveError, match="is damaged"):
        style.listed(tmp_path)


def test_progress_is_told_now_and_then() -> None:
    told: list[str] = []
    clock = lab.Clock("work", 4, told.append, every=0.0)
    for _ in range(4):
        clock()
    assert told[0].startswith("work  1/4") and told[-1].startswith("work  4/4  0 s left")
    silent = lab.Clock("work", 4, told.append, every=1e9)
    silent()
    assert len(told) == 4


def test_paper_and_drift_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["fedeve", "paper", "bound", "--out", str(tmp_path), "--size", "tiny"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and "error term" in capsys.readouterr().out
    assert (tmp_path / "bound.svg").exists()
    monkeypatch.setattr("sys.argv", ["fedeve", "drift", "figures", "--out", str(tmp_path), "--only", "fig9"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "unknown figure" in capsys.readouterr().err
