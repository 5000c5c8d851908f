"""Drawings: the figures that a figures.json lists, made fit to stand inside a page.

An SVG is a document that may hold scripts and addresses. What is let through is drawing alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..errors import FedeveError, Words
from .results import read_json

_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_NOT_DRAWING = {"script", "foreignObject", "iframe", "handler", "a", "animate", "set"}


@dataclass(frozen=True)
class Drawing:
    """One figure: its texts, its SVG ready to be put into a page, and the files beside it."""

    title: str
    svg: str
    caption: str
    reading: str
    files: tuple[str, ...]
    """Paths of the CSV and PNG, as they are shown."""
    problem: str = ""


def drawings(paths: Iterable[Path]) -> list[Drawing]:
    """The figures of every figures.json; one whose file is missing or broken says so in its place."""
    return [_drawing(path, item) for path in paths for item in _items(path)]


def _items(path: Path) -> list[dict[str, Any]]:
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(item, dict) and "svg" in item for item in listed):
        raise FedeveError(
            f"{path} is damaged", got=Words("not a list of figures with an svg each"), do="draw the figures again"
        )
    return listed


def _drawing(path: Path, item: dict[str, Any]) -> Drawing:
    text = {key: str(item.get(key, "")) for key in ("title", "caption", "reading")}
    files = tuple(str(path.parent / item[key]) for key in ("csv", "png") if item.get(key))
    source = path.parent / str(item["svg"])
    try:
        return Drawing(svg=clean(source.read_bytes()), files=files, **text)
    except OSError as error:
        return Drawing(svg="", files=files, problem=f"cannot read {source}: {error.strerror}", **text)
    except ValueError as error:
        return Drawing(svg="", files=files, problem=f"{source} is not an SVG: {error}", **text)


def clean(content: bytes) -> str:
    """An SVG without document type, metadata, scripts, event handlers and outside addresses."""
    start = content.find(b"<svg")
    if start < 0:
        raise ValueError("it has no <svg> element")
    try:
        # Entities can only be declared before the root, and that is cut off.
        root = ElementTree.fromstring(content[start:])
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from None
    _clean(root)
    for side in ("width", "height"):  # the page decides how wide, the viewBox keeps the proportions
        if "viewBox" in root.attrib:
            root.attrib.pop(side, None)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    for inner in list(element):
        space, _, name = str(inner.tag).rpartition("}")
        if space != "{" + _SVG or name in _NOT_DRAWING or name == "metadata":
            element.remove(inner)
        else:
            _clean(inner)
    for name, value in list(element.attrib.items()):
        plain = name.rpartition("}")[2].lower()
        outside = plain in ("href", "src") and not value.strip().startswith(("#", "data:image/png", "data:image/jpeg"))
        if plain.startswith("on") or outside or _reaches_out(value):
            del element.attrib[name]
    if element.tag == f"{{{_SVG}}}style" and _reaches_out(element.text or ""):
        element.text = ""


def _reaches_out(style: str) -> bool:
    """Whether a value has an address that is not a fragment of the same drawing."""
    return bool(re.search(r"url\(\s*['\"]?(?!#)|@import|javascript:", style, re.IGNORECASE))
