"""An app as Flower's quickstart has it trains with our strategies once one import has changed."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedeve[flower]'")

from flwr.app import Context, RecordDict
from local_grid import LocalGrid, clients

OLD = "from flwr.serverapp.strategy import FedAvg"
NEW = "from fedeve.flower import FedEve as FedAvg"
SOURCE = (Path(__file__).parent / "quickstart.py").read_text()
DOCS = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()


def final(source: str, lr: float = 0.01, rounds: int = 15) -> dict[str, float]:
    module = types.ModuleType("app")
    exec(compile(source, "app", "exec"), module.__dict__)
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={"lr": lr, "num-server-rounds": rounds}
    )
    torch.manual_seed(0)
    module.app(LocalGrid(clients(module.client_app, 6), 6), context)
    return dict(context.state["final"])


@pytest.mark.parametrize("line", [OLD, NEW, NEW.replace("FedEve", "FedAdam")], ids=["flower", "fedeve", "fedadam"])
def test_a_quickstart_app_trains_when_nothing_but_an_import_changes(line):
    assert SOURCE.count(OLD) == 1
    accuracy = final(SOURCE.replace(OLD, line))["eval_acc"]
    assert accuracy > (0.12 if "FedAdam" in line else 0.7)  # FedAdam moves a parameter by 1e-3 a round


def test_the_documentation_shows_that_change():
    assert f"-{OLD}\n+{NEW}\n" in DOCS
