"""What a page is given to draw: thinned, rounded, and exact where it must be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedeve import Record
from fedeve.report import curves, results
from fedeve.report.results import DONE, Entry, Section


def long_section(values: np.ndarray, *, every: int = 1, name: str = "accuracy") -> Section:
    """One run with these evaluations, `every` rounds apart."""
    rounds = {"facts": {"gain": [0.5] * every}, "answered": [7] * every}
    lines = [
        {"round": every * number, name: None if math.isnan(value) else value, **rounds}
        for number, value in enumerate(values.tolist(), start=1)
    ]
    header = {"seed": 1, "config": {"rounds": every * len(values)}, "data": {"num_examples": 600, "num_clients": 30}}
    return Section("t", Path("."), (Entry(Path("a"), "r", "c", 1, DONE, record=Record(header, lines)),), (name,))


def test_a_short_curve_is_drawn_point_by_point(section: results.Section) -> None:
    data = curves.section_data(section)
    run, record = data["runs"][0], section.entries[0].record
    grid, values = run["curves"]["accuracy"]
    assert record is not None and data["thinned"] == 1 and data["grids"][grid] == record.evaluated.tolist()
    assert values == pytest.approx(record.metric("accuracy").tolist(), rel=1e-3)


def test_a_long_curve_is_thinned_to_means_of_neighbours() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.1, 1501)
    data = curves.section_data(long_section(values))
    grid, shown = data["runs"][0]["curves"]["accuracy"]
    assert data["thinned"] == 6 and len(shown) == math.ceil(1501 / 6) <= curves.POINTS
    assert data["grids"][grid][:2] == [6, 12] and data["grids"][grid][-1] == 1501
    expected = [values[start : start + 6].mean() for start in range(0, 1501, 6)]
    assert shown == pytest.approx(expected, rel=1e-3)


def test_lost_rounds_are_gaps_and_do_not_pull_a_mean() -> None:
    values = np.full(900, 0.5)
    values[:3], values[4] = math.nan, math.nan
    _, shown = curves.section_data(long_section(values))["runs"][0]["curves"]["accuracy"]
    assert shown[0] is None and set(shown[1:]) == {0.5}


@given(st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), min_size=1, max_size=40), st.floats(0, 1))
@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_the_first_round_that_reaches_a_value_follows_from_the_highs(
    name: str, values: list[float], goal: float
) -> None:
    section = long_section(np.array(values), every=10, name=name)
    rounds, highs, answered = curves.section_data(section)["runs"][0]["highs"][name]

    def reaches(value: float) -> bool:
        return value <= goal if name == "loss" else value >= goal

    # Highs carry eight digits; a goal within their rounding may fall on either side.
    if any(abs(value - goal) < 1e-7 for value in values):
        return
    expected = next((10 * n for n, value in enumerate(values, start=1) if reaches(value)), None)
    found = next((n for n, value in enumerate(highs) if reaches(value)), None)
    assert (None if found is None else rounds[found]) == expected
    assert answered == [7 * round for round in rounds]


def test_examples_are_counted_where_kept_and_expected_elsewhere(section: results.Section) -> None:
    runs = curves.section_data(section)["runs"]
    assert runs[0]["examples_per_client"] == 3600 / (12 * 5)
    assert curves.section_data(long_section(np.ones(3)))["runs"][0]["examples_per_client"] == 20


def test_everything_given_to_the_page_is_strict_json(section: results.Section) -> None:
    data = curves.section_data(section)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [q["name"] for q in data["quantities"]] == [
        "accuracy", "loss", "fact:gain", "fact:period_drift", "fact:client_drift", "fact:variance",
    ]  # fmt: skip
    assert {run["state"] for run in data["runs"]} == {"done", "failed", "not run"}


def test_every_run_can_be_traced_to_its_record(section: results.Section) -> None:
    for run, entry in zip(curves.section_data(section)["runs"], section.entries, strict=True):
        assert run["record"] == str(entry.path) and run["seed"] == entry.seed
        if entry.record is not None:
            assert run["header"] == entry.record.header
            final = entry.record.final("accuracy", last=section.last)
            assert run["final"]["accuracy"] == pytest.approx(final, rel=1e-11)
