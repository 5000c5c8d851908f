"""Run: everything that determines a simulation's numbers. Where and how fast it is computed is not here."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import models, seeds, settings
from .data.federated import FederatedData
from .drift import conditions, monitor
from .errors import FedeveError, Words
from .layout import Layout
from .local import LocalWork
from .method import Method
from .seeds import Indices
from .settings import setting

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One simulation: a method on a federation. Two equal runs give equal records, whatever the engine."""

    method: Method
    data: FederatedData
    model: str | nn.Module = setting("lenet5", help="a model's name, or any module without running statistics")
    model_options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = setting(100, help="how many rounds", low=1)
    cohort: int = setting(10, help="clients sampled each round, without replacement", low=1)
    local: LocalWork = field(default_factory=LocalWork)
    seed: int = setting(0, help="seed of the model, the cohorts and the batches", low=0)
    eval_every: int = setting(10, help="rounds between evaluations; the last round is always evaluated", low=1)
    dropout: float = setting(0.0, help="probability that a sampled client never answers", low=0, high=1)
    empty: str = setting("skip", help="clients without data: never sampled, or kept", choices=("skip", "keep"))
    dtype: str = setting("float32", help="number format of the parameters", choices=tuple(DTYPES))
    dealing: str = setting(
        "own", help="a cohort's rows: its clients' own, or pooled and dealt again", choices=conditions.DEALINGS
    )
    dealing_alpha: float = setting(0.1, help="Dirichlet's concentration where dealing is dirichlet", above=0)
    watch_drift: bool = setting(True, help="note both drifts and FedEve's gain in the facts of every method")

    def __post_init__(self) -> None:
        settings.check(self)
        for name, cls in (("method", Method), ("data", FederatedData), ("local", LocalWork)):
            if not isinstance(getattr(self, name), cls):
                do = f"give an instance, as {name}={'FedEve()' if cls is Method else f'{cls.__name__}(...)'}"
                raise FedeveError(f"{name} must be a {cls.__name__}", got=getattr(self, name), do=do)
        if self.cohort > self.num_available:
            kind = "clients with data" if self.empty == "skip" else "clients"
            raise FedeveError(
                f"the cohort is larger than the {self.num_available} {kind}",
                got=self.cohort,
                do=f"set cohort to at most {self.num_available}",
            )
        if self.local.augments and (len(self.data.input_shape) not in (2, 3) or self.data.gather is not None):
            raise FedeveError(
                "only images, [height, width] or [channels, height, width], can be mirrored and shifted",
                got=Words(f"inputs of shape {self.data.input_shape}"),
                do="leave local.augment out",
            )
        if isinstance(self.model, nn.Module):
            Layout.of(self.model)
        else:
            models.check(self.model, self.model_options)

    @property
    def num_available(self) -> int:
        return len(self.data.with_data) if self.empty == "skip" else self.data.num_clients

    def cohort_of(self, round: int) -> Indices:
        """The clients sampled in a round, in the order drawn."""
        population = self.data.with_data if self.empty == "skip" else self.data.num_clients
        return seeds.cohort(population, self.cohort, seed=self.seed, round=round)

    def dealt(self, round: int) -> dict[int, Indices]:
        """What each client of a round's cohort trains on: row numbers by client, in cohort order."""
        return conditions.deal(
            self.data,
            self.cohort_of(round),
            dealing=self.dealing,
            alpha=self.dealing_alpha,
            seed=self.seed,
            round=round,
        )

    @property
    def server(self) -> Method:
        """The method as engines play it: with the drift monitor beside it unless `watch_drift` is off."""
        return monitor.watched(self.method) if self.watch_drift else self.method

    def silent_in(self, round: int) -> set[int]:
        """Those of the round's cohort who never answer."""
        if not self.dropout:
            return set()
        return set(seeds.silent(self.cohort_of(round), share=self.dropout, seed=self.seed, round=round).tolist())

    def is_evaluated(self, num_rounds: int) -> bool:
        """Whether the model is evaluated once `num_rounds` rounds are done."""
        return num_rounds % self.eval_every == 0 or num_rounds == self.rounds

    def build_model(self) -> nn.Module:
        """The model in the run's dtype, initialised from the run's seed; of a module that was given, a copy."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).to(DTYPES[self.dtype])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.torch_seed(self.seed, "model"))
            shape, outputs, counts = self.data.input_shape, self.data.num_outputs, self.data.cardinalities
            model = models.create(self.model, shape, outputs, cardinalities=counts, **self.model_options)
        return model.to(DTYPES[self.dtype])

    def describe(self) -> dict[str, Any]:
        """The run as a configuration of plain values; where its data and model have names, it can be built again."""
        tables = ("method", "data", "local", "model", "model_options")
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in tables}
        name = self.model if isinstance(self.model, str) else type(self.model).__name__
        return {
            **plain,
            "model": {"name": name, **self.model_options},
            "method": {"name": self.method.name, **dataclasses.asdict(self.method)},
            "local": self.local.describe(),
            "data": {"name": self.data.name, **self.data.options},
        }

    def identity(self) -> str:
        """A checksum of `describe()`, of the data and, for a module that was given, of its layers and their tensors."""
        config = self.describe()
        for place in ("root", "path"):  # where files lie does not change what is in them
            config["data"].pop(place, None)
        digest = hashlib.sha256(json.dumps([config, self.data.fingerprint], sort_keys=True).encode())
        if isinstance(self.model, nn.Module):
            digest.update(repr((self.model, Layout.of(self.model))).encode())
            held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            for name, tensor in sorted(held.items()):
                digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


def choose_device(name: str) -> torch.device:
    """`auto` is a CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = Words(f"{name!r} ({str(error).splitlines()[0]})")
        raise FedeveError("this device cannot be used", got=reason, do="use auto, cpu or cuda") from None
    return device
