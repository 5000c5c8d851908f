"""Configuration: a TOML (or JSON) file becomes a `Run`: `check(read(path)).build()`.
Every key is checked before any data is read.

```toml
rounds = 200
cohort = 10
model = "lenet5"
seed = 192

[method]
name = "fedeve"

[data]
name = "glyphs"
partition = "dirichlet"
alpha = 0.1

[local]
lr = 0.05
```
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import methods, models, settings
from ..data import datasets
from ..data.federated import FederatedData
from ..errors import FedeveError, Words, unknown
from ..local import LocalWork
from ..method import Method
from ..run import Run

Table = dict[str, Any]
TABLES = ("method", "data", "local", "model")
_PLAIN = [field.name for field in dataclasses.fields(Run) if field.name not in (*TABLES, "model_options")]


def presets() -> dict[str, Path]:
    """The settings of the paper's experiments that come with the package, by name: `paper/cifar100-dirichlet-0.1`."""
    folder = Path(__file__).parent / "paper"
    return {f"paper/{path.stem}": path for path in sorted(folder.glob("*.toml"))}


def read(path: str | Path) -> Table:
    """The table in a TOML or JSON file, or of a preset."""
    if str(path).startswith("paper/") and not Path(path).exists():
        if str(path).removesuffix(".toml") not in presets():
            raise unknown("preset", str(path), presets())
        path = presets()[str(path).removesuffix(".toml")]
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FedeveError(
            "cannot read the configuration", got=Words(f"{path}: {error.strerror}"), do="check the path"
        ) from error
    except UnicodeDecodeError:
        raise FedeveError("the configuration is not text", got=str(path), do="give a TOML file in UTF-8") from None
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise FedeveError(
            f"{path} is not valid {path.suffix[1:].upper() or 'TOML'}", got=Words(str(error)), do="mend that line"
        ) from None
    if not isinstance(table, dict):
        raise FedeveError(f"{path} must hold a table", got=table, do="write key = value lines")
    return table


def override(table: Mapping[str, Any], assignments: Iterable[str]) -> Table:
    """The table with assignments such as `local.lr=0.05` put in; values are TOML, and a bare word is a text."""
    result = copy(table)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path):
            raise FedeveError("cannot set this", got=assignment, do="write KEY=VALUE, for example --set local.lr=0.05")
        put(result, path, _value(text.strip()))
    return result


def put(table: Table, path: list[str], value: Any) -> None:
    """Set a key, given by its path through the tables, in place."""
    for part in path[:-1]:
        inner = table.get(part, {})
        # `method = "fedeve"` is short for a table with a name.
        table[part] = inner = {"name": inner} if isinstance(inner, str) else inner
        if not isinstance(inner, dict):
            raise FedeveError(f"{part} is not a table", got=".".join(path), do=f"set {part} itself")
        table = inner
    table[path[-1]] = value


@dataclass(frozen=True)
class Plan:
    """A checked configuration, before its data is loaded."""

    method: Method
    dataset: datasets.Dataset
    local: LocalWork
    plain: Table

    def build(self, data: FederatedData | None = None) -> Run:
        """Make the run, on data that was loaded already or is loaded now."""
        return Run(method=self.method, data=data or self.dataset.load(), local=self.local, **self.plain)

    def describe(self) -> Table:
        """What the run's `describe()` will say, without loading its data."""
        given = {field.name: self.plain.get(field.name, field.default) for field in dataclasses.fields(Run)}
        return {
            **settings.as_kept(Run, {key: given[key] for key in _PLAIN}),
            "model": {"name": self.plain["model"], **self.plain["model_options"]},
            "method": {"name": self.method.name, **dataclasses.asdict(self.method)},
            "local": self.local.describe(),
            "data": {"name": self.dataset.name, **dataclasses.asdict(self.dataset)},
        }


def check(table: Mapping[str, Any]) -> Plan:
    """Check every key and value of a table."""
    for key in table:
        if key not in (*_PLAIN, *TABLES):
            raise unknown(f"key {key!r}", key, (*_PLAIN, *TABLES))
    plain = {key: value for key, value in table.items() if key in _PLAIN}
    settings.check_table(Run, plain, kind="key")
    model = _named("model", table.get("model", "lenet5"))
    plain |= {"model": model.pop("name"), "model_options": model}
    models.check(plain["model"], model)
    return Plan(
        method=methods.create(**_named("method", table.get("method", "fedeve"))),
        dataset=datasets.create(**_named("data", table.get("data", "glyphs"))),
        local=settings.build(LocalWork, _table("local", table.get("local", {})), where="local."),
        plain=plain,
    )


def _named(key: str, value: Any) -> Table:
    table = {"name": value} if isinstance(value, str) else dict(_table(key, value))
    if not isinstance(table.get("name"), str):
        raise FedeveError(f"[{key}] needs a name", got=table, do=f'write name = "..." below [{key}]')
    return table


def _table(key: str, value: Any) -> Table:
    if not isinstance(value, dict):
        raise FedeveError(f"{key} must be a table", got=value, do=f"write [{key}] and its settings below it")
    return value


def copy(table: Mapping[str, Any]) -> Table:
    return {key: copy(value) if isinstance(value, dict) else value for key, value in table.items()}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
