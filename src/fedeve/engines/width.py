"""How many lanes keep busy: a matter of how unequal clients are, before it is one of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .. import local
from ..run import Run

_ROUNDS = 64  # of every run that are looked at


def useful(runs: Sequence[Run]) -> int:
    """How many lanes these runs can use together.

    The rounds of a run follow each other and each lasts as long as its longest client, so the run whose longest
    clients have most steps in all sets the time, however many lanes there are. Lanes beyond what the other work needs
    in that time would make every step longer and stand idle.
    """
    counted = [_count(run) for run in runs]
    work, chain = sum(each for each, _ in counted), max(longest for _, longest in counted)
    clients = sum(run.cohort for run in runs)
    return max(1, min(clients, math.ceil(work / chain))) if chain else clients


def _count(run: Run) -> tuple[float, float]:
    """Local steps of all clients in all rounds, and of the longest client of each round."""
    rounds = np.linspace(0, run.rounds - 1, min(run.rounds, _ROUNDS), dtype=np.int64)
    sizes = run.data.sizes
    steps = [local.num_steps(run.local, sizes[run.cohort_of(int(round))]) for round in rounds]
    each = run.rounds / len(rounds)
    return each * sum(int(cohort.sum()) for cohort in steps), each * sum(int(cohort.max()) for cohort in steps)
