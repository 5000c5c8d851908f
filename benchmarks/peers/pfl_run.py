"""pfl (apple/pfl-research) on the common work, in one process or in several that pfl joins by torch.distributed.

As its guide to fast simulations says: data in memory as tensors, the same script once for every process, told by two
environment variables who it is. Left off is what is no part of the work: metrics of clients, printing, checkpoints.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


def play() -> None:
    """Be one of pfl's processes."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset, get_user_sampler
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch.nn.functional import cross_entropy
    from work import Clock, LeNet5, Work, answer, arguments

    class Network(LeNet5):
        """LeNet-5 with the two functions that pfl calls."""

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
            return {"accuracy": Weighted(int((self(x).argmax(-1) == y).sum()), len(y))}

    told = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)  # pfl's processes must agree on whom they sample
    work = Work.read(told.work)
    network = Network(len(work.weights["head.5.bias"]))
    network.load_state_dict(work.weights)

    def shuffled(client: int) -> PyTorchTensorDataset:
        # pfl takes batches in the order of the data; the others shuffle them, so this does too.
        x, y = work.clients[client]
        rows = torch.randperm(len(y))
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=str(client))

    clients = FederatedDataset(shuffled, get_user_sampler("random", list(range(len(work.clients)))))
    clock = Clock(told)

    class Mark(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            clock()
            return False, Metrics()

    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    rounds = told.warm_up + told.rounds
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=clients, val_data=clients, postprocessors=[WeightByDatapoints()]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # clients are evaluated in round 0 alone, which is not timed
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=work.lr, local_num_epochs=1, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Mark()],
        send_metrics_to_platform=False,
    )
    if os.environ.get(RANK, "0") == "0":
        answer(told, clock=clock, accuracy=work.accuracy(network), packages=("pfl",))


def launch(processes: int) -> int:
    """Start this script once for every process and wait; if one fails, the others are stopped."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    addresses = ",".join(f"localhost:{port + number}" for number in range(processes))
    crew = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, RANK: str(rank), ADDRESSES: addresses})
        for rank in range(processes)
    ]
    try:
        return next((code for code in (member.wait() for member in crew) if code), 0)
    finally:
        for member in crew:
            if member.poll() is None:
                member.kill()


def main() -> None:
    from work import arguments

    processes = arguments(__doc__).processes
    if processes > 1 and RANK not in os.environ:
        sys.exit(launch(processes))
    play()


if __name__ == "__main__":
    main()
