"""What the documentation names exists, and what it shows is so."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedeve import all_methods
from fedeve.experiments import catalogue

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EQUATIONS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in (ROOT / "docs/equations.md").read_text().splitlines()
    if line.startswith("|") and "`fedeve." in line
]


def resolve(dotted: str) -> object:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name)
        return value
    raise ModuleNotFoundError(dotted)


def test_the_table_of_equations_is_read() -> None:
    assert len(EQUATIONS) >= 20


@pytest.mark.parametrize("row", EQUATIONS, ids=lambda row: row[0])
def test_every_equation_has_its_function_and_its_test(row: list[str]) -> None:
    function, test = row[-2].strip("`"), row[-1].strip("`")
    assert resolve(function) is not None
    path, name = test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page is called."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    words = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading)) for heading in headings]
    return {each.strip().lower().replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_the_readme_shows_the_table_of_methods_as_it_is() -> None:
    assert catalogue.methods_markdown() in (ROOT / "README.md").read_text()


def test_the_worked_example_shows_the_file_that_is_shipped() -> None:
    source = (ROOT / "src/fedeve/methods/feddyn.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert len(blocks) >= 5
    for block in blocks:
        assert block.rstrip("\n") in source, block


@pytest.mark.parametrize("page", ["README.md", "docs/data.md", "docs/drift.md"])
def test_pythons_examples_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, timeout=300, capture_output=True, cwd=tmp_path)


def test_every_method_has_its_file_in_the_readme_table() -> None:
    assert set(catalogue.methods()) == set(all_methods())
    for about in catalogue.methods().values():
        assert about["cost"].endswith(".") and "vector" in about["cost"] and about["reference"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path: Path) -> None:
    from fedeve.experiments import config, sweep

    if "grid" in config.read(path):
        assert sweep.read(path).points
    else:
        config.check(config.read(path))
