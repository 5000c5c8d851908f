"""`fedeve report` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fedeve import cli


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The entry point without the seconds that a new interpreter takes."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["fedeve", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return subprocess.CompletedProcess([], int(end.value.code or 0), output.getvalue(), errors.getvalue())


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done
    assert all(word in done.stderr for word in words), done.stderr


def test_a_page_is_written_and_its_size_said(made: Path, tmp_path: Path) -> None:
    done = report(made, "--out", tmp_path / "new" / "report.html", "--title", "Mine & yours")
    assert done.returncode == 0 and "20 runs" in done.stdout and done.stderr == ""
    text = (tmp_path / "new" / "report.html").read_text()
    assert "<h1>Mine &amp; yours</h1>" in text
    assert f"fedeve report {made} --title &#x27;Mine &amp; yours&#x27;</footer>" in text


def test_a_page_of_many_sections_is_not_called_by_all_of_them(made: Path, tmp_path: Path) -> None:
    plain = json.loads((made / "sweep.json").read_text())
    plain |= {"runs": plain["runs"][-1:], "printed": {}}
    for count, title in ((3, "Sweep 0, Sweep 1, Sweep 2"), (4, "Sweep 0, and 3 more")):
        for n in range(count):
            folder = tmp_path / "many" / str(n)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "sweep.json").write_text(json.dumps(plain | {"title": f"Sweep {n}"}))
        assert report(tmp_path / "many", "--out", tmp_path / "many.html").returncode == 0
        assert f"<h1>{title}</h1>" in (tmp_path / "many.html").read_text()


@pytest.mark.parametrize(("kind", "begins"), [("csv", "section,metric,row"), ("md", "**A small sweep"), ("tex", "% ")])
def test_the_ending_of_the_file_chooses_the_export(made: Path, tmp_path: Path, kind: str, begins: str) -> None:
    assert report(made, "--out", tmp_path / f"table.{kind}").returncode == 0
    assert (tmp_path / f"table.{kind}").read_text().startswith(begins)


def test_a_format_may_be_named_and_last_overrides_the_sweep(made: Path, tmp_path: Path) -> None:
    finals = []
    for last in (2, 12):
        assert report(made, "--format", "csv", "--out", tmp_path / "t.txt", "--last", last).returncode == 0
        lines = csv.DictReader(io.StringIO((tmp_path / "t.txt").read_text()))
        finals.append([line["mean"] for line in lines])
    assert finals[0] != finals[1]


def test_json_is_for_machines(made: Path, tmp_path: Path) -> None:
    done = report(made, "--out", tmp_path / "r.html", "--json")
    said = {"done": True, "out": str(tmp_path / "r.html"), "runs": 20, "problems": []}
    assert json.loads(done.stdout) == said


def test_a_damaged_record_is_named_the_page_still_comes_and_the_exit_code_is_one(sweep: Path, tmp_path: Path) -> None:
    path = sweep / "runs/fedeve-0.3-192/record.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{broken", *lines[3:]]) + "\n")
    before = path.read_bytes()
    done = report(sweep, "--out", tmp_path / "r.html")
    assert done.returncode == 1 and f"line 3 of {path} is damaged" in done.stderr
    text = (tmp_path / "r.html").read_text()
    assert "Not everything could be read" in text and "line 3 of" in text
    assert path.read_bytes() == before


def test_mistakes_are_refused_in_one_line(made: Path, tmp_path: Path) -> None:
    assert_refused(report(tmp_path / "nowhere"), "no such folder", "nowhere")
    assert_refused(report(made, "--out", tmp_path / "report.pdf"), "cannot tell the format", ".html")
    assert_refused(report(made, "--format", "pdf"), "unknown format", "html")
    (tmp_path / "file").write_text("")
    assert_refused(report(made, "--out", tmp_path / "file" / "r.html"), "cannot write")


@pytest.mark.parametrize("kind", ["html", "csv", None])
def test_a_page_is_never_written_over_what_it_is_made_of(sweep: Path, kind: str | None) -> None:
    run = sweep / "runs/fedeve-0.3-192"
    chosen = ["--format", kind] if kind else []
    for path in (sweep / "sweep.json", run / "record.jsonl", run / "record.jsonl.gz", run / "timing.json"):
        before = path.read_bytes() if path.exists() else None
        refused = report(sweep, "--out", path, *chosen)
        assert_refused(refused, "results would be lost" if kind else "")
        assert (path.read_bytes() if path.exists() else None) == before


def test_a_refused_page_leaves_no_folder(tmp_path: Path) -> None:
    assert_refused(report(tmp_path, "--out", tmp_path / "new" / "r.html"), "nothing to show")
    assert not list(tmp_path.iterdir())


def test_a_page_that_is_there_is_a_success_whoever_listens(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedeve", "report", str(made), "--out", str(tmp_path / "r.csv")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
    process.stderr.close()
    assert (tmp_path / "r.csv").exists()


def test_without_plotly_the_page_says_what_to_install_and_exports_work(made: Path, tmp_path: Path) -> None:
    # A new process, since plotly may be imported here already.
    block = "import sys; sys.modules['plotly'] = None; sys.modules['plotly.offline'] = None; from fedeve import cli; "
    for name, code in (("r.html", 2), ("r.csv", 0)):
        argv = f"sys.argv = ['fedeve', 'report', {str(made)!r}, '--out', {str(tmp_path / name)!r}]; cli.main()"
        done = subprocess.run([sys.executable, "-c", block + argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
    assert not (tmp_path / "r.html").exists()


def test_the_help_ends_in_an_example() -> None:
    assert "Example: fedeve report runs --out report.html" in report("--help").stdout
