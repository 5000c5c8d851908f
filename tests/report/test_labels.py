"""Names made from configurations."""

from __future__ import annotations

from typing import Any

from fedeve.report.labels import flatten, labels, shared


def config(**changes: Any) -> dict[str, Any]:
    base = {"rounds": 10, "seed": 1, "method": {"name": "fedavg", "server_lr": 1.0}, "local": {"epochs": 1, "lr": 0.1}}
    return base | {"data": {"name": "digits", "alpha": 0.1}, "model": {"name": "linear"}} | changes


def test_what_all_have_in_common_is_not_in_the_names() -> None:
    assert labels([config(), config(seed=2)]) == [("FedAvg", "digits"), ("FedAvg", "digits")]


def test_settings_that_differ_name_the_column_and_the_methods_own_the_row() -> None:
    one = config(local={"epochs": 5, "lr": 0.1})
    two = config(method={"name": "fedeve", "server_lr": 1.0, "drift": "paper"})
    three = config(method={"name": "fedeve", "server_lr": 1.0, "drift": "released"})
    assert labels([one, two, three]) == [
        ("FedAvg", "digits, epochs=5"),
        ("FedEve, drift=paper", "digits, epochs=1"),
        ("FedEve, drift=released", "digits, epochs=1"),
    ]


def test_a_setting_that_follows_the_seed_names_nothing() -> None:
    runs = [config(seed=s, data={"name": "digits", "seed": s, "root": f"/somewhere/{s}"}) for s in (3, 4)]
    assert labels(runs) == [("FedAvg", "digits")] * 2


def test_two_settings_of_one_name_are_told_apart() -> None:
    runs = [config(local={"alpha": a}, data={"name": "digits", "alpha": a + 1}) for a in (1, 2)]
    assert labels(runs)[0][1] == "digits, local.alpha=1, data.alpha=2"


def test_a_method_of_ones_own_keeps_its_name() -> None:
    assert labels([config(method={"name": "mine"})]) == [("mine", "digits")]


def test_shared_settings_are_those_that_every_configuration_has_with_one_value() -> None:
    found = shared([config(), config(seed=2, method={"name": "fedeve"})])
    assert found == {"rounds": 10, "local.epochs": 1, "local.lr": 0.1, "data.name": "digits", "data.alpha": 0.1,
                     "model.name": "linear"}  # fmt: skip


def test_flatten_joins_keys_with_dots() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": [2]}) == {"a.b.c": 1, "d": [2]}
