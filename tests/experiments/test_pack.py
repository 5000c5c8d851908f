"""Packed sweeps: small, true to what they were made of, and safe to pack into again and to continue."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeping import SWEEP, fedeve, write

from fedeve import FedeveError, Record
from fedeve.experiments import sweep as sweeps
from fedeve.experiments.manifest import merged, read_manifest
from fedeve.experiments.pack import compressed, pack, packed
from fedeve.experiments.sweep_folder import SweepFolder

SHORT = ("--set", "rounds=6", "--set", "eval_every=2", "--no-calibration", "--engine", "reference")
TEXT = SWEEP.replace('title = "Small"', 'title = "Small"\nlast = 2')


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sweep that is finished; not to be written to."""
    folder = tmp_path_factory.mktemp("done")
    ended = fedeve("sweep", write(folder, TEXT), "--out", folder / "small", *SHORT)
    assert ended.returncode == 0, ended.stderr
    return folder / "small"


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "small"))


def runs(out: Path) -> list[Path]:
    return [out / run["folder"] for run in read_manifest(out)["runs"]]


def files(out: Path) -> dict[str, bytes]:
    found = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def cut(folder: Path, *, lines: int) -> None:
    """As if a run had been stopped after so many evaluations."""
    path = folder / "record.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[: 1 + lines]))


def test_a_packed_run_keeps_its_evaluations_and_the_means_of_its_facts(done: Path, tmp_path: Path) -> None:
    (report,) = pack([done], tmp_path)
    assert report.states == {"finished": 8, "unfinished": 0, "failed": 0, "not run": 0} and report.added == 8
    assert read_manifest(tmp_path / "small") == {k: v for k, v in read_manifest(done).items() if k != "widths"}
    for before, after in zip(runs(done), runs(tmp_path / "small"), strict=True):
        assert sorted(path.name for path in after.iterdir()) == ["record.jsonl.gz", "timing.json"]
        one, other = Record.read(before / "record.jsonl"), Record.read(after / "record.jsonl.gz")
        assert other.header == {**one.header, "packed": other.header["packed"]} and other.header["packed"]["finished"]
        assert (other.evaluated == one.evaluated).all() and other.metrics == one.metrics
        for name in one.metrics:
            assert other.final(name, last=2) == one.final(name, last=2)  # to the last bit
            np.testing.assert_allclose(other.metric(name), one.metric(name), rtol=5e-5)
        for name in one.fact_names:
            np.testing.assert_allclose(other.facts(name), one.facts(name).reshape(3, 2).mean(1), rtol=5e-5)
            assert (other.fact_means(name) == other.facts(name)).all()
        assert [line["answered"] for line in other.lines] == [line["answered"] for line in one.lines]


def test_means_pass_over_lost_rounds_and_what_is_not_finite() -> None:
    facts = {"gain": [0.5, None, 0.25], "drift": [None, None, None]}
    line = {"round": 3, "accuracy": 0.123456789, "facts": facts, "answered": [1, 0, 1], "lost": [2]}
    record = Record({"record": 1, "config": {"rounds": 9}}, [line])
    short = packed(record, last=2)
    assert short.facts("gain").tolist() == [0.375] and np.isnan(short.facts("drift")).all()
    assert short.lines[0]["accuracy"] == 0.12346 and short.lost == [2] and not short.header["packed"]["finished"]
    assert packed(short, last=2) is short
    assert gzip.decompress(compressed(short)) == short.jsonl() and compressed(short) == compressed(short)
    with pytest.raises(FedeveError, match="no fact 'spin'"):
        short.facts("spin")


def test_a_long_run_takes_less_than_eight_kilobytes() -> None:
    rng = np.random.default_rng(0)
    names = ("client_drift", "gain", "period_drift", "variance")
    lines = [
        {"round": n, **{name: float(rng.random()) for name in ("auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10", "loss")},
         "facts": {name: rng.random(10).tolist() for name in names}, "answered": [20] * 10}
        for n in range(10, 1501, 10)
    ]  # fmt: skip
    record = Record({"record": 1, "config": {"rounds": 1500}}, lines)
    assert len(compressed(packed(record, last=100))) < 8_000 < len(record.jsonl()) / 10


def test_packing_again_or_what_is_packed_changes_nothing(done: Path, tmp_path: Path) -> None:
    pack([done], tmp_path / "one")
    before = files(tmp_path / "one")
    (again,) = pack([done], tmp_path / "one")
    assert again.added == 0 and not again.other and files(tmp_path / "one") == before
    (further,) = pack([tmp_path / "one"], tmp_path / "two")  # the parent folder: names are kept
    assert further.added == 8 and files(tmp_path / "two") == before
    (inside,) = pack([done.parent], done.parent / "kept")
    assert inside.added == 8 and [p.out for p in pack([done.parent], done.parent / "kept")] == [inside.out]
    shutil.rmtree(done.parent / "kept")
    with pytest.raises(FedeveError, match="into itself"):
        pack([tmp_path / "one"], tmp_path / "one")


