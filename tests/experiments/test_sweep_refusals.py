"""What a sweep refuses it refuses at once, in one line, and leaves nothing behind; what is its own it takes over."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sweeping import SWEEP, fedeve, write

from fedeve.experiments.manifest import read_manifest

SHORT = ("--set", "rounds=5", "--no-calibration")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sweep that is finished, with the engine that is not the default; not to be written to."""
    folder = tmp_path_factory.mktemp("done")
    ended = fedeve("sweep", write(folder), "--out", folder / "out", "--engine", "reference", *SHORT)
    assert ended.returncode == 0, ended.stderr
    return folder / "out"


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "out"))


def assert_refused(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1, ended
    for word in words:
        assert word in ended.stderr


def times(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(out.glob("runs/*/*")) if path.name != ".lock"}


def test_a_run_that_cannot_be_made_fails_before_the_first_round_and_alone(tmp_path: Path) -> None:
    config = write(tmp_path, SWEEP + "[[points]]\ncohort = 21\n")
    ended = fedeve("sweep", config, "--out", tmp_path / "out", *SHORT)
    assert ended.returncode == 1 and "8 finished, 2 failed" in ended.stdout
    assert "the cohort is larger than the" in ended.stdout


def test_data_that_is_not_here_is_refused_once_and_before_anything_is_written(tmp_path: Path) -> None:
    missing = f"data = {{ name = 'mnist', root = '{tmp_path}' }}"
    config = write(tmp_path, SWEEP + f"[[points]]\n{missing}\n")
    ended = fedeve("sweep", config, "--out", tmp_path / "new" / "out", *SHORT)
    assert_refused(ended, "mnist is not here", "fedeve data get mnist", "take it out of the sweep")
    config.write_text(SWEEP + "[[points]]\ndata = { name = 'folder', path = '/nowhere', partition = 'natural' }\n")
    assert_refused(
        fedeve("sweep", config, "--out", tmp_path / "new" / "out", *SHORT), "folder of the data is not here", "/nowhere"
    )
    assert list(tmp_path.iterdir()) == [config]


def test_a_paper_table_names_all_data_that_is_not_here_and_how_to_leave_it_out(tmp_path: Path) -> None:
    paper = ("paper", "table1", "--root", tmp_path / "none", "--out", tmp_path / "out")
    ended = fedeve(*paper)
    assert_refused(ended, "femnist and cifar100 are not here", "'fedeve data get femnist' and 'fedeve data get cifar")
    assert "--only" not in ended.stderr
    assert_refused(fedeve(*paper, "--only", "cifar100"), "cifar100 is not here", "fedeve data get cifar100")
    ended = fedeve(*paper, "--data", "glyphs")  # which needs no files and stands in FEMNIST's columns
    assert_refused(ended, "cifar100 is not here", "or leave it out with --only femnist")
    assert not list(tmp_path.iterdir())


def test_a_damaged_list_of_runs_may_be_removed_and_the_same_command_goes_on(copy: Path) -> None:
    config, before = write(copy.parent), times(copy)
    (copy / "sweep.json").write_text("{}")
    assert_refused(fedeve("sweep", config, "--out", copy, *SHORT), "is damaged", "remove it and run the sweep again")
    (copy / "sweep.json").unlink()
    (copy / "report.html").write_text("a page")
    ended = fedeve("sweep", config, "--out", copy, *SHORT)
    assert ended.returncode == 0 and "8 finished" in ended.stdout
    assert times(copy) == before
    assert len(read_manifest(copy)["runs"]) == 8 and read_manifest(copy)["engine"] == "reference"


def test_without_its_list_a_folder_goes_on_with_the_engine_of_its_runs(copy: Path) -> None:
    (copy / "sweep.json").unlink()
    shutil.rmtree(next((copy / "runs").iterdir()))
    refused = fedeve("sweep", write(copy.parent), "--out", copy, "--engine", "lanes", *SHORT)
    assert_refused(refused, "begun with another engine", "--engine reference")
    assert fedeve("sweep", write(copy.parent), "--out", copy, *SHORT).returncode == 0


def test_runs_of_another_sweep_are_not_taken_over(copy: Path) -> None:
    (copy / "sweep.json").unlink()
    other = write(copy.parent, SWEEP.replace("seeds = [1, 2]", "seeds = [3, 4]"))
    assert_refused(fedeve("sweep", other, "--out", copy, *SHORT), "holds something else")
    assert not (copy / "sweep.json").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_folder_that_is_refused_is_left_as_it_was_dry_or_not(tmp_path: Path, copy: Path, dry: tuple[str]) -> None:
    config, home = write(tmp_path), tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("x")
    assert_refused(fedeve("sweep", config, "--out", home, *dry), "holds something else")
    assert [path.name for path in home.iterdir()] == ["thesis.tex"]
    assert_refused(fedeve("sweep", config, "--out", home / "thesis.tex", *dry), "cannot write")
    renamed = write(copy.parent, SWEEP.replace('"Small"', '"Large"'))
    assert_refused(fedeve("sweep", renamed, "--out", copy, *SHORT, *dry), "holds another sweep")
    asked = ("--engine", "lanes")
    assert_refused(fedeve("sweep", write(copy.parent), "--out", copy, *SHORT, *asked, *dry), "another engine")


def test_an_engine_that_nobody_knows_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    ended = fedeve("sweep", write(tmp_path), "--out", tmp_path / "out", "--engine", "foo")
    assert_refused(ended, "unknown engine", "auto, lanes, ray, reference")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("sweep",), ("paper", "table1")])
def test_help_lists_the_exit_codes(command: tuple[str, ...]) -> None:
    shown = " ".join(fedeve(*command, "--help").stdout.split())
    for words in ("0 all runs", "1 some failed", "2 the command was refused", "3 the budget", "130 it was stopped"):
        assert words in shown


def test_a_reader_who_goes_away_ends_a_sweep_and_no_run_is_blamed(tmp_path: Path) -> None:
    config, out = write(tmp_path), tmp_path / "out"
    command = [sys.executable, "-m", "fedeve", "sweep", str(config), "--out", str(out), "--no-calibration"]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # before the first event
    assert (process.stderr.read(), process.wait(timeout=120)) == ("", 141)
    process.stderr.close()
    assert list(out.glob("runs/*/record.jsonl")) and not list(out.glob("runs/*/failed.json"))
