"""Exports say what the tables say, and survive their readers."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from small_sweep import COLUMNS, NASTY, ROWS

from fedeve.report import exports, results, tables

FIRST = next(iter(COLUMNS))


def test_csv_has_a_line_for_every_cell_in_full_precision(section: results.Section) -> None:
    lines = list(csv.DictReader(io.StringIO(exports.export("csv", [section]))))
    assert len(lines) == len(section.rows) * len(section.columns) * len(section.metrics)
    table = tables.tables(section)[0]
    found = next(
        line for line in lines if (line["row"], line["column"], line["metric"]) == ("FedEve", FIRST, "accuracy, %")
    )
    cell = table.cells["FedEve", 0]
    assert float(found["mean"]) == cell.mean and float(found["std"]) == cell.deviation
    assert float(found["printed_mean"]) == 55.0 and float(found["difference"]) == cell.difference
    assert found["within_noise"] == str(cell.within_noise).lower() and found["seeds"] == "192 225 226"
    assert [Path(path).exists() for path in found["records"].split(" ")] == [True] * 3
    test = table.cells["FedAvg", 0].test
    other = next(
        line for line in lines if (line["row"], line["column"], line["metric"]) == ("FedAvg", FIRST, "accuracy, %")
    )
    assert test is not None and float(other["p_paired_t"]) == test.p and float(other["p_holm"]) == test.holm


def test_csv_says_why_a_cell_is_empty(section: results.Section) -> None:
    lines = csv.DictReader(io.StringIO(exports.export("csv", [section])))
    found = next(line for line in lines if line["row"] == NASTY)
    assert found["state"] == "failed" and found["mean"] == "" and "<b>out of memory</b>" in found["reason"]


def test_markdown_tables_have_as_many_cells_in_every_line(section: results.Section) -> None:
    text = exports.export("md", [section])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(section.columns) + 2}
    assert text.count("|---|---:|") == 2
    assert r"\<script\>alert(1)\</script\> & 100 % of\_it" in text
    assert "| *printed* | 55.00 ± 0.50 |" in text and "| failed |" in text and "| not run |" in text


def test_the_best_of_a_column_is_bold_and_nothing_else(section: results.Section) -> None:
    body = [line for line in exports.export("md", [section]).splitlines() if line.startswith("| ")]
    assert sum(line.count("**") for line in body) == 2 * 2 * 2  # two tables of two columns, two marks each
    assert exports.export("tex", [section]).count("\\textbf{") == 4


def test_latex_is_booktabs_and_its_braces_and_columns_agree(section: results.Section) -> None:
    text = exports.export("tex", [section])
    for rule in ("\\toprule", "\\midrule", "\\bottomrule", "\\begin{tabular}{lrr}", "\\end{tabular}"):
        assert text.count(rule) == 2
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2}
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    assert "$<$script$>$alert(1)$<$/script$>$ \\& 100 \\% of\\_it" in text
    assert not re.search(r"(?<!\\)[%#_]", text.split("\n", 1)[1].replace("% \\usepackage", ""))


def test_cells_with_missing_seeds_say_how_many_there_are(sweep: Path) -> None:
    (sweep / "runs/fedeve-0.3-192/record.jsonl").unlink()
    text = exports.export("md", results.read([sweep]).sections)
    assert re.search(r"\| FedEve \| .*\(2 of 3 seeds\)", text)


@pytest.mark.parametrize("kind", exports.WRITERS)
def test_a_section_without_metrics_exports_to_nothing_but_heads(kind: str, section: results.Section) -> None:
    from dataclasses import replace

    text = exports.export(kind, [replace(section, metrics=())])
    assert not any(row in text for row in ROWS)
