"""Names for runs that nobody named: the method and the data, and what differs between their configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PLACES = ("data.root", "data.path")  # where files lie does not change what is in them


def labels(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A row and a column for every configuration.

    >>> common = {"rounds": 10, "data": {"name": "digits", "alpha": 0.1}}
    >>> one, other = {"name": "fedeve", "drift": "paper"}, {"name": "fedeve", "drift": "released"}
    >>> labels([{**common, "method": one}, {**common, "method": other}])
    [('FedEve, drift=paper', 'digits'), ('FedEve, drift=released', 'digits')]
    """
    flat = [flatten(config) for config in configs]
    titles = _titles()
    setting = _differing(flat, [key for one in flat for key in one if not key.startswith("method.")])
    result = []
    for one in flat:
        name = one.get("method.name", "unknown method")
        same = [other for other in flat if other.get("method.name") == name]
        own = _differing(same, [key for key in one if key.startswith("method.")])
        column = str(one.get("data.name") or "own data")
        result.append((_words(titles.get(name, str(name)), one, own), _words(column, one, setting)))
    return result


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"data": {"alpha": 1}}` as `{"data.alpha": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all configurations have in common."""
    flat = [flatten(config) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one if key not in _PLACES)
    return {key: flat[0][key] for key in keys if all(key in one and one[key] == flat[0][key] for one in flat)}


def _differing(flat: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Keys whose value is not the same everywhere, but for the seed and what follows it."""
    chosen = []
    for key in dict.fromkeys(keys):
        if key in ("seed", "data.name", "method.name", *_PLACES) or all(
            one.get(key) == one.get("seed") for one in flat
        ):
            continue
        if len({repr(one.get(key)) for one in flat}) > 1:
            chosen.append(key)
    return chosen


def _words(name: str, config: Mapping[str, Any], keys: Sequence[str]) -> str:
    short = [key.split(".")[-1] for key in keys]
    named = {key: name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)}
    return ", ".join([name, *(f"{named[key]}={config[key]}" for key in keys if config.get(key) is not None)])


def _titles() -> dict[str, str]:
    from ..methods import all_methods

    return {name: cls.__name__ for name, cls in all_methods().items()}
