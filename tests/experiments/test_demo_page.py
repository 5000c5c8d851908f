"""The page says what the records say, stands alone, and a real browser shows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedeve import FedAvg, FedEve, Record, simulate
from fedeve.experiments.demo_page import rows, sentences, write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture
def groups(small_run: Any) -> dict[str, list[Record]]:
    return {
        "FedAvg": [simulate(small_run(method=FedAvg(), seed=seed)) for seed in (1, 2)],
        "FedEve": [simulate(small_run(method=FedEve(), seed=seed)) for seed in (1, 2)],
    }


@pytest.fixture
def page(groups: dict[str, list[Record]], tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    write_report(path, groups, title="A <test>", setting="5 & 6", last=2, footer="made here")
    return path


def test_the_table_holds_mean_and_deviation_over_seeds(groups: dict[str, list[Record]]) -> None:
    table = {row.label: row for row in rows(groups, last=2)}
    finals = [100 * record.metric("accuracy")[-1] for record in groups["FedEve"]]
    assert table["FedEve"].final == pytest.approx(np.mean(finals))
    assert table["FedEve"].deviation == pytest.approx(np.std(finals, ddof=1))
    best = np.mean([100 * record.metric("accuracy").max() for record in groups["FedEve"]])
    assert table["FedEve"].best == pytest.approx(best)


def test_rounds_to_the_goal_are_counted_or_said_not_to_be_reached() -> None:
    def record(*accuracies: float) -> Record:
        lines = [
            {"round": 10 * n, "accuracy": value, "facts": {}, "answered": [1] * 10}
            for n, value in enumerate(accuracies, start=1)
        ]
        return Record({"seed": 1}, lines)

    table = rows({"a": [record(0.1, 0.2, 0.5)], "b": [record(0.1, 0.5, 0.4)], "c": [record(0.1, 0.2, 0.3)]}, last=10)
    assert [row.reached for row in table] == ["30", "20", "not in 30"]


def test_three_sentences_tell_what_was_measured(groups: dict[str, list[Record]]) -> None:
    said = sentences(groups, last=2)
    assert len(said) == 3
    best = max(rows(groups, last=2), key=lambda row: row.final)
    assert f"2 seeds: {best.label} {best.final:.1f} %" in said[0]
    gain = np.median(np.concatenate([record.facts("gain") for record in groups["FedEve"]]))
    assert f"a median of {gain:.2f}" in said[1]
    assert "luck" in sentences({label: part[:1] for label, part in groups.items()}, last=2)[0]


def test_without_a_method_that_has_a_gain_the_page_still_comes(groups: dict[str, list[Record]], tmp_path: Path) -> None:
    only = {"FedAvg": groups["FedAvg"]}
    write_report(tmp_path / "report.html", only, title="t", setting="s", last=2)
    assert len(sentences(only, last=2)) == 1
    assert "What FedEve sees" not in (tmp_path / "report.html").read_text()


def test_the_page_stands_alone_and_escapes_what_it_is_given(page: Path) -> None:
    text = page.read_text()
    assert "A &lt;test&gt;" in text and "5 &amp; 6" in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", text)
    assert "<script" not in text and not re.findall(r"\$[a-z_]+", text)
    assert page.stat().st_size < 1_000_000


def test_the_same_records_give_the_same_page(page: Path, groups: dict[str, list[Record]], tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    write_report(again, groups, title="A <test>", setting="5 & 6", last=2, footer="made here")
    assert again.read_bytes() == page.read_bytes()


@pytest.mark.browser
@pytest.mark.skipif(
    BROWSER is None and not os.environ.get("FEDEVE_REQUIRE_BROWSER"),
    reason="no Chromium on this machine; CI installs and requires it",
)
def test_a_real_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    from PIL import Image

    assert BROWSER is not None, "FEDEVE_REQUIRE_BROWSER is set, but there is no Chromium"
    picture = tmp_path / "page.png"
    options = (*FLAGS, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,1600")
    command = [BROWSER, *options, "--enable-logging=stderr", f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    colours = {tuple(colour) for colour in np.unique(pixels, axis=0)}
    assert len(colours) > 50  # text and anti-aliased lines, not a blank page
    blue, green = (0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)
    assert {blue, green} & colours or any(abs(np.array(c) - blue).max() < 8 for c in colours)
