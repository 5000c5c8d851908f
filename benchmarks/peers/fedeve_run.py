"""This library on the common work, with one of its engines."""

from __future__ import annotations

import numpy as np
from work import Clock, Work, answer, arguments

from fedeve import FedAvg, FederatedData, LocalWork, Run, simulate
from fedeve.layout import Layout


def main() -> None:
    told = arguments(__doc__)
    work = Work.read(told.work)  # for the judge; clients are given as they are stored
    with np.load(told.work) as file:
        rows = np.split(file["order"], file["offsets"][1:-1])
        shift, scale = float(file["shift"]), float(file["scale"])
        classes = len(work.weights["head.5.bias"])
        data = FederatedData.from_arrays(file["x"], file["y"], rows, num_classes=classes, shift=shift, scale=scale)
    # No test set, so no evaluation is timed; the model is judged below as everybody's is.
    run = Run(
        method=FedAvg(),
        data=data,
        model="lenet5",
        rounds=told.warm_up + told.rounds,
        cohort=work.cohort,
        local=LocalWork(lr=work.lr, batch=work.batch),
        eval_every=told.warm_up + told.rounds,
    )
    if any((run.build_model().state_dict()[name] != value).any() for name, value in work.weights.items()):
        raise RuntimeError("the run does not start from the common weights")
    clock = Clock(told)
    record = simulate(run, engine=told.engine, width=told.processes, device="cpu", watch=lambda progress: clock())
    model = work.model()
    model.load_state_dict(Layout.of(model).unflatten(record.params))
    answer(told, clock=clock, accuracy=work.accuracy(model))


if __name__ == "__main__":
    main()