def test_runs_finished_later_are_added_and_nothing_finished_is_lost(done: Path, copy: Path, tmp_path: Path) -> None:
    first, second, third = runs(copy)[:3]
    cut(first, lines=2)
    shutil.rmtree(second)
    cut(third, lines=1)
    (third / "failed.json").write_text('{"reason": "out of memory"}')
    out = tmp_path / "kept"
    (begun,) = pack([copy], out)
    assert begun.states == {"finished": 5, "unfinished": 1, "failed": 1, "not run": 1}
    assert not Record.read(out / "small" / first.relative_to(copy) / "record.jsonl.gz").header["packed"]["finished"]
    (whole,) = pack([done], out)
    assert whole.added == 3 and whole.states["finished"] == 8
    pack([done], tmp_path / "at once")
    assert files(out) == files(tmp_path / "at once")
    (less,) = pack([copy], out)  # an older state: nothing is replaced by less
    assert less.added == 0 and less.states["finished"] == 8 and files(out) == files(tmp_path / "at once")


def test_other_numbers_for_a_finished_run_are_told_and_left(done: Path, copy: Path, tmp_path: Path) -> None:
    pack([done], tmp_path / "kept")
    before = files(tmp_path / "kept")
    path = runs(copy)[0] / "record.jsonl"
    head, *rest = path.read_text().splitlines()
    lines = [{**json.loads(line), "accuracy": 0.5} for line in rest]
    path.write_text("\n".join([head, *map(json.dumps, lines)]) + "\n")
    ended = fedeve("pack", copy, "--out", tmp_path / "kept")
    assert ended.returncode == 0
    assert f"1 differ from the finished runs kept there: {path.parent.name}" in ended.stdout
    assert files(tmp_path / "kept") == before


def test_a_damaged_record_is_named_and_the_others_are_packed(copy: Path, tmp_path: Path) -> None:
    path = runs(copy)[0] / "record.jsonl"
    path.write_text(path.read_text().replace('"facts"', '"fancies"'))
    ended = fedeve("pack", copy, "--out", tmp_path / "kept")
    assert ended.returncode == 1 and f"line 2 of {path} is damaged" in ended.stderr
    assert "7 finished, 1 not run; 7 added" in ended.stdout


def test_one_sweep_that_cannot_be_packed_keeps_all_from_being_begun(done: Path, tmp_path: Path) -> None:
    top, kept = tmp_path / "sweeps", tmp_path / "kept"
    shutil.copytree(done, top / "a")
    (top / "b").mkdir()
    (top / "b" / "sweep.json").write_text("{")
    with pytest.raises(FedeveError, match=r"b/sweep\.json is damaged"):
        pack([top], kept)
    (kept / "b").mkdir(parents=True)
    (kept / "b" / "sweep.json").write_text(json.dumps(part("a1")))
    (top / "b" / "sweep.json").write_text(json.dumps(part("a1", title="U")))
    with pytest.raises(FedeveError, match="holds another sweep"):
        pack([top], kept)
    assert not (kept / "a").exists()


