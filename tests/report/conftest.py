"""The small sweep, run once, and a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_sweep import build

from fedeve.report import results

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("made") / "sweep"
    build(folder)
    return folder


@pytest.fixture
def sweep(made: Path, tmp_path: Path) -> Path:
    """A copy of the sweep to change."""
    return Path(shutil.copytree(made, tmp_path / "sweep"))


@pytest.fixture
def section(made: Path) -> results.Section:
    return results.read([made]).sections[0]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real headless Chromium of this machine."""
    if BROWSER is None and not os.environ.get("FEDEVE_REQUIRE_BROWSER"):
        pytest.skip("no Chromium on this machine; CI installs and requires it")
    assert BROWSER is not None, "FEDEVE_REQUIRE_BROWSER is set, but there is no Chromium"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()
