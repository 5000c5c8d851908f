"""`fedeve paper fig2a` and so on: one command per figure of the paper's analysis."""

from __future__ import annotations

import typer

from .commands import (
    Alphas,
    AsJson,
    Clients,
    Cohort,
    Data,
    Device,
    EngineName,
    Epochs,
    Out,
    Root,
    Rounds,
    Seeds,
    SizeName,
    TraceClients,
    TraceExamples,
    changes_of,
    make,
)  # fmt: skip

HELP = {
    "fig2a": "Draw the classes that the sampled clients bring over 20 rounds.",
    "fig2b": "Draw FedAvg under four conditions: iid, only period drift, only client drift, both.",
    "gaussian": "Draw whether both drifts of parameters are normal, with p-values.",
    "gain": "Draw boxes of FedEve's gain by heterogeneity and local epochs.",
    "noise": "Draw how period drift differs from the noise of SGD.",
    "law": "Draw the laws of sampling, for label mixes and gradients, beside what is measured.",
    "bound": "Draw the convergence bound's error term on a quadratic beside what really stays.",
}


def add(app: typer.Typer) -> None:
    """Add a command for every figure."""
    for name, help in HELP.items():
        app.command(name, help=f"{help}\n\nExample: fedeve paper {name} --out figures --size tiny")(_command(name))


def _command(name: str):  # type: ignore[no-untyped-def]
    def command(
        out: Out,
        size: SizeName = "quick",
        data: Data = None,
        rounds: Rounds = None,
        clients: Clients = None,
        cohort: Cohort = None,
        epochs: Epochs = None,
        alpha: Alphas = None,
        seeds: Seeds = None,
        trace_clients: TraceClients = None,
        trace_examples: TraceExamples = None,
        root: Root = None,
        engine: EngineName = "auto",
        device: Device = "auto",
        as_json: AsJson = False,
    ) -> None:
        changes = changes_of(
            data=data, rounds=rounds, clients=clients, cohort=cohort, epochs=epochs, alpha=alpha, seeds=seeds,
            trace_clients=trace_clients, trace_examples=trace_examples,
        )  # fmt: skip
        make(
            [name], out=out, size=size, changes=changes, root=root, engine=engine, device=device, as_json=as_json
        )  # fmt: skip

    return command
