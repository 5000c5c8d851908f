"""The server: any method of fedeve, by its name."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from digits_app.task import describe
from fedeve.flower import MethodStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    run = describe(config, num_clients=2)  # how the training data are dealt does not matter here
    model = run.build_model()

    @torch.no_grad()
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        right = model(run.data.inputs(run.data.x_test)).argmax(-1) == torch.from_numpy(run.data.y_test)
        return MetricRecord({"accuracy": float(right.double().mean())})

    strategy = MethodStrategy(
        run.method,
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=0.0,
        min_available_nodes=int(config["min-nodes"]),
        seed=run.seed,
        checkpoint=str(config["checkpoint"]) or None,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["num-rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
    for number, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.4f}", flush=True)
    if config["result"]:
        save_file(result.arrays.to_torch_state_dict(), Path(str(config["result"])))
