"""The pages' tables say what the records and the benchmarks say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tables

from fedeve.experiments import paper_tables
from fedeve.report import results

ROOT = Path(__file__).parent.parent


def test_the_tables_of_the_pages_are_those_of_the_records() -> None:
    texts = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    assert set(re.findall(r"<!-- ([^>]+?) -->\n", "".join(texts))) - {"end"} == set(tables.BLOCKS)
    for text in texts:
        assert tables.refreshed(text) == text, "run python docs/tables.py"


def test_the_records_are_whole_and_small() -> None:
    found = results.read([ROOT / "results"])
    assert not found.problems and len(found.sections) >= 5
    size = sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file())
    assert size < 20e6


@pytest.mark.parametrize("name", ["table1-cifar100", "table2"])
def test_rows_and_columns_of_the_records_are_those_of_the_commands(name: str) -> None:
    (section,) = results.read([ROOT / "results" / name]).sections
    table = paper_tables.TABLES[name.split("-")[0]]
    points = paper_tables.build(table, methods=[row.name for row in table.rows]).points
    assert set(section.rows) <= {point.row for point in points}
    assert {entry.column for entry in section.entries} <= {point.column for point in points}
