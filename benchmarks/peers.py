"""`make bench-peers`: other simulators beside ours on the same work, on this machine's CPU.

LeNet-5, 300 clients of 200 images, 10 a round, batch 20, one epoch, FedAvg; everybody starts from the same weights.
Each contestant is a script in benchmarks/peers and a fresh process; they take turns, several times. The other
simulators are installed in environments of their own. One that cannot be installed or run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import save

from fedeve import FedAvg, LocalWork, Run, datasets

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
PACKAGES = {"pfl": "pfl==0.6.0", "flower": "flwr[simulation]==1.41.0"}
LOCAL = LocalWork(lr=0.1, batch=20)
COHORT = 10


@dataclass(frozen=True)
class Contestant:
    """One row of the table: a script, how many processes train clients, and whose environment it needs."""

    name: str
    script: str
    processes: int = 1
    peer: str = ""
    options: tuple[str, ...] = ()


BARE, BARE_TWO = "bare loop", "bare loop, 2 processes"
CONTESTANTS = (
    Contestant(BARE, "bare_run.py"),
    Contestant(BARE_TWO, "bare_run.py", processes=2),
    Contestant("fedeve, reference", "fedeve_run.py", options=("--engine", "reference")),
    Contestant("fedeve, lanes", "fedeve_run.py", processes=2, options=("--engine", "lanes")),
    Contestant("pfl", "pfl_run.py", peer="pfl"),
    Contestant("pfl, 2 workers", "pfl_run.py", processes=2, peer="pfl"),
    Contestant("Flower, 2 clients at once", "flower_run.py", processes=2, peer="flower"),
)


def say(text: str) -> None:
    """Tell how far we are, beside the result."""
    print(text, file=sys.stderr, flush=True)


class UnableError(Exception):
    """A contestant cannot be installed or run; the message says why."""


def write_work(path: Path, *, num_clients: int = 300, images_each: int = 200) -> None:
    """Make the clients, the test set and the common start once, in a file that needs nothing of ours to be read."""
    data = datasets.load("glyphs", num_writers=num_clients, num_images=images_each * num_clients, partition="iid")
    run = Run(method=FedAvg(), data=data, rounds=1, cohort=COHORT, local=LOCAL)
    weights = {f"w:{name}": value.numpy() for name, value in run.build_model().state_dict().items()}
    arrays = {
        name: getattr(data, name) for name in ("x", "y", "order", "offsets", "x_test", "y_test", "shift", "scale")
    }
    np.savez(path, **arrays, **weights, cohort=COHORT, batch=LOCAL.batch, lr=LOCAL.lr)


def install(peer: str) -> Path:
    """The Python of a peer's own environment, made where it is missing or was made for other versions."""
    folder = ROOT / f".venv-peers-{peer}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = [f"torch=={torch.__version__.split('+')[0]}", PACKAGES[peer]]  # everybody computes with the same torch
    if ready.exists() and ready.read_text() == "\n".join(wanted):
        return python
    say(f"installing {PACKAGES[peer]} in {folder.name} (some minutes)")
    venv = [sys.executable, "-m", "venv", "--clear", str(folder)]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    for command in (venv, pip):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise UnableError(f"not installed: {_reason(done.stdout)}")
    ready.write_text("\n".join(wanted))
    return python


def play(
    contestant: Contestant, python: Path, work: Path, *, rounds: int, warm_up: int, limit: float
) -> dict[str, Any]:
    """One contestant's rounds, in processes of its own; what it answered."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        command = [str(python), str(SCRIPTS / contestant.script), str(work), str(answer)]
        command += ["--rounds", str(rounds), "--warm-up", str(warm_up), "--processes", str(contestant.processes)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *contestant.options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                raise UnableError(f"not done after {limit:.0f} s: {_reason(log.read_text())}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code or not answer.exists():
            raise UnableError(f"ended with code {code}: {_reason(log.read_text())}")
        return json.loads(answer.read_text())


def _reason(text: str) -> str:
    """The lines of a log that say what went wrong: those that speak of errors, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return " / ".join((errors or lines)[-2:])[:600] or "it said nothing"


