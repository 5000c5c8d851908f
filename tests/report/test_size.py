"""A page of 400 long runs, made by benchmarks/report.py: small enough to send, quick enough to open."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from fedeve.report import page, results

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("bench_report", BENCHMARKS / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.browser
def test_a_page_of_400_runs_of_1500_rounds_stays_under_ten_megabytes_and_opens_in_three_seconds(
    bench: Any, browser: Any, tmp_path: Path
) -> None:
    bench.build(tmp_path / "sweep", every=10)
    path = tmp_path / "report.html"
    page.write_page(path, results.read([tmp_path / "sweep"]), title="400", made="here")
    assert path.stat().st_size < 10_000_000
    times = []
    for _ in range(5):  # the quickest: what the page needs, not what else the machine does
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        start = time.perf_counter()
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached")
        times.append(time.perf_counter() - start)
        assert tab.locator(".runs tbody tr").count() == 400
        tab.close()
    assert min(times) < 3


def test_a_run_takes_a_few_kilobytes_of_a_page_however_long_it_is(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = []
    for columns in (1, 2):
        monkeypatch.setattr(bench, "ROWS", 2)
        monkeypatch.setattr(bench, "COLUMNS", columns)
        bench.build(tmp_path / str(columns), every=10)
        found = results.read([tmp_path / str(columns)])
        sizes.append(len(page.render(found, title="t", made="m")))
    each = (sizes[1] - sizes[0]) / 10
    assert each * 400 + 2_500_000 < 10_000_000
