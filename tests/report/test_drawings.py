"""Figures are put into the page as drawings and as nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedeve.errors import FedeveError
from fedeve.report.drawings import clean, drawings

PLAIN = b"""<?xml version="1.0"?><!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://example.org/svg11.dtd">
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="400pt" height="200pt"
 viewBox="0 0 400 200"><metadata><x xmlns="http://other">hm</x></metadata><defs><path id="m" d="M0 0h3"/></defs>
<style>*{stroke-linejoin: round}</style><g clip-path="url(#m)"><use xlink:href="#m" x="3"/>
<text>5 &lt; 6</text></g></svg>"""


def figures(folder: Path, *items: dict[str, str]) -> Path:
    path = folder / "figures.json"
    path.write_text(json.dumps(items))
    return path


def test_a_drawing_keeps_its_shapes_and_references_and_takes_the_pages_width() -> None:
    text = clean(PLAIN)
    assert text.startswith("<svg ") and 'viewBox="0 0 400 200"' in text and "width=" not in text
    assert 'href="#m"' in text and 'clip-path="url(#m)"' in text and "5 &lt; 6" in text and "<style>" in text
    assert "DOCTYPE" not in text and "metadata" not in text


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        '<g onload="alert(1)"/>',
        '<a href="javascript:alert(1)"><text>x</text></a>',
        '<image href="https://example.org/x.png"/>',
        '<image href="data:image/svg+xml;base64,AAAA"/>',
        '<foreignObject><b xmlns="http://www.w3.org/1999/xhtml" onclick="alert(1)">x</b></foreignObject>',
        '<rect style="fill:url(https://example.org/x)"/>',
        "<style>@import 'https://example.org/x.css';</style>",
        '<script xmlns="http://www.w3.org/1999/xhtml">alert(1)</script>',
        '<set attributeName="href" to="javascript:alert(1)"/>',
    ],
)
def test_what_is_not_drawing_is_left_out(evil: str) -> None:
    text = clean(f'<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0"/>{evil}</svg>'.encode())
    assert "path" in text
    for word in ("alert", "example.org", "script", "svg+xml"):
        assert word not in text


def test_entities_are_not_expanded() -> None:
    bomb = b'<!DOCTYPE svg [<!ENTITY a "aaaa">]><svg xmlns="http://www.w3.org/2000/svg"><text>&a;</text></svg>'
    with pytest.raises(ValueError, match="undefined entity"):
        clean(bomb)


def test_figures_are_listed_with_their_texts_and_files(tmp_path: Path) -> None:
    (tmp_path / "one.svg").write_bytes(PLAIN)
    path = figures(tmp_path, {"title": "T", "svg": "one.svg", "csv": "one.csv", "reading": "It grows.", "caption": "C"})
    (found,) = drawings([path])
    assert (found.title, found.reading, found.caption, found.problem) == ("T", "It grows.", "C", "")
    assert found.files == (str(tmp_path / "one.csv"),) and found.svg.startswith("<svg")


def test_a_figure_that_is_missing_or_broken_says_so_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "torn.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><g>")
    (tmp_path / "text.svg").write_text("nothing")
    path = figures(tmp_path, *({"title": name, "svg": f"{name}.svg"} for name in ("gone", "torn", "text")))
    gone, torn, text = drawings([path])
    assert "cannot read" in gone.problem and "gone.svg" in gone.problem
    assert "not an SVG" in torn.problem and "no <svg>" in text.problem


@pytest.mark.parametrize("content", ["{}", '[{"title": "x"}]', "["])
def test_a_damaged_list_of_figures_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "figures.json").write_text(content)
    with pytest.raises(FedeveError, match=r"figures\.json is damaged"):
        drawings([tmp_path / "figures.json"])
