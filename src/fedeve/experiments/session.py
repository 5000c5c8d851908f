"""What a session of a sweep leaves in `sweep.json`: its command, the machine, when it began and how long it took."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Options that change no number, only where files lie, what is shown and how much of the sweep is played at a time.
_FLAGS = ("--json", "--retry", "--no-calibration", "--profile", "--debug")
_VALUES = ("--out", "--budget", "--checkpoint-every", "--track", "--root")


def command_line(arguments: Sequence[str]) -> str:
    """The command behind a table, without what does not matter to its numbers.

    >>> command_line(["paper", "table2", "--out", "t2", "--device", "cuda", "--budget=9m", "--seeds", "3"])
    'fedeve paper table2 --device cuda --seeds 3'
    """
    kept, rest = ["fedeve"], iter(arguments)
    for argument in rest:
        if argument in _VALUES:
            next(rest, None)
        elif argument not in _FLAGS and argument.split("=")[0] not in _VALUES:
            kept.append(argument)
    return shlex.join(kept)


def machine(device: str) -> str:
    """The name of the GPU, or of the processor where no GPU is used."""
    import torch

    from ..run import choose_device

    chosen = choose_device(device)
    return str(torch.cuda.get_device_name(chosen)) if chosen.type == "cuda" else _processor()


def begun(arguments: Sequence[str], machine: str) -> dict[str, Any]:
    """A session that begins now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command_line(arguments), "machine": machine, "begun": now, "seconds": 0.0}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())
