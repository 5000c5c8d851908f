"""The numbers of the tables, against numpy, scipy and the definitions written out again."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_sweep import COLUMNS, NASTY, SEEDS

from fedeve import Record
from fedeve.report import results, tables
from fedeve.report.markup import section_html
from fedeve.report.results import DONE, Entry, Section
from fedeve.report.tables import holm, metric_named, paired

ACCURACY, LOSS = metric_named("accuracy"), metric_named("loss")
FIRST, SECOND = COLUMNS


def run(row: str, column: str, seed: int, accuracy: float, **changes: object) -> Entry:
    """A finished run of one evaluation."""
    line = {"round": 1, "accuracy": accuracy, "loss": 1 - accuracy, "facts": {}, "answered": [1]}
    record = Record({"seed": seed, "config": {"rounds": 1}}, [line])
    return replace(Entry(Path(f"{row}-{column}-{seed}"), row, column, seed, DONE, record=record), **changes)  # type: ignore[arg-type]


def section(*entries: Entry, metrics: tuple[str, ...] = ("accuracy",), **changes: object) -> Section:
    return Section("t", Path("."), entries, metrics, **changes)  # type: ignore[arg-type]


def test_mean_and_deviation_are_those_of_the_records_final_values(made: Path) -> None:
    found = results.read([made]).sections[0]
    table = tables.tables(found)[0]
    records = [Record.read(made / f"runs/fedeve-0.3-{seed}/record.jsonl") for seed in SEEDS]
    finals = [100 * record.metric("accuracy")[-2:].mean() for record in records]  # rounds 10 and 12 of the last 4
    cell = table.cells["FedEve", 0]
    assert cell.mean == pytest.approx(np.mean(finals)) and cell.deviation == pytest.approx(np.std(finals, ddof=1))
    assert dict(cell.values) == pytest.approx(dict(zip(SEEDS, finals, strict=True)))


def test_cells_without_a_value_say_why(made: Path) -> None:
    table = tables.tables(results.read([made]).sections[0])[0]
    states = {row: table.cells[row, 0].state for row in table.rows}
    assert states[NASTY] == "failed" and states["SCAFFOLD"] == states["FedOpt"] == "not run"
    assert table.cells["FedOpt", 0].printed == (5.13, 0.0) and table.cells[NASTY, 1].state == "not run"


def test_only_finished_runs_count_and_the_others_are_listed() -> None:
    entries = [run("a", "c", seed, 0.5) for seed in (1, 2)]
    entries += [run("a", "c", 3, 0.9, state="unfinished"), run("a", "c", 4, 0.9, state="repeat")]
    cell = tables.tables(section(*entries))[0].cells["a", 0]
    assert list(cell.values) == [1, 2] and cell.mean == 50 and [e.seed for e in cell.missing] == [3]


def test_noise_is_twice_the_standard_error_of_the_difference() -> None:
    entries = [run("a", "c", seed, value) for seed, value in enumerate([0.50, 0.52, 0.57])]
    printed = {"accuracy": {"a": {"c": (51.0, 1.2)}}}
    cell = tables.tables(section(*entries, printed=printed, printed_seeds=5))[0].cells["a", 0]
    ours = np.std([50, 52, 57], ddof=1)
    assert cell.difference == pytest.approx(2.0)
    assert cell.noise == pytest.approx(2 * math.sqrt(ours**2 / 3 + 1.2**2 / 5))
    assert cell.within_noise is True
    far = tables.tables(section(*entries, printed={"accuracy": {"a": {"c": (60.0, 0.1)}}}))[0].cells["a", 0]
    assert far.within_noise is False


def test_with_one_seed_there_is_no_deviation_and_no_verdict() -> None:
    cell = tables.tables(section(run("a", "c", 1, 0.5), printed={"accuracy": {"a": {"c": (51.0, 1.0)}}}))[0].cells[
        "a", 0
    ]
    assert math.isnan(cell.deviation) and cell.difference == pytest.approx(-1) and cell.within_noise is None


def test_ranks_follow_the_good_end_and_equals_share_the_better_one() -> None:
    values = {"a": 0.5, "b": 0.7, "c": 0.7, "d": 0.2}
    entries = [run(row, "x", 1, value) for row, value in values.items()]
    found = tables.tables(section(*entries, metrics=("accuracy", "loss")))[0]
    for place in (0, 1):  # the metrics of a single column stand side by side, and the loss is one minus the accuracy
        assert [found.cells[row, place].rank for row in values] == [3, 1, 1, 4]
        assert [found.cells[row, place].best for row in values] == [False, True, True, False]
    assert found.mean_rank("a") == 3


def test_where_all_are_equal_none_is_the_best() -> None:
    found = tables.tables(section(run("a", "x", 1, 0.5), run("b", "x", 1, 0.5)))[0]
    assert [found.cells[row, 0].rank for row in "ab"] == [1, 1] and not any(cell.best for cell in found.cells.values())


def test_a_run_that_diverged_has_a_mean_that_is_not_finite_and_no_rank() -> None:
    entries = [run("a", "x", 1, math.nan), run("a", "x", 2, 0.5), run("b", "x", 1, 0.1)]
    found = tables.tables(section(*entries))[0]
    assert found.cells["a", 0].rank is None and found.cells["b", 0].rank == 1
    assert found.headings[0].metric.show(found.cells["a", 0].mean) == "not finite"


def test_several_columns_give_a_table_a_metric_and_one_column_one_table() -> None:
    one = section(run("a", "x", 1, 0.1), metrics=("accuracy", "loss"))
    two = section(run("a", "x", 1, 0.1), run("a", "y", 1, 0.1), metrics=("accuracy", "loss"))
    assert [[h.title for h in t.headings] for t in tables.tables(one)] == [["accuracy, %", "loss"]]
    assert [(t.title, [h.title for h in t.headings]) for t in tables.tables(two)] == [
        ("accuracy, %", ["x", "y"]), ("loss", ["x", "y"])
    ]  # fmt: skip
    assert tables.tables(section(run("a", "x", 1, 0.1), metrics=())) == []


def test_a_metric_that_was_not_recorded_is_called_so() -> None:
    cell = tables.tables(section(run("a", "x", 1, 0.1), metrics=("auc",)))[0].cells["a", 0]
    assert cell.state == "not recorded" and not cell.values


seeds = st.dictionaries(st.integers(0, 9), st.floats(-100, 100), min_size=2, max_size=8)


@given(one=seeds, other=seeds)
def test_the_paired_test_is_scipys_over_the_shared_seeds(one: dict[int, float], other: dict[int, float]) -> None:
    shared = sorted(set(one) & set(other))
    found = paired(one, other, ACCURACY)
    if not shared:
        assert found is None
        return
    assert found is not None and found.num_seeds == len(shared)
    a, b = np.array([one[s] for s in shared]), np.array([other[s] for s in shared])
    assert found.difference == pytest.approx(np.mean(a - b), abs=1e-9) and found.wins == (a > b).sum()
    if len(shared) > 1 and np.std(a - b) > 1e-6 * max(1.0, np.abs(a - b).max()):
        assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-6, abs=1e-12)


def test_differences_that_are_all_the_same_give_no_p_value() -> None:
    found = paired({1: 0.3, 2: 0.4, 3: 0.5}, {1: 0.1, 2: 0.2, 3: 0.3}, ACCURACY)
    assert found is not None and math.isnan(found.p) and found.wins == 3
    same = paired({1: 0.3, 2: 0.4}, {1: 0.3, 2: 0.4}, ACCURACY)
    assert same is not None and math.isnan(same.p) and same.wins == 0


def test_fewer_is_a_win_where_less_is_better() -> None:
    found = paired({1: 0.1, 2: 0.3}, {1: 0.2, 2: 0.2}, LOSS)
    assert found is not None and found.wins == 1


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holms_correction_is_its_definition(values: list[float]) -> None:
    """Reject in order while p_(k) <= level / (m - k + 1): the corrected p is the smallest level that rejects it."""
    corrected = holm(values)
    order = sorted(range(len(values)), key=lambda n: values[n])
    for place, number in enumerate(order):
        steps = [(len(values) - k) * values[order[k]] for k in range(place + 1)]
        assert corrected[number] == pytest.approx(min(1.0, max(steps)))


def test_holms_correction_passes_over_tests_that_could_not_be_made() -> None:
    corrected = holm([0.01, math.nan, 0.02])
    assert corrected[0] == 0.02 and math.isnan(corrected[1]) and corrected[2] == 0.02


def test_fedeve_is_tested_against_every_other_row_within_its_column() -> None:
    rng = np.random.default_rng(0)
    rows = {row: 0.5 + rng.normal(0, 0.1, 5) for row in ("FedAvg", "FedEve", "FedAdam")}
    entries = [run(row, "x", seed, values[seed]) for row, values in rows.items() for seed in range(5)]
    table = tables.tables(section(*entries))[0]
    expected = {row: stats.ttest_rel(rows["FedEve"], rows[row]).pvalue for row in ("FedAvg", "FedAdam")}
    assert table.chosen == "FedEve" and table.cells["FedEve", 0].test is None
    for row, p in zip(expected, holm(list(expected.values())), strict=True):
        test = table.cells[row, 0].test
        assert test is not None and test.p == pytest.approx(expected[row]) and test.holm == pytest.approx(p)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ({"one": {"name": "fedeve", "drift": "released"}, "two": {"name": "fedeve", "drift": "paper"}}, "two"),
        ({"one": {"name": "fedeve", "drift": "released"}, "two": {"name": "fedavg"}}, "one"),
        ({"FedEve": {"name": "fedavg"}, "two": {"name": "fedeve"}}, "FedEve"),
        ({"one": "fedeve"}, "one"),
        ({"one": {"name": "fedavg"}}, None),
    ],
)
def test_the_row_that_is_tested_is_fedeve_as_the_paper_has_it(rows: dict[str, object], chosen: str | None) -> None:
    entries = [run(row, "x", 1, 0.5, config={"method": method}) for row, method in rows.items()]
    assert tables.chosen_row(section(*entries)) == chosen


@pytest.mark.parametrize(
    ("name", "title", "shown"),
    [("accuracy", "accuracy, %", "12.35"), ("auc", "AUC", "0.1235"), ("ndcg@10", "NDCG@10", "0.1235")],
)
def test_metrics_are_shown_as_the_paper_prints_them(name: str, title: str, shown: str) -> None:
    metric = metric_named(name)
    assert metric.title == title and metric.show(metric.factor * 0.123456) == shown
    assert metric.show_difference(-metric.factor * 0.123456) == f"−{shown}"


def begun(row: str, seed: int, rounds: int, accuracies: list[float], state: str) -> Entry:
    """A run of 20 rounds that was evaluated every two."""
    lines = [
        {"round": 2 * (n + 1), "accuracy": value, "facts": {}, "answered": [1, 1]} for n, value in enumerate(accuracies)
    ]
    record = Record({"seed": seed, "config": {"rounds": rounds}}, lines)
    return Entry(Path(f"{row}-{seed}"), row, "c", seed, state, record=record)


def test_a_column_where_a_row_has_no_finished_run_is_shown_as_of_a_round_that_all_reached() -> None:
    entries = [
        begun("a", 1, 20, [n / 10 for n in range(1, 11)], DONE),
        begun("b", 1, 20, [0.5, 0.6, 0.7, 0.8], "unfinished"),
        begun("b", 2, 20, [0.5, 0.6, 0.9], "unfinished"),
    ]
    table = tables.tables(section(*entries, last=4))[0]
    assert table.title == "c (after 6 of 20 rounds)"
    # A tenth of six rounds is less than one: the evaluation after the sixth alone.
    assert table.cells["a", 0].mean == pytest.approx(30) and table.cells["b", 0].mean == pytest.approx(80)
    whole = tables.tables(section(entries[0], last=4))[0]
    assert whole.title == "c" and whole.cells["a", 0].mean == pytest.approx(95)


def test_a_column_whose_rows_have_finished_different_seeds_is_cut_while_others_are_under_way() -> None:
    entries = [
        begun("a", 1, 4, [0.1, 0.2], DONE),
        begun("a", 2, 4, [0.3], "unfinished"),
        begun("b", 1, 4, [0.5], "unfinished"),
        begun("b", 2, 4, [0.7, 0.8], DONE),
    ]
    table = tables.tables(section(*entries, last=1))[0]
    assert table.title == "c (after 2 of 4 rounds)"
    assert [dict(table.cells[row, 0].values) for row in "ab"] == [{1: 10.0, 2: 30.0}, {1: 50.0, 2: 70.0}]
    chosen = tables.tables(section(entries[0], entries[3], last=1))[0]  # nothing is under way: so they were chosen
    assert chosen.title == "c" and dict(chosen.cells["b", 0].values) == {2: 80.0}


def test_a_column_is_not_cut_where_every_row_has_finished_the_same_seed() -> None:
    entries = [begun("a", 1, 4, [0.1, 0.2], DONE), begun("a", 2, 4, [0.3], "unfinished")]
    table = tables.tables(section(*entries, last=1))[0]
    assert table.title == "c" and dict(table.cells["a", 0].values) == {1: 20.0}


@pytest.mark.parametrize(
    ("columns", "title", "headings"),
    [
        (["mnist, natural, E = 1", "mnist, natural, E = 3"], "accuracy, %: mnist, natural", ["E = 1", "E = 3"]),
        (["mnist, natural", "mnist, natural, E = 3"], "accuracy, %: mnist", ["natural", "natural, E = 3"]),
        (["one, a", "other, a"], "accuracy, %", ["one, a", "other, a"]),
        (["mnist, natural"], "mnist, natural", ["accuracy, %"]),
    ],
)
def test_on_the_page_what_all_headings_begin_with_is_said_once(
    columns: list[str], title: str, headings: list[str]
) -> None:
    found = section(*(run("a", column, 1, 0.5) for column in columns))
    text = section_html(found, tables.tables(found), number=0, heading="h").replace("\xa0", " ")
    assert re.findall("<h3>(.*?)</h3>", text)[0] == title
    assert re.findall('class="sort">(.*?)</button>', text)[1 : len(columns) + 1] == headings


def test_a_metric_that_no_finished_run_recorded_is_not_a_column() -> None:
    (table,) = tables.tables(section(run("a", "c", 1, 0.5), metrics=("accuracy", "auc")))
    assert [heading.title for heading in table.headings] == ["accuracy, %"]
