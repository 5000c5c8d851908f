"""Settings are checked at the door, and the error says what to do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedeve import FedAvgM, FedEve, FedeveError
from fedeve.methods import create
from fedeve.settings import build, check, describe, setting


@dataclass(frozen=True, kw_only=True)
class Oven:
    """One setting of every kind."""

    degrees: float = setting(180.0, help="how hot it gets", low=20, high=300)
    minutes: int = setting(30, help="how long it bakes", above=0, below=600)
    mode: str = setting("fan", help="where the heat comes from", choices=("fan", "grill"))
    light: bool = setting(False, help="whether the lamp is on")
    probe: float | None = setting(None, help="stop at this core temperature", above=0)
    shelf: int = setting(help="which shelf, from below", low=1)
    notes: str = "free text, not a setting"

    def __post_init__(self) -> None:
        check(self, where="oven.")


def message(**settings: object) -> str:
    with pytest.raises(FedeveError) as caught:
        Oven(**{"shelf": 1, **settings})
    return str(caught.value)


def assert_three_parts(error: FedeveError) -> None:
    text = str(error)
    assert "\n" not in text
    assert error.what and error.do
    assert text.startswith(f"{error.what}: got ")
    assert text.endswith(f"; {error.do}")


def test_good_values_are_taken_as_they_are():
    oven = Oven(degrees=200, minutes=1, mode="grill", light=True, probe=60.5, shelf=3)
    assert (oven.degrees, oven.minutes, oven.mode, oven.light, oven.probe, oven.shelf) == (
        200,
        1,
        "grill",
        True,
        60.5,
        3,
    )


@pytest.mark.parametrize("degrees", [20, 300, 20.0, 299.99])
def test_closed_bounds_include_their_ends(degrees):
    assert Oven(degrees=degrees, shelf=1).degrees == degrees


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"degrees": 19.9}, "at least 20"),
        ({"degrees": 301}, "at most 300"),
        ({"minutes": 0}, "above 0"),
        ({"minutes": 600}, "below 600"),
        ({"probe": 0.0}, "above 0"),
        ({"shelf": 0}, "at least 1"),
    ],
)
def test_values_out_of_bounds_are_refused(bad, words):
    name, value = next(iter(bad.items()))
    text = message(**bad)
    assert f"oven.{name} must be {words}" in text
    assert f"got {value!r}" in text


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"degrees": "180"}, "a number"),
        ({"degrees": None}, "a number"),
        ({"degrees": [180.0]}, "a number"),
        ({"minutes": 30.0}, "a whole number"),
        ({"minutes": "30"}, "a whole number"),
        ({"mode": 1}, "a text"),
        ({"mode": None}, "a text"),
        ({"light": 1}, "true or false"),
        ({"light": "yes"}, "true or false"),
        ({"probe": "hot"}, "a number or left out"),
    ],
)
def test_wrong_types_are_refused_in_words(bad, words):
    name = next(iter(bad))
    assert f"oven.{name} must be {words}" in message(**bad)


@pytest.mark.parametrize("name", ["degrees", "minutes", "probe", "shelf"])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_not_a_number(name, value):
    assert "number" in message(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["degrees", "probe"])
def test_numbers_that_are_not_finite_are_refused(name, value):
    assert f"oven.{name} must be finite" in message(**{name: value})


@pytest.mark.parametrize("value", [np.float64(19.0), np.float64("nan"), np.float64(1e9)])
def test_numpy_numbers_are_checked_as_pythons_are(value):
    assert "oven.degrees must be" in message(degrees=value)


def test_a_whole_number_beyond_all_floats_is_refused_like_any_other():
    assert "oven.minutes is too large: got '401 digits'" in message(minutes=10**400)


def test_one_value_per_lane_is_let_through():
    lanes = torch.tensor([0.1, 0.9])
    assert dataclasses.replace(FedAvgM(), beta=lanes).beta is lanes


def test_an_unknown_choice_names_the_nearest_known_one():
    text = message(mode="gril")
    assert "oven.mode" in text
    assert "did you mean 'grill'?" in text
    assert "known: fan, grill" in text


def test_an_unknown_choice_near_to_none_still_lists_them():
    text = message(mode="xyz")
    assert "did you mean" not in text
    assert "known: fan, grill" in text


@pytest.mark.parametrize(
    "bad",
    [{"degrees": 1e9}, {"degrees": "hot\nhotter"}, {"mode": "gr\nill"}, {"minutes": 2.5}, {"probe": float("nan")}],
)
def test_a_message_has_three_parts_in_one_line(bad):
    with pytest.raises(FedeveError) as caught:
        Oven(shelf=1, **bad)
    assert_three_parts(caught.value)


def test_a_long_value_is_cut_short():
    text = message(degrees="x" * 10_000)
    assert len(text) < 400
    assert "..." in text


# From a table.


def test_a_table_builds_the_same_as_keywords():
    assert build(Oven, {"shelf": 2, "mode": "grill"}) == Oven(shelf=2, mode="grill")


@pytest.mark.parametrize(("key", "near"), [("degree", "degrees"), ("minuts", "minutes"), ("Mode", "mode")])
def test_an_unknown_key_names_the_nearest_known_one(key, near):
    with pytest.raises(FedeveError) as caught:
        build(Oven, {"shelf": 1, key: 3}, where="oven.")
    assert f"unknown setting 'oven.{key}'" in str(caught.value)
    assert f"did you mean '{near}'?" in str(caught.value)
    assert_three_parts(caught.value)


def test_an_unknown_key_like_no_other_lists_the_known_ones():
    with pytest.raises(FedeveError) as caught:
        build(Oven, {"shelf": 1, "qqq": 3})
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in ("degrees", "minutes", "mode", "shelf"))


def test_a_bad_value_in_a_table_is_named_by_its_full_path():
    with pytest.raises(FedeveError, match=r"kitchen\.oven\.degrees must be a number"):
        build(Oven, {"shelf": 1, "degrees": "warm"}, where="kitchen.oven.")


def test_a_method_is_made_by_name_with_its_hyper_parameters():
    assert create("fedavgm", beta=0.5) == FedAvgM(beta=0.5)
    assert create("fedeve", drift="released") == FedEve(drift="released")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fedeva", {}, "did you mean 'fedeve'?"),
        ("fedavgm", {"btea": 0.5}, "did you mean 'beta'?"),
        ("fedavgm", {"beta": 1.0}, "method.beta must be below 1"),
        ("fedeve", {"drift": "papr"}, "did you mean 'paper'?"),
    ],
)
def test_a_method_by_a_wrong_name_or_value_is_refused_with_advice(name, options, words):
    with pytest.raises(FedeveError) as caught:
        create(name, **options)
    assert words in str(caught.value)
    assert_three_parts(caught.value)


def test_describe_gives_defaults_and_help_of_settings_only():
    described = describe(Oven)
    assert described["degrees"] == (180.0, "how hot it gets")
    assert described["shelf"] == (dataclasses.MISSING, "which shelf, from below")
    assert "notes" not in described
