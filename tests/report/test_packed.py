"""The report of packed folders says what the report of the folders they were made from says."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_sweep import COLUMNS, SEEDS

from fedeve import Record
from fedeve.experiments.pack import compressed, pack, packed
from fedeve.report import curves, exports, page, results
from fedeve.report.results import DAMAGED, UNFINISHED


@pytest.fixture
def small(sweep: Path, tmp_path: Path) -> Path:
    """A packed copy of the sweep, one of its runs unfinished in both."""
    path = sweep / f"runs/fedavg-0.3-{SEEDS[0]}/record.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    pack([sweep], tmp_path / "kept")
    return tmp_path / "kept" / "sweep"


def table(folder: Path, kind: str) -> str:
    return exports.export(kind, results.read([folder]).sections)


def test_states_reasons_and_timings_are_the_same(sweep: Path, small: Path) -> None:
    (one,), (other,) = (results.read([folder]).sections for folder in (sweep, small))
    seen = [[(e.row, e.column, e.seed, e.state, e.reason, e.timing) for e in s.entries] for s in (one, other)]
    assert seen[0] == seen[1] and UNFINISHED in {e.state for e in other.entries}
    assert {e.path.name for e in other.entries if e.record} == {"record.jsonl.gz"}


def test_tables_and_tests_are_the_same_in_every_format(sweep: Path, small: Path) -> None:
    for kind in ("md", "tex"):
        assert table(small, kind) == table(sweep, kind)
    one, other = (list(csv.DictReader(io.StringIO(table(folder, "csv")))) for folder in (sweep, small))
    for row in (*one, *other):
        row["records"] = str(len(row["records"].split()))  # the paths differ, nothing else does
    assert one == other


def test_facts_are_drawn_as_means_of_the_rounds_since_the_evaluation_before(sweep: Path, small: Path) -> None:
    (one,), (other,) = (results.read([folder]).sections for folder in (sweep, small))
    before, after = curves.section_data(one), curves.section_data(other)
    assert before["quantities"] == after["quantities"]
    for first, second in zip(before["runs"], after["runs"], strict=True):
        assert first["final"] == second["final"] and first["curves"].keys() == second["curves"].keys()
        for name in second["curves"]:
            (a, every), (b, means) = first["curves"][name], second["curves"][name]
            rounds = after["grids"][b]
            if name.startswith("fact:"):
                assert rounds == before["grids"][a][1::2]
                every = np.reshape(every, (-1, 2)).mean(1)
            np.testing.assert_allclose(means, every, rtol=1e-3)


def test_seeds_are_averaged_over_the_same_rounds_though_one_is_not_packed(sweep: Path, small: Path) -> None:
    name = f"runs/fedeve-0.3-{SEEDS[0]}"
    shutil.rmtree(small / name)
    shutil.copytree(sweep / name, small / name)
    (section,) = results.read([small]).sections
    data = curves.section_data(section)
    assert len(data["grids"]) == 2  # one of the runs that are done, one of the one that is not
    page.render(results.read([small]), title="t", made="m")


def test_of_two_records_in_a_folder_the_one_that_came_further_counts(sweep: Path, small: Path) -> None:
    name = f"runs/fedavg-0.3-{SEEDS[0]}"
    whole = f"runs/fedavg-0.3-{SEEDS[1]}/record.jsonl"
    shutil.copy(sweep / whole, small / name / "record.jsonl")
    (section,) = results.read([small]).sections
    found = next(e for e in section.entries if e.folder == small / name)
    assert found.state == "done" and found.path.name == "record.jsonl"
    (small / "sweep.json").unlink()
    (loose,) = results.read([small]).sections  # without a sweep.json every folder is a run, and is one run
    assert len(loose.entries) == len(SEEDS) * 3 * len(COLUMNS)


@pytest.mark.parametrize(
    "damage", [b"not gzip", b"\x1f\x8b\x08\x00", None], ids=["other bytes", "cut", "lists of facts"]
)
def test_a_damaged_packed_record_is_named_and_the_others_are_shown(small: Path, damage: bytes | None) -> None:
    path = small / f"runs/fedeve-0.3-{SEEDS[0]}/record.jsonl.gz"
    if damage is None:
        record = packed(Record.read(path), last=4)
        record.lines[0]["facts"]["gain"] = [0.1, 0.2]
        damage = compressed(record)
    path.write_bytes(damage)
    found = results.read([small])
    assert len(found.problems) == 1 and str(path) in found.problems[0]
    assert [e.state for e in found.sections[0].entries].count(DAMAGED) == 1


def test_the_page_says_by_what_a_section_was_made(small: Path) -> None:
    plain = json.loads((small / "sweep.json").read_text())
    assert "Made by: <code>" not in page.render(results.read([small]), title="t", made="m")
    session = {
        "command": "fedeve paper table2 --set 'a<b'",
        "machine": "NVIDIA H200",
        "begun": "2026-11-15T10:00:00+00:00",
    }
    sessions = [{**session, "seconds": 312.4}, {**session, "seconds": 10}, {**session, "seconds": 0.0}, {}]
    (small / "sweep.json").write_text(json.dumps({**plain, "sessions": sessions}))
    text = page.render(results.read([small]), title="t", made="m")
    made = "<code>fedeve paper table2 --set &#x27;a&lt;b&#x27;</code>, on NVIDIA H200, 2026-11-15"
    took = "322 s in 2 sessions, 1 session of unknown length"
    assert f"Made by: {made}, {took}" in text
    assert "Made by: <code>unknown</code>, 1 session of unknown length" in text
    assert 'details class="made"' not in text


def test_many_commands_behind_a_section_are_folded_away(small: Path) -> None:
    plain = json.loads((small / "sweep.json").read_text())
    sessions = [{"command": f"fedeve sweep {n}", "machine": f"machine <{n % 2}>", "seconds": 1} for n in range(4)]
    for count in (3, 4):
        (small / "sweep.json").write_text(json.dumps({**plain, "sessions": sessions[:count]}))
        text = page.render(results.read([small]), title="t", made="m")
        summary = "<summary>Made by 4 commands on machine &lt;0&gt; and machine &lt;1&gt;</summary>"
        assert (summary in text) == (count == 4)
        assert text.count("Made by: <code>fedeve sweep") == count
