"""Records: what they say of a run, and how their files survive."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fedeve import Record
from fedeve.errors import FedeveError
from fedeve.record import FORMAT, DiskError, RecordFile

HEADER = {"record": FORMAT, "identity": "x", "seed": 1}


def line(round: int, accuracy: float, gains: list[float | None]) -> dict[str, object]:
    return {"round": round, "accuracy": accuracy, "facts": {"gain": gains}, "answered": [5] * len(gains)}


@pytest.fixture
def record() -> Record:
    lines = [line(r, r / 1000, [0.5] * 50) for r in range(50, 301, 50)]
    return Record(dict(HEADER), lines)


def test_final_is_the_mean_over_the_evaluations_of_the_last_hundred_rounds(record: Record) -> None:
    assert record.final("accuracy") == pytest.approx(np.mean([0.25, 0.3]))
    assert record.final("accuracy", last=101) == pytest.approx(np.mean([0.2, 0.25, 0.3]))
    assert record.final("accuracy", last=1) == 0.3


def test_metrics_run_over_evaluations_and_facts_over_rounds(record: Record) -> None:
    assert record.evaluated.tolist() == [50, 100, 150, 200, 250, 300]
    assert record.metric("accuracy").shape == (6,)
    assert record.facts("gain").shape == (300,)


def test_facts_of_lost_rounds_are_nan() -> None:
    record = Record(dict(HEADER), [line(3, 0.1, [0.5, None, 0.7])])
    assert np.isnan(record.facts("gain")).tolist() == [False, True, False]


def test_a_stretch_without_a_fact_keeps_its_place() -> None:
    silent = {"round": 2, "accuracy": 0.1, "facts": {}, "answered": [0, 0], "lost": [1, 2]}
    record = Record(dict(HEADER), [silent, line(4, 0.2, [0.5, 0.6])])
    assert np.isnan(record.facts("gain")).tolist() == [True, True, False, False]
    assert record.lost == [1, 2]


@pytest.mark.parametrize("ask", ["metric", "facts", "final"])
def test_an_unknown_name_is_answered_with_the_known_ones(record: Record, ask: str) -> None:
    with pytest.raises(FedeveError, match=r"accuracy|gain"):
        getattr(record, ask)("acuracy")


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record.jsonl")
    file.create(HEADER)
    file.append(line(1, 1 / 3, [0.1]))
    file.append(line(2, math.nan, [math.inf]))
    found = Record.read(file.path)
    assert found.header == HEADER
    assert found.metric("accuracy")[0] == 1 / 3
    assert math.isnan(found.metric("accuracy")[1]) and math.isnan(found.facts("gain")[1])
    for text in file.path.read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_torn_last_line_is_passed_over_and_then_rewound(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record.jsonl")
    file.create(HEADER)
    file.append(line(1, 0.1, [0.1]))
    whole = file.path.read_bytes()
    file.append(line(2, 0.2, [0.2]))
    for length in range(len(whole), len(file.path.read_bytes()) - 1):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(file.path.read_bytes()[:length])
        assert Record.read(torn).evaluated.tolist() == [1]
    assert [kept["round"] for kept in RecordFile(torn).rewind(1)] == [1]
    assert torn.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path)
    file.create(HEADER)
    file.append(line(1, 0.1, [0.1]))
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": ') + b"{}\n")
    with pytest.raises(FedeveError, match=r"line 2 of .* is damaged"):
        Record.read(path)


@pytest.mark.parametrize(
    "damage",
    [
        b"3", b"[]", b"{}", b'{"round": "x"}', b'{"round": 1}', b'{"round": 2, "facts": {}, "answered": [3]}',
        b'{"round": 1, "facts": {"gain": [1, 2]}, "answered": [3]}', b'{"round": 1, "facts": {}, "answered": ["x"]}',
        b'{"round": 1, "accuracy": "x", "facts": {}, "answered": [3]}',
    ],
)  # fmt: skip
def test_a_line_that_is_json_but_no_round_is_damaged_too(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "record.jsonl"
    RecordFile(path).create(HEADER)
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with pytest.raises(FedeveError, match=r"line 2 of .* is damaged"):
        Record.read(path)


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", '{"record": 99}\n', "no json"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(content)
    with pytest.raises(FedeveError, match="is not a record of format"):
        Record.read(path)


def test_a_disk_that_does_not_keep_a_record_is_no_fault_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot write"):
        RecordFile(tmp_path / "gone" / "record.jsonl").sync()