def others_busy(seconds: float = 1.0) -> float:
    """How many cores the rest of the machine keeps busy, measured while nothing of ours runs."""

    def ticks() -> int:
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
        return int(user) + int(nice) + int(system)

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def compete(contestants: list[Contestant], work: Path, told: argparse.Namespace) -> dict[str, Any]:
    """Everybody in turn, `repeats` times; answers or the reason for none, by name, and how busy the machine was."""
    plays: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    unable: dict[str, str] = {}
    busy: list[float] = []
    for repeat in range(told.repeats):
        for contestant in contestants:
            if contestant.name in unable:
                continue
            try:
                python = install(contestant.peer) if contestant.peer else Path(sys.executable)
                busy.append(others_busy())
                got = play(
                    contestant, python, work, rounds=told.rounds, warm_up=told.warm_up, limit=60 + 15 * told.rounds
                )
            except UnableError as error:
                unable[contestant.name] = str(error)
                say(f"{contestant.name}: {error}")
                continue
            plays[contestant.name].append(got)
            speed, accuracy = got["rounds_per_second"], got["accuracy"]
            say(
                f"turn {repeat + 1} of {told.repeats}: {contestant.name}: {speed:.2f} rounds/s, accuracy {accuracy:.3f}"
            )
    rows = {
        contestant.name: {"processes": contestant.processes, **_row(contestant.name, plays)}
        if contestant.name not in unable
        else {"processes": contestant.processes, "unable": unable[contestant.name]}
        for contestant in contestants
    }
    return {
        "contestants": rows,
        "cores_busy_with_others": {"mean": round(statistics.fmean(busy), 2), "most": round(max(busy), 2)},
    }


def _row(name: str, plays: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the turns. A ratio is taken within a turn, between neighbours in time, before its median is."""
    speeds = {other: [got["rounds_per_second"] for got in answers] for other, answers in plays.items()}
    row = {
        "rounds_per_second": round(statistics.median(speeds[name]), 3),
        "every_turn": [round(speed, 3) for speed in speeds[name]],
        "cpu_seconds_per_round": round(statistics.median(got["cpu_seconds_per_round"] for got in plays[name]), 3),
        "accuracy": [round(got["accuracy"], 4) for got in plays[name]],
        "versions": plays[name][-1]["versions"],
    }
    for key, base in (("times_bare", BARE), ("times_bare_2_processes", BARE_TWO)):
        ratios = [speed / bare for speed, bare in zip(speeds[name], speeds.get(base, []), strict=False)]
        if ratios:
            row[key] = round(statistics.median(ratios), 3)
    return row


COLUMNS = {
    "processes": "processes",
    "rounds_per_second": "rounds a second",
    "times_bare": "times bare",
    "times_bare_2_processes": "times bare in 2",
    "cpu_seconds_per_round": "CPU s a round",
    "accuracy": "accuracy",
}


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table; underneath, whoever could not take part and how busy the machine was."""
    lines = [f"| {'':26} | {' | '.join(COLUMNS.values())} |", f"|{'---|' * (1 + len(COLUMNS))}"]
    for name, row in result["contestants"].items():
        cells = [f"{_cell(row.get(key)):>{len(title)}}" for key, title in COLUMNS.items()]
        lines.append(f"| {name:26} | {' | '.join(cells)} |")
    lines += [f"{name}: {row['unable']}" for name, row in result["contestants"].items() if "unable" in row]
    others = result["cores_busy_with_others"]
    lines.append(f"Other work kept {others['mean']} of {os.cpu_count()} cores busy, at most {others['most']}.")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = statistics.fmean(value)
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: benchmarks/peers.py --repeats 1 --only bare")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of a turn (30)")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before the clock starts (3)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contestant (3)")
    parser.add_argument("--only", nargs="+", default=[""], help="only contestants whose names begin so; not saved")
    told = parser.parse_args()
    chosen = [c for c in CONTESTANTS if c.name.lower().startswith(tuple(word.lower() for word in told.only))]
    if not chosen:
        parser.error(
            f"nobody's name begins with {' or '.join(told.only)}; there are: {', '.join(c.name for c in CONTESTANTS)}"
        )
    load = [round(value, 2) for value in os.getloadavg()]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work.npz")
        say("making 300 clients of 200 images")
        write_work(work)
        result = compete(chosen, work, told)
    settings = {"rounds": told.rounds, "warm_up": told.warm_up, "turns": told.repeats, "threads_per_process": 1}
    note = "LeNet-5, 300 clients of 200 images, 10 a round, batch 20, one epoch, FedAvg, SGD 0.1, float32, CPU"
    if len(chosen) == len(CONTESTANTS):
        save("peers", {"work": note, **settings, "load_at_start": load, **result})
    print(f"\n{table(result)}")


if __name__ == "__main__":
    main()
