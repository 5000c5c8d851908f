"""The figures of the paper's analysis by name, and what makes them into a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import unknown
from .gradient_figures import gaussian, noise
from .lab import Lab, one_thread
from .label_figures import bound_figure, fig2a, law
from .style import Drawing, save
from .training_figures import fig2b, gain

FIGURES: dict[str, Callable[[Lab], Drawing]] = {
    "fig2a": fig2a,
    "law": law,
    "bound": bound_figure,
    "noise": noise,
    "gaussian": gaussian,
    "gain": gain,
    "fig2b": fig2b,
}
"""Quick ones first."""


def make(lab: Lab, names: Iterable[str] = FIGURES) -> list[dict[str, str]]:
    """Make figures into the lab's folder; returns their entries in its figures.json."""
    chosen = list(names)
    for name in chosen:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    entries = []
    for number, name in enumerate(chosen, start=1):
        lab.tell(f"figure {number} of {len(chosen)}: {name}")
        with one_thread():
            entries.append(save(FIGURES[name](lab), lab.out))
    return entries
