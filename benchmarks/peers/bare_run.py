"""The bare loop on the common work, in one process or in several."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from work import Clock, Work, answer, arguments

sys.path.insert(0, str(Path(__file__).parents[1]))
from bare import BareWorkers, bare_rounds


def main() -> None:
    told = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = Work.read(told.work)
    model, rounds = work.model(), told.warm_up + told.rounds
    if told.processes == 1:
        clock = Clock(told)
        for _ in range(rounds):
            bare_rounds(model, work.clients, rounds=1, cohort=work.cohort, lr=work.lr, batch=work.batch)
            clock()
    else:
        settings = {"lr": work.lr, "batch": work.batch, "num_workers": told.processes}
        with BareWorkers(model, work.clients, **settings) as workers:
            clock = Clock(told)
            for _ in range(rounds):
                workers.play(rounds=1, cohort=work.cohort)
                clock()
    answer(told, clock=clock, accuracy=work.accuracy(model))


if __name__ == "__main__":
    main()
