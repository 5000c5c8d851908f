"""`fedeve paper fig2a` and so on: one command per figure of the paper's analysis."""

from __future__ import annotations

import typer

from ..options import Command, with_options
from .commands import FigureOptions, GridOptions, Out, make

FROM_RUNS = ("fig2b", "gain")

HELP = {
    "fig2a": "Draw the classes that the sampled clients bring over 20 rounds.",
    "fig2b": "Draw FedAvg under four conditions: iid, only period drift, only client drift, both.",
    "gaussian": "Draw whether both drifts of parameters are normal, with p-values.",
    "gain": "Draw boxes of FedEve's gain by heterogeneity and local epochs.",
    "noise": "Draw how period drift differs from the noise of SGD.",
    "law": "Draw the laws of sampling, for label mixes and gradients, beside what is measured.",
    "bound": "Draw the convergence bound's error term on a quadratic beside what really stays.",
}


def add(app: typer.Typer) -> None:
    """Add a command for every figure."""
    for name, help in HELP.items():
        app.command(name, help=f"{help}\n\nExample: fedeve paper {name} --out figures --size tiny")(_command(name))


def _command(name: str) -> Command:
    @with_options(GridOptions if name in FROM_RUNS else FigureOptions)
    def command(out: Out, *, options: FigureOptions) -> None:
        make([name], out, options)

    return command
