"""What all tests share: small federations, and one thread, since two collapse when the other core is busy."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels then run on the CPU, slowly, so that they can be tested there

from fedeve import FederatedData, FedEve, LocalWork, Run, datasets

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C


@pytest.fixture(scope="session")
def digits() -> FederatedData:
    """Real digits dealt to 30 clients with skewed labels."""
    return datasets.load("digits", partition="dirichlet", alpha=0.3, num_clients=30)


@pytest.fixture
def small_run(digits: FederatedData) -> Any:
    """Makes small runs; keywords replace the defaults."""

    def make(**changes: Any) -> Run:
        defaults: dict[str, Any] = {"method": FedEve(), "data": digits, "model": "linear", "rounds": 6, "cohort": 5}
        defaults |= {"seed": 7, "eval_every": 2, "local": LocalWork(lr=0.1)}
        return Run(**(defaults | changes))

    return make
