"""Figures are made, whole, in all their files, and gone on with after a stop."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from commandline import in_process as fedeve
from fedeve import FedeveError, Record, cli, simulate
from fedeve.drift import figures, lab, paper_figures, style


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
    assert len(list((made / "runs").glob("fedavg-*/record.jsonl"))) == len(cells)


def test_boxes_hold_the_gains_of_the_records(made: Path) -> None:
    record = Record.read(made / "runs/fedeve-0.01-e2-s192/record.jsonl")
    mine = [float(r["gain"]) for r in rows(made, "gain") if r["partition"] == "alpha 0.01" and r["epochs"] == "2"]
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
    monkeypatch.setattr(lab, "simulate", None)
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=2, num_clients=20)
    figures.make(lab.Lab(small, made), ["fig2b"])
    assert {path: path.read_bytes() for path in made.glob("fig2b.*")} == before
    assert len(json.loads((made / "figures.json").read_text())) == len(figures.FIGURES)


def test_a_stopped_grid_goes_on_and_another_sizes_folder_is_refused(tmp_path: Path) -> None:
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=4, epochs=(1,), alphas=(0.1,))

    def stop(progress: Any) -> None:
        if progress.num_rounds == 2:
            raise KeyboardInterrupt

    class Stopping:
        def __enter__(self) -> Any:
            return stop

        def __exit__(self, *_: object) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        lab.play_all(
            lab.Lab(small, tmp_path, watching=lambda label: Stopping()), lab.gain_cells(lab.Lab(small, tmp_path))
        )
    place = lab.Lab(small, tmp_path)
    [(_, resumed)] = lab.play_all(place, lab.gain_cells(place))
    [(_, whole)] = lab.play_all(fresh := lab.Lab(small, tmp_path / "again"), lab.gain_cells(fresh))
    assert resumed.lines == whole.lines
    other = lab.Lab(dataclasses.replace(small, lr=0.7), tmp_path)
    with pytest.raises(FedeveError, match="another size or version"):
        lab.play_all(other, lab.gain_cells(other))


def test_runs_of_all_conditions_are_played_together_with_the_numbers_they_have_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=3, num_clients=20, eval_every=1)
    told: list[str] = []
    place = lab.Lab(small, tmp_path / "together", tell=told.append)
    cells, played = lab.condition_cells(place), []

    def simulating(runs: Any, **options: Any) -> Any:
        played.append(len(runs))
        return simulate(runs, **options)

    monkeypatch.setattr(lab, "simulate", simulating)
    monkeypatch.setattr(lab.Clock, "__init__", functools.partialmethod(lab.Clock.__init__, every=0.0))
    together = lab.play_all(place, cells[:-1])
    assert played == [13] and len(cells) == 14
    assert any(line.startswith("rounds of 13 runs  39/39") for line in told)
    for cell, record in together:
        assert record.lines == simulate(cell.build(place.data(**cell.data))).lines
    played.clear()
    assert lab.play_all(place, cells)[-1][1].lines and played == [1]  # the others lie there


def test_a_large_grid_is_played_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=2, num_clients=10, alphas=(1.0,))
    played: list[int] = []
    monkeypatch.setattr(lab, "_TOGETHER", 5)
    monkeypatch.setattr(lab, "simulate", lambda runs, **rest: played.append(len(runs)) or simulate(runs, **rest))
    place = lab.Lab(small, tmp_path)
    found = lab.play_all(place, cells := lab.condition_cells(place))
    assert played == [5, 3] and [cell for cell, _ in found] == cells


def test_a_precision_that_only_a_gpu_has_is_refused_without_one(tmp_path: Path) -> None:
    ended = fedeve("paper", "gain", "--size", "tiny", "--device", "cpu", "--precision", "tf32", "--out", tmp_path)
    assert ended.returncode == 2 and "only a GPU has this precision: got 'tf32'" in ended.stderr


def test_several_runs_gone_on_with_count_what_is_left_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(lab.SIZES["tiny"], rounds=4, num_clients=20, epochs=(1, 2), alphas=(0.1,))
    monkeypatch.setattr(lab.Clock, "__init__", functools.partialmethod(lab.Clock.__init__, every=0.0))
    told: list[str] = []

    def stop(line: str) -> None:
        if "  5/8" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.play_all(stopped := lab.Lab(small, tmp_path, tell=stop), lab.gain_cells(stopped))
    lab.play_all(place := lab.Lab(small, tmp_path, tell=told.append), lab.gain_cells(place))
    done, total = told[-1].split("  ")[1].split("/")
    assert done == total and int(total) < 8


@pytest.mark.parametrize("command", [("paper", "gain"), ("drift", "figures", "--only", "gain")], ids=" ".join)
def test_seeds_are_as_many_of_the_papers_as_are_asked_for(command: tuple[str, ...], tmp_path: Path) -> None:
    ended = fedeve(*command, "--size", "tiny", "--alpha", 1, "--epochs", 1, "--seeds", 2, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name.split("-s")[-1] for path in (tmp_path / "runs").iterdir()) == ["192", "225"]


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
