"""How long a sweep takes: the work in its runs, and a short calibration before they start."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import local
from ..engines.loop import _steady, make_engine
from ..errors import FedeveError
from ..memory import Memory
from ..run import Run, choose_device
from ..store import Position

SECONDS = 1.0  # of playing, for each kind of run
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Work(NamedTuple):
    """Local steps and examples of all clients together, after 0, 1, ..., `rounds` rounds."""

    steps: NDArray[np.int64]
    examples: NDArray[np.int64]


def work(run: Run) -> Work:
    """The work in a run, from its cohorts; nothing is trained."""
    sizes, work = run.data.sizes, run.local
    steps, examples = local.num_steps(work, sizes), sizes * work.epochs
    if work.steps is not None:
        whole, rest = np.divmod(work.steps, np.maximum(-(-sizes // work.batch), 1))
        examples = whole * sizes + np.minimum(rest * work.batch, sizes)
    counts = np.zeros((2, run.rounds + 1), dtype=np.int64)
    for round in range(run.rounds):
        cohort = run.cohort_of(round)
        if run.dropout:
            cohort = np.setdiff1d(cohort, sorted(run.silent_in(round)))
        counts[:, round + 1] = steps[cohort].sum(), examples[cohort].sum()
    return Work(*counts.cumsum(axis=1))


def calibrate(
    runs: list[Run],
    *,
    engine: str,
    device: str,
    threads: int,
    width: int | None,
    precision: str = "float32",
    seconds: float = SECONDS,
) -> float:
    """Seconds that a round of one of these runs takes, evaluations included, when they are played together.

    Their first rounds are played and thrown away: for `seconds`, and at least one round beyond the first.
    """
    target = choose_device(device)
    with _steady(threads, precision):
        player = make_engine(engine, runs, target, width=width, precision=precision)
        starts = [run.server.init(start, num_clients=run.data.num_clients) for run, start in _with(runs, player.starts)]
        memories = [Memory(run.method.remembers, like=start) for run, start in _with(runs, player.starts)]
        begun, num_turns = 0.0, 0
        for number, turn in player.play([Position(0, state) for state in starts], memories):
            memories[number].put(turn.writes)
            if not begun:  # the first turn has compiling and warming up in it
                begun = time.perf_counter()
                continue
            num_turns += 1
            if time.perf_counter() - begun > seconds:
                break
        each = (time.perf_counter() - begun) / max(num_turns, 1)
        begun = time.perf_counter()
        player.evaluate(0, player.starts[0])
        return each + (time.perf_counter() - begun) / runs[0].eval_every


def _with(runs: list[Run], others: list[Tensor]) -> list[tuple[Run, Tensor]]:
    return list(zip(runs, others, strict=True))


def parse_seconds(text: str) -> float:
    """`90`, `90s`, `25m`, `1.5h`, `1h30m`: a time in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        raise FedeveError("this is not a time", got=text, do="write for example 90s, 25m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)
    if seconds <= 0:
        raise FedeveError("there is no time in this", got=text, do="write for example 25m")
    return seconds


def words(seconds: float) -> str:
    """A time for people: `40 s`, `25 min`, `3.4 h`, `2.1 days`."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit or (name == "min" and seconds >= 100):
            return f"{seconds / unit:.1f} {name}" if seconds < 10 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
