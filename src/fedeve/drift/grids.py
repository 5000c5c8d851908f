"""Grids of runs behind figures, as sweeps: each lies in a folder of its own and is played as any other sweep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..experiments import config as configs
from ..experiments.sweep import Point, Sweep
from ..experiments.sweep_folder import SweepFolder
from ..record import Record, recorded
from .conditions import CONDITIONS
from .lab import Lab


@dataclass(frozen=True)
class Cell:
    """One run of a grid, and what it stands for."""

    keys: dict[str, Any]
    point: Point


@dataclass(frozen=True)
class Grid:
    """The runs of a figure; `name` is the figure's, and its folder's."""

    name: str
    title: str
    cells: list[Cell]

    def sweep(self, last: int) -> Sweep:
        """The grid as a sweep; its folder may hold more: other alphas, epochs and seeds of the same title."""
        return Sweep(self.title, [cell.point for cell in self.cells], ["accuracy"], last, grows=True)


def conditions(lab: Lab) -> Grid:
    """Of figure 2b: four conditions, by alpha, by epochs, by seed; iid does not depend on alpha."""
    size, cells = lab.size, []
    for seed in size.seeds:
        for epochs in size.epochs:
            for name, condition in CONDITIONS.items():
                for alpha in size.alphas if name != "iid" else size.alphas[:1]:
                    options = {"epochs": epochs, "seed": seed, **condition.run_options(alpha)}
                    table = lab.table("fedavg", condition.data_options(alpha), **options)
                    known = None if name == "iid" else alpha
                    keys = {"condition": name, "alpha": known, "epochs": epochs, "seed": seed}
                    row = condition.title + ("" if known is None else f", alpha {alpha:g}")
                    cells.append(Cell(keys, Point(configs.check(table), row, f"E {epochs}")))
    return Grid("fig2b", f"Figure 2b: FedAvg under four conditions ({size.data})", cells)


def gains(lab: Lab) -> Grid:
    """Of the gain's boxes: FedEve by partition, by epochs, by seed."""
    cells = []
    for seed in lab.size.seeds:
        for epochs in lab.size.epochs:
            for title, options in lab.partitions().items():
                table = lab.table("fedeve", options, epochs=epochs, seed=seed)
                keys = {"partition": title, "epochs": epochs, "seed": seed}
                cells.append(Cell(keys, Point(configs.check(table), f"FedEve, {title}", f"E {epochs}")))
    return Grid("gain", f"The Kalman gain by partition and local epochs ({lab.size.data})", cells)


GRIDS = {"fig2b": conditions, "gain": gains}
"""Of the figures that come from runs."""


def played(lab: Lab, grid: Grid) -> Iterator[tuple[Cell, Record]]:
    """Every cell with its record, after playing what is missing in the grid's folder."""
    lab.play(grid.sweep(lab.size.last), place(lab, grid))
    return records(lab, grid)


def records(lab: Lab, grid: Grid) -> Iterator[tuple[Cell, Record]]:
    """Every cell with its record; all of them lie in the grid's folder."""
    folder = SweepFolder(place(lab, grid), grid.sweep(lab.size.last))
    for cell in grid.cells:
        path = recorded(folder.folder(cell.point))
        assert path is not None  # whoever plays ends otherwise
        yield cell, Record.read(path)


def place(lab: Lab, grid: Grid) -> Path:
    """Where a grid's runs lie."""
    return lab.out / grid.name