def test_packing_tells_how_far_it_is(done: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    pack([done], tmp_path, watch=lambda count, total: told.append((count, total)))
    assert told == [(count, 8) for count in range(1, 9)]


def part(*runs: str, title: str = "T", **more: Any) -> dict[str, Any]:
    listed = [{"folder": f"runs/{run}", "row": run[0], "column": "c", "seed": 1} for run in runs]
    return {"format": 1, "title": title, "engine": "lanes", "runs": listed, **more}


def test_two_parts_of_a_sweep_become_one_list(tmp_path: Path) -> None:
    short, long = ({"command": "fedeve", "machine": "m", "begun": "2026-11-15", "seconds": s} for s in (0.0, 9.0))
    other = {**long, "begun": "2026-11-14"}
    one = part("a1", "b1", notes=["n"], printed={"acc": {"a": {"c": [1, 2]}}}, sessions=[short])
    two = part("b1", "c1", notes=["n", "m"], printed={"acc": {"a": {"d": [3, 4]}}}, sessions=[long, other])
    found = merged(one, two, out=tmp_path)
    assert [run["folder"] for run in found["runs"]] == ["runs/a1", "runs/b1", "runs/c1"] and found["notes"] == [
        "n",
        "m",
    ]
    assert found["printed"] == {"acc": {"a": {"c": [1, 2], "d": [3, 4]}}} and found["sessions"] == [other, long]
    assert merged(found, two, out=tmp_path) == found == merged(found, found, out=tmp_path)


def test_parts_of_a_table_stand_in_its_order_whichever_was_packed_first(tmp_path: Path) -> None:
    order = {"rows": ["a", "b", "c"], "columns": ["d", "c"]}
    one, two = part("x1", "c1", "a1", order=order), part("b1", "a2", order=order)
    two["runs"][1]["column"] = "d"
    for first, second in ((one, two), (two, one)):
        found = merged(first, second, out=tmp_path)
        assert [run["folder"] for run in found["runs"]] == [f"runs/{run}" for run in ("a2", "a1", "b1", "c1", "x1")]


def test_what_does_not_belong_together_is_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(FedeveError, match="holds another sweep"):
        merged(part("a1"), part("a1", title="U"), out=tmp_path)
    with pytest.raises(FedeveError, match=r"another configuration.*runs/a1 and runs/a2"):
        merged(part("a1", "b1"), part("a2"), out=tmp_path)
    with pytest.raises(FedeveError, match="no sweep to pack"):
        pack([tmp_path], tmp_path / "kept")
    (tmp_path / "sweep.json").write_text(json.dumps(part("../../elsewhere")))
    with pytest.raises(FedeveError, match="outside of its sweep's folder"):
        pack([tmp_path], tmp_path / "kept")


def test_a_packed_sweep_is_finished_and_its_missing_runs_can_be_played_into_it(
    done: Path, copy: Path, tmp_path: Path
) -> None:
    config, out = write(tmp_path, TEXT), tmp_path / "kept" / "small"
    unfinished, missing, failed = runs(copy)[:3]
    cut(unfinished, lines=1)
    shutil.rmtree(missing)
    (failed / "failed.json").write_text('{"reason": "out of memory"}')
    cut(failed, lines=1)
    pack([copy], out.parent)
    chosen = sweeps.read(config, assignments=("rounds=6", "eval_every=2"))
    states = [status.state for status in SweepFolder(out, chosen).statuses()]
    assert states == ["waiting", "waiting", "failed"] + 5 * ["finished"]
    kept = files(out)
    ended = fedeve("sweep", config, "--out", out, "--retry", *SHORT)
    assert ended.returncode == 0 and "8 finished" in ended.stdout, ended.stderr
    for folder in (unfinished, missing, failed):
        place = folder.relative_to(copy)
        assert (out / place / "record.jsonl").read_bytes() == (done / place / "record.jsonl").read_bytes()
    after = files(out)
    assert all(after[name] == kept[name] for name in kept if name.endswith(".gz"))
    assert len(list(out.glob("runs/*/record.jsonl"))) == 3
    pack([out], tmp_path / "again")
    pack([done], tmp_path / "at once")
    records = [{k: v for k, v in files(tmp_path / name).items() if k.endswith(".gz")} for name in ("again", "at once")]
    assert records[0] == records[1] and len(records[0]) == 8


def test_what_is_played_into_a_packed_sweep_plans_its_own_lanes(tmp_path: Path) -> None:
    lanes = ("--set", "rounds=2", "--no-calibration", "--engine", "lanes", "--width", 3)
    config = write(tmp_path, TEXT)
    assert fedeve("sweep", config, "--out", tmp_path / "small", *lanes).returncode == 0
    (played,) = read_manifest(tmp_path / "small")["widths"].values()
    pack([tmp_path / "small"], kept := tmp_path / "kept")
    assert played == 3 and "widths" not in read_manifest(kept / "small")
    write(tmp_path, TEXT.replace("seeds = [", "seeds = [7, "))
    assert fedeve("sweep", config, "--out", kept / "small", *lanes[:-2]).returncode == 0
    (planned,) = read_manifest(kept / "small")["widths"].values()
    assert planned != 3
    pack([tmp_path / "small"], kept)  # what is being played there keeps them
    assert list(read_manifest(kept / "small")["widths"].values()) == [planned]


def test_sweep_json_tells_the_command_the_machine_and_the_time_of_every_session(copy: Path, tmp_path: Path) -> None:
    (session,) = read_manifest(copy)["sessions"]
    assert session["command"].startswith("fedeve sweep ") and session["command"].endswith(
        "--set rounds=6 --set eval_every=2 --engine reference"
    )
    assert session["machine"] and session["seconds"] > 0 and session["begun"][:2] == "20"
    fedeve("sweep", write(tmp_path, TEXT), "--out", copy, *SHORT)  # nothing to do is no session
    assert read_manifest(copy)["sessions"] == [session]
    shutil.rmtree(runs(copy)[0])
    fedeve("sweep", write(tmp_path, TEXT), "--out", copy, "--budget", "9m", *SHORT)
    old, new = read_manifest(copy)["sessions"]
    assert old == session and "--budget" not in new["command"] and str(copy) not in new["command"]


def test_packing_needs_few_packages(done: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('plotly', 'matplotlib', 'scipy', 'sklearn', 'safetensors', 'threadpoolctl', 'h5py'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = ['fedeve', 'pack', {str(done)!r}, '--out', {str(tmp_path)!r}]\n"
        "from fedeve.cli import main\n"
        "main()\n"
    )
    assert "8 finished; 8 added" in subprocess.check_output([sys.executable, "-c", code], text=True)
