"""What is read from folders: every run in its place, and what is damaged named and not in the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_sweep import COLUMNS, NASTY, ROWS, SEEDS, listed, tiny, write_sweep

from fedeve import FederatedData, Record, simulate
from fedeve.errors import FedeveError
from fedeve.report import results
from fedeve.report.results import DAMAGED, DONE, FAILED_RUN, NOT_RUN, REPEAT, UNFINISHED

FIRST, SECOND = COLUMNS


def entry(section: results.Section, row: str, column: str = FIRST, seed: int = SEEDS[0]) -> results.Entry:
    return next(e for e in section.entries if (e.row, e.column, e.seed) == (row, column, seed))


def only(folder: Path) -> results.Section:
    (section,) = results.read([folder]).sections
    return section


def test_a_sweep_is_read_as_its_file_lays_it_out(made: Path) -> None:
    section = only(made)
    assert section.title == "A small sweep" and section.last == 4 and section.metrics == ("accuracy", "loss")
    assert section.rows == [*ROWS, NASTY, "SCAFFOLD", "FedOpt"] and section.columns == list(COLUMNS)
    found = entry(section, "FedEve")
    assert found.state == DONE and found.timing == {"seconds": 1.5, "client_steps": 240, "examples": 3600}
    expected = Record.read(made / "runs/fedeve-0.3-192/record.jsonl")
    assert found.record is not None and found.record.lines == expected.lines
    assert section.printed["accuracy"]["FedEve"][FIRST] == (55.0, 0.5)


def test_rows_and_columns_stand_in_the_order_of_the_table_they_are_part_of(sweep: Path) -> None:
    """Whichever run is listed first; what the table does not name comes last."""
    rows = list(ROWS)
    table = json.loads((sweep / "sweep.json").read_text())
    changed(sweep, runs=table["runs"][::-1], printed={})
    assert only(sweep).rows[0] != rows[0]
    changed(sweep, order={"rows": [*rows, "another"], "columns": [SECOND, FIRST]})
    section = only(sweep)
    assert section.rows[: len(rows)] == rows and section.columns == [SECOND, FIRST]
    assert "another" not in section.rows and NASTY in section.rows[len(rows) :]


def test_of_a_folder_what_stands_beside_printed_numbers_comes_first_and_folders_as_they_are_given(sweep: Path) -> None:
    top = sweep.parent
    for name in ("first", "second"):
        shutil.copytree(sweep, top / name)
        changed(top / name, title=name, printed={})
    changed(sweep, title="printed")
    assert [section.title for section in results.read([top]).sections] == ["printed", "first", "second"]
    assert [each.title for each in results.read([top / "second", top]).sections] == ["second", "printed", "first"]


def test_runs_that_failed_and_runs_that_never_were_say_so(made: Path) -> None:
    section = only(made)
    failed, never = entry(section, NASTY), entry(section, "SCAFFOLD")
    assert (failed.state, failed.reason) == (FAILED_RUN, "<b>out of memory</b>")
    assert (never.state, never.record) == (NOT_RUN, None)


def test_a_run_under_way_is_unfinished_and_a_failed_one_keeps_what_it_recorded(sweep: Path) -> None:
    path = sweep / "runs/fedeve-0.3-192/record.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    found = entry(only(sweep), "FedEve")
    assert (found.state, found.reason) == (UNFINISHED, "4 of 12 rounds")
    (path.parent / "failed.json").write_text('{"reason": "the disk is full"}')
    found = entry(only(sweep), "FedEve")
    assert (found.state, found.reason) == (FAILED_RUN, "the disk is full") and found.record is not None


def test_a_finished_run_is_done_though_an_old_failure_lies_beside_it(sweep: Path) -> None:
    (sweep / "runs/fedeve-0.3-192/failed.json").write_text('{"reason": "yesterday"}')
    assert entry(only(sweep), "FedEve").state == DONE


def test_a_torn_last_line_is_a_run_under_way_not_damage(sweep: Path) -> None:
    path = sweep / "runs/fedeve-0.3-192/record.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert entry(only(sweep), "FedEve").state == UNFINISHED


DAMAGES = {
    "no JSON": '{"round": 4, "acc',
    "not a table": "[1, 2]",
    "a round that goes back": '{"round": 1, "accuracy": 0.1, "facts": {}, "answered": [5]}',
    "too few values": '{"round": 4, "accuracy": 0.1, "facts": {"gain": [0.5]}, "answered": [5, 5]}',
    "no facts": '{"round": 4, "accuracy": 0.1, "answered": [5, 5]}',
    "a text for a number": '{"round": 4, "accuracy": "high", "facts": {}, "answered": [5, 5]}',
    "nobody counted": '{"round": 4, "accuracy": 0.1, "facts": {}, "answered": [5, null]}',
}


@pytest.mark.parametrize("line", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_line_is_named_by_file_and_number_and_the_other_runs_are_read(sweep: Path, line: str) -> None:
    path = sweep / "runs/fedeve-0.3-192/record.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    found = results.read([sweep])
    damaged = entry(found.sections[0], "FedEve")
    assert damaged.state == DAMAGED and f"line 3 of {path} is damaged" in damaged.reason
    assert found.problems == (damaged.reason,)
    assert sum(e.state == DONE for e in found.sections[0].entries) == len(ROWS) * len(COLUMNS) * len(SEEDS) - 1


def test_a_damaged_header_is_line_one(sweep: Path) -> None:
    path = sweep / "runs/fedeve-0.3-192/record.jsonl"
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    del header["config"]
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert f"line 1 of {path} is damaged" in entry(only(sweep), "FedEve").reason


@pytest.mark.parametrize("name", ["timing.json", "failed.json"])
def test_a_damaged_file_beside_a_record_does_not_hide_the_record(sweep: Path, name: str) -> None:
    (sweep / "runs/fedeve-0.3-192" / name).write_text("{")
    (sweep / "runs/nasty-192/failed.json").write_text("[]")
    section = only(sweep)
    assert entry(section, "FedEve").state == DONE
    assert "cannot be read" in entry(section, NASTY).reason


def changed(sweep: Path, **changes: Any) -> None:
    table = json.loads((sweep / "sweep.json").read_text()) | changes
    (sweep / "sweep.json").write_text(json.dumps({k: v for k, v in table.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 7}, "another format"),
        ({"runs": None}, "no 'runs'"),
        ({"runs": [{"row": "x"}]}, "no 'folder'"),
        ({"runs": 3}, "damaged"),
        ({"printed": {"accuracy": {"a": {"b": "high"}}}}, "damaged"),
        ({"last": "many"}, "damaged"),
        ({"order": ["FedAvg"]}, "damaged"),
    ],
)
def test_a_sweep_file_that_is_not_one_is_refused_with_its_path(
    sweep: Path, changes: dict[str, Any], words: str
) -> None:
    changed(sweep, **changes)
    with pytest.raises(FedeveError, match=words) as caught:
        results.read([sweep])
    assert str(sweep / "sweep.json") in str(caught.value) and caught.value.do


def test_a_torn_sweep_file_is_refused(sweep: Path) -> None:
    (sweep / "sweep.json").write_text('{"format": 1, ')
    with pytest.raises(FedeveError, match=r"sweep\.json is damaged"):
        results.read([sweep])


def test_of_two_runs_with_one_seed_the_second_does_not_count(sweep: Path) -> None:
    shutil.copytree(sweep / "runs/fedeve-0.3-192", sweep / "runs/again")
    table = json.loads((sweep / "sweep.json").read_text())
    changed(sweep, runs=[*table["runs"], listed("runs/again", "FedEve", FIRST, 192)])
    states = [e.state for e in only(sweep).entries if (e.row, e.column) == ("FedEve", FIRST)]
    assert states == [DONE, DONE, DONE, REPEAT]


def test_records_without_a_sweep_are_named_by_what_differs(digits: FederatedData, tmp_path: Path) -> None:
    for number, (name, seed) in enumerate([("fedavg", 1), ("fedeve", 1), ("fedeve", 2)]):
        simulate(tiny(digits, method=name, seed=seed, rounds=2), out=tmp_path / "deep" / str(number))
    section = only(tmp_path)
    assert section.rows == ["FedAvg", "FedEve"] and section.columns == ["digits"]
    assert [(e.row, e.seed) for e in section.entries] == [("FedAvg", 1), ("FedEve", 1), ("FedEve", 2)]
    assert section.title == tmp_path.name and section.metrics == ("accuracy", "loss")


def test_a_sweep_and_a_lone_run_beside_it_are_two_sections(sweep: Path, digits: FederatedData) -> None:
    simulate(tiny(digits, method="fedyogi", seed=1, rounds=2), out=sweep / "other")
    first, second = results.read([sweep]).sections
    assert len(first.entries) == 20 and [e.row for e in second.entries] == ["FedYogi"]


def test_two_sweeps_of_one_title_are_told_apart_by_their_folders(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "again")
    sections = results.read([made, tmp_path / "again"]).sections
    assert [section.title for section in sections] == [
        f"A small sweep ({made})",
        f"A small sweep ({tmp_path / 'again'})",
    ]
    assert only(made).title == "A small sweep"


def test_folders_given_twice_or_inside_each_other_count_once(made: Path) -> None:
    found = results.read([made, made / "runs", made])
    assert [len(section.entries) for section in found.sections] == [20]


def test_a_folder_that_is_not_there_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FedeveError, match="no such folder"):
        results.read([tmp_path / "nowhere"])
    with pytest.raises(FedeveError, match="nothing to show"):
        results.read([tmp_path])


def test_a_sweep_of_which_nothing_ran_yet_is_shown_as_not_run(tmp_path: Path) -> None:
    write_sweep(tmp_path, [listed("runs/a", "FedEve", "somewhere", 1)])
    assert [e.state for e in only(tmp_path).entries] == [NOT_RUN]


def test_a_watcher_hears_of_every_record(made: Path) -> None:
    heard: list[tuple[int, int]] = []
    results.read([made], watch=lambda done, total: heard.append((done, total)))
    assert heard == [(number, 18) for number in range(1, 19)]
