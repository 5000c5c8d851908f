"""What a measurement must say about where it was made, and where results go."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine, its load and the versions, at this moment."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "date": str(date.today()),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result with its machine to benchmarks/results/NAME.json and print it."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"benchmark": name, **result, "machine": machine()}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)
