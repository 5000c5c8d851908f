"""What the server's part of a round costs for a large model, updates there already. `python benchmarks/server.py`.

Ten clients of ResNet-18's size, FedEve, one thread. Beside it the same with every update in float64 at once. Each is
measured in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from machine import save

NUMBERS, CLIENTS, ROUNDS = 11_220_132, 10, 5
WHOLE = "whole"


def measure(how: str) -> dict[str, float]:
    """Seconds of a round and the memory it takes beyond updates and state."""
    from fedeve import FedEve, summary
    from fedeve.engines.server import Replies, close

    torch.set_num_threads(1)
    if how == WHOLE:
        summary._BLOCK = NUMBERS
    method, updates = FedEve(), torch.randn(CLIENTS, NUMBERS, generator=torch.Generator().manual_seed(0))
    replies = Replies(updates, torch.full((CLIENTS,), 100.0), torch.full((CLIENTS,), 5.0), {})
    state = method.init(torch.zeros(NUMBERS))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        state = close(method, state, replies, 0.01).state
        seconds.append(time.perf_counter() - begun)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds_a_round": round(sorted(seconds)[ROUNDS // 2], 2), "memory_mib": round(grown / 1024)}


def apart(how: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        subprocess.run([sys.executable, __file__, how], check=True, capture_output=True, text=True).stdout
    )
    return found


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
        return
    save("server", {"clients": CLIENTS, "numbers": NUMBERS, "in_blocks": apart("blocks"), WHOLE: apart(WHOLE)})


if __name__ == "__main__":
    main()
