"""The Flower strategy's server: memory by cohort size, and time per round beside Flower's FedAvg.

`python benchmarks/flower.py [quick]`. Each figure is from a process of its own. Replies are made when they are pulled,
as a SuperLink would hand them over; nothing but the server's side is measured.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from machine import save

from fedeve.flower import FedEve

SIZES = {"params": 10_000_000, "cohorts": (10, 100, 1000)}
QUICK = {"params": 1_000_000, "cohorts": (10, 50)}
LIMIT_GIB = 12.0  # more than this is not tried: Flower's FedAvg holds every reply


class Replies(Grid):
    """A grid whose nodes answer when asked; the time that making replies takes is kept apart."""

    def __init__(self, num_params: int, cohort: int) -> None:
        self.base = np.random.default_rng(0).normal(size=num_params).astype(np.float32) * 1e-3
        self.cohort, self.made = cohort, 0.0
        self.waiting: dict[str, Message] = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n + 2, registered_at=f"{n:06d}") for n in range(self.cohort)]

    def get_node_ids(self) -> Iterable[int]:
        return [n + 2 for n in range(self.cohort)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self.waiting[message.metadata.message_id] = message
        return [m.metadata.message_id for m in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        begun, replies = time.perf_counter(), []
        for name in list(message_ids):
            message = self.waiting.pop(name)
            end = self.base * (1 + message.metadata.dst_node_id % 7) + message.metadata.dst_node_id * 1e-5
            content = {"arrays": ArrayRecord({"w": Array(end)}), "metrics": MetricRecord({"num-examples": 10})}
            replies.append(Message(content=RecordDict(content), reply_to=message))
        self.made += time.perf_counter() - begun
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def measure(kind: str, num_params: int, cohort: int) -> dict[str, float]:
    """One round of a strategy over `cohort` replies: the peak of memory above the start, and the seconds."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    grid = Replies(num_params, cohort)
    options = {"fraction_evaluate": 0.0, "min_available_nodes": cohort}
    strategy = FedEve(**options) if kind == "fedeve" else FedAvg(**options)
    initial = ArrayRecord({"w": Array(np.zeros(num_params, dtype=np.float32))})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    strategy.start(grid, initial, num_rounds=1)
    seconds = time.perf_counter() - begun - grid.made
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_above_start_mib": round((peak - before) / 1024, 1), "server_seconds": round(seconds, 2)}


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "one":
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        return
    sizes = QUICK if sys.argv[1:] == ["quick"] else SIZES
    num_params = int(sizes["params"])  # type: ignore[call-overload]
    result: dict[str, Any] = {"num_params": num_params, "vector_mib": round(num_params * 4 / 2**20, 1)}
    for cohort in sizes["cohorts"]:  # type: ignore[attr-defined]
        for kind in ("fedeve", "flower_fedavg"):
            if kind != "fedeve" and cohort * num_params * 8 / 2**30 > LIMIT_GIB:
                result[f"{kind}_{cohort}"] = "not run: it would hold every reply"
                continue
            print(f"{kind}, {cohort} replies ...", file=sys.stderr, flush=True)
            done = subprocess.run(
                [sys.executable, __file__, "one", kind, str(num_params), str(cohort)],
                capture_output=True,
                text=True,
                check=True,
            )
            result[f"{kind}_{cohort}"] = json.loads(done.stdout.splitlines()[-1])
    save("flower-quick" if sizes is QUICK else "flower", result)


if __name__ == "__main__":
    main()
