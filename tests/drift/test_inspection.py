"""`fedeve drift inspect` and `measure` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedeve import FedAvg, FedeveError, LocalWork, Run, cli, datasets, simulate
from fedeve.drift import inspection
from fedeve.drift.labels import counts


@pytest.fixture
def fedeve(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the command line in this process; returns its exit code and output."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fedeve", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        done = capsys.readouterr()
        return int(end.value.code or 0), done.out, done.err

    return call


def test_inspect_shows_a_data_set_with_its_options(fedeve: Any, tmp_path: Path) -> None:
    options = ["--set", "partition=dirichlet", "--set", "alpha=0.1", "--set", "num_clients=30"]
    code, out, _ = fedeve("drift", "inspect", "digits", *options, "--cohort", 5, "--out", tmp_path)
    assert code == 0 and "30 clients" in out and "would halve D_S" in out
    assert (tmp_path / "inspect.svg").exists() and (tmp_path / "figures.json").exists()
    code, out, _ = fedeve("drift", "inspect", "digits", *options, "--cohort", 5, "--json")
    picture = json.loads(out)
    assert picture["num_clients"] == 30 and picture["cohort"] == 5 and picture["heterogeneity"] > 0


def test_inspect_reads_a_table_of_clients_and_labels(fedeve: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("client,label,count\nann,cat,3\nbob,dog,2\nann,dog,1\neve,dog,0\n")
    data = inspection.read_csv(path)
    assert counts(data).tolist() == [[3, 1], [0, 2], [0, 0]] and data.num_clients == 3
    code, out, _ = fedeve("drift", "inspect", path, "--cohort", 1)
    assert code == 0 and "3 clients, 1 of them without data; 6 examples of 2 classes" in out
    path.write_text("client,label\na,1\na,2\n")
    assert inspection.read_csv(path).sizes.tolist() == [2]


def test_inspect_reads_folders_configurations_presets_and_runs(fedeve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name in ("a", "b"):
        np.savez(folder / f"{name}.npz", x=np.zeros((4, 2), np.float32), y=np.array([0, 1, 1, 2]))
    assert inspection.federation_of(str(folder)).num_clients == 2
    config = tmp_path / "run.toml"
    config.write_text('model = "linear"\nrounds = 2\n[data]\nname = "digits"\nnum_clients = 12\npartition = "iid"\n')
    assert inspection.federation_of(str(config)).num_clients == 12
    assert inspection.federation_of(str(config), changes=["data.num_clients=9"]).num_clients == 9
    assert inspection.table_of("paper/femnist-natural")["data"]["name"] == "femnist"
    code, out, _ = fedeve("drift", "inspect", folder, "--cohort", 2)
    assert (code == 0 and "Everybody takes part" in out) or "same label mix" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("who,label\na,1\n", "lacks client"),
        ("client,label\n", "holds no examples"),
        ("client,label,count\na,1,many\n", "line 2 of .* is not a number of examples"),
        ("client,label,count\na,1,99999999999999999999\n", "line 2 of .* is not a number of examples"),
        ("client,label,count\na,1,²\n", "line 2 of .* is not a number of examples"),
        ("client,label,count\na,1,60000000\nb,1,60000000\n", "more examples than can be looked at: got 120,000,000"),
        ("client,label\na,1\nb\n", "line 3 of .* has no label"),
        ("client,label\na,1\nb, \n", "line 3 of .* has no label"),
        ("client,label\n,1\n", "line 2 of .* has no client"),
        ("client,label\nDoe, Jane,1\n", "line 2 of .* has more cells than line 1: got 1"),
    ],
)
def test_a_bad_table_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FedeveError, match=words):
        inspection.read_csv(path)
    with pytest.raises(FedeveError, match="cannot read this file"):
        inspection.read_csv(tmp_path / "none.csv")


def test_a_table_of_a_spreadsheet_is_read_and_one_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("client,label\nMüller,1\nb,2\n", encoding="utf-8-sig")
    assert inspection.read_csv(path).num_clients == 2
    path.write_text("client,label\nMüller,1\n", encoding="latin-1")
    with pytest.raises(FedeveError, match="is not text in UTF-8: got the byte 0xfc; save it as UTF-8"):
        inspection.read_csv(path)


def test_fewer_clients_than_the_usual_cohort_are_all_of_it_unless_one_is_asked_for(fedeve: Any, tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("client,label\na,1\nb,2\nc,1\n")
    code, out, _ = fedeve("drift", "inspect", path, "--json")
    assert code == 0 and json.loads(out)["cohort"] == 3
    code, _, err = fedeve("drift", "inspect", path, "--cohort", 10)
    assert code == 2 and "such a cohort cannot be drawn" in err


def test_labels_that_are_no_class_numbers_are_refused_by_name_not_by_lack_of_memory(
    fedeve: Any, tmp_path: Path
) -> None:
    np.savez(tmp_path / "ann.npz", x=np.zeros((3, 2), np.float32), y=np.array([0, 10**9, 2 * 10**9]))
    code, _, err = fedeve("drift", "inspect", tmp_path)
    assert code == 2 and "y of ann.npz must count its classes from 0: got the label 2000000000" in err


def test_json_has_no_nan(fedeve: Any) -> None:
    changes = ["--set", "partition=dirichlet", "--set", "num_clients=12", "--set", "model=linear"]
    asked = ["--cohort", 3, "--cohorts", 1, "--tolerance", 0.3, "--json"]
    code, out, _ = fedeve("drift", "measure", "digits", *changes, *asked)
    assert code == 0 and "NaN" not in out
    assert json.loads(out.splitlines()[-1])["client_drift"]["error"] is None  # one cohort has no spread


def test_what_cannot_be_inspected_is_refused_in_one_line(fedeve: Any, tmp_path: Path) -> None:
    for arguments, words in {
        ("digitss",): "did you mean 'digits'",
        ("digits", "--cohort", 5000): "such a cohort cannot be drawn",
        ("digits", "--set", "alpha=0"): "alpha must be above 0",
        ("digits", "--set", "colour=red"): "unknown option",
        (tmp_path / "none.toml",): "cannot read the configuration",
    }.items():
        code, _, err = fedeve("drift", "inspect", *arguments)
        assert code == 2 and words in err and err.count("\n") == 1


def test_measure_gives_both_drifts_and_stands_where_a_run_stands(fedeve: Any, tmp_path: Path) -> None:
    data = datasets.load("digits", partition="dirichlet", alpha=0.1, num_clients=12)
    run = Run(method=FedAvg(), data=data, model="linear", rounds=2, cohort=3, local=LocalWork(lr=0.1), seed=3)
    simulate(run, out=tmp_path / "run")
    options = ["--cohort", 3, "--cohorts", 2, "--tolerance", 0.3, "--json"]
    code, out, _ = fedeve("drift", "measure", tmp_path / "run", *options)
    trained = json.loads(out.splitlines()[-1])
    assert code == 0 and trained["rounds"] == 2 and trained["num_params"] == 650
    assert trained["period_drift"]["how"] == "closed form" and trained["client_drift"]["num_cohorts"] == 2
    changes = ["--set", "partition=dirichlet", "--set", "num_clients=12", "--set", "model=linear", "--set", "seed=3"]
    code, out, _ = fedeve("drift", "measure", "digits", *changes, "--cohort", 3, "--cohorts", 0)
    assert code == 0 and "untrained" in out and "period drift" in out and "client drift" not in out
    assert "in every cohort: f counts by examples" in out
    code, out, _ = fedeve("drift", "measure", "digits", *changes, "--cohort", 3, "--cohorts", 0, "--average", "plain")
    assert code == 0 and "in every cohort" not in out
    (tmp_path / "mine.csv").write_text("client,label\na,1\n")
    code, _, err = fedeve("drift", "measure", tmp_path / "mine.csv")
    assert code == 2 and "labels alone" in err and "drift inspect" in err
    code, _, err = fedeve("drift", "measure", tmp_path / "run", "--cohort", 99)
    assert code == 2 and "such a cohort cannot be drawn" in err
