"""A federation that survives: `python deploy.py` starts a SuperLink and three SuperNodes on this machine, trains,
kills one node in mid-round, brings it back, kills the server, starts it again, and finishes.

Connections are encrypted (TLS) and every SuperNode proves who it is with its key. Certificates and keys are made here.
Takes a few minutes. `python deploy.py --help` says what can be changed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import signal
import tempfile
import time
from pathlib import Path

import safetensors
from federation import Federation


def rounds_done(checkpoint: Path) -> int:
    """What the server's checkpoint says."""
    if not checkpoint.exists():
        return 0
    with safetensors.safe_open(str(checkpoint), framework="pt") as file:
        return int(json.loads(file.metadata()["values"])["num_rounds"])


def notes(checkpoint: Path) -> tuple[dict[int, float], dict[str, list[dict[str, object]]]]:
    """Accuracy by round, and the replies that were left out."""
    with safetensors.safe_open(str(checkpoint), framework="pt") as file:
        history = json.loads(gzip.decompress(file.get_tensor("history").numpy().tobytes()))
    series = history["series"]["evaluate_metrics_serverapp"]
    return {int(number): metrics["accuracy"] for number, metrics in series.items()}, history["left_out"]


def play(folder: Path, *, method: str = "fedeve", rounds: int = 5, pause: float = 3.0, patience: float = 40.0) -> Path:
    """The whole story; returns the checkpoint, which tells it."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {text}", flush=True)

    checkpoint, result = folder.resolve() / "state.safetensors", folder.resolve() / "result.safetensors"
    config = {
        "method": method, "num_rounds": rounds, "fraction_train": 1.0, "min_nodes": 3, "pause": pause,
        "timeout": patience, "checkpoint": str(checkpoint), "result": str(result),
    }  # fmt: skip
    with Federation(folder, num_nodes=3) as federation:
        say(f"SuperLink on port {federation.port}, three SuperNodes registered; training {rounds} rounds of {method}")
        federation.run(**config)
        federation.wait(lambda: rounds_done(checkpoint) >= 1, "the first round", seconds=300)
        say("round 1 is done")
        time.sleep(pause / 2)
        federation.nodes[2].stop(signal.SIGKILL)
        say("killed node 2 in the middle of round 2")
        federation.wait(lambda: rounds_done(checkpoint) >= 2, "the second round", seconds=300)
        say("round 2 is done without it")
        federation.revive(2)
        say("node 2 is back")
        federation.wait(lambda: rounds_done(checkpoint) >= 3, "the third round", seconds=300)
        federation.link.stop(signal.SIGKILL)
        say(f"killed the server after round {rounds_done(checkpoint)}")
        federation.start_link()
        run = federation.run(**config)
        say("the server is back and continues from its checkpoint")
        federation.wait(result.exists, "the last round", seconds=600)
        federation.finish(run)
        say("finished")
    accuracy, left_out = notes(checkpoint)
    for number, value in accuracy.items():
        gone = [str(one["reason"]) for one in left_out.get(str(number), [])]
        say(f"round {number}: accuracy {value:.3f}" + (f" (left out: {'; '.join(gone)})" if gone else ""))
    return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where keys, logs and the checkpoint go (default: a temporary one)")
    parser.add_argument("--method", default="fedeve", help="any name that 'fedeve methods' lists")
    parser.add_argument("--rounds", type=int, default=5, help="at least 4")
    told = parser.parse_args()
    if told.rounds < 4:
        parser.error("--rounds must be at least 4, so that something is left after the restart")
    if told.folder is not None:
        told.folder.mkdir(parents=True)
        play(told.folder, method=told.method, rounds=told.rounds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            play(Path(folder), method=told.method, rounds=told.rounds)


if __name__ == "__main__":
    main()
