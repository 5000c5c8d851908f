"""The reference engine: one client after another, written to be read. It is the specification of faster engines.

A round is a straight line: send, train the cohort, summarise, step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import augment, local, seeds, tasks
from ..data.federated import FederatedData
from ..errors import FedeveError, Words
from ..layout import Layout
from ..memory import Memory
from ..method import Sent, Vectors
from ..run import DTYPES, Run
from ..seeds import Indices
from ..store import Position
from ..summary import Summary
from .blame import blame
from .profile import Profile
from .turn import Turn

_EVALUATION_BATCH = 1000  # large enough to be fast, small enough to stay in the cache


class Reference:
    """Trains and evaluates one run."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device, self.dtype = run, device, DTYPES[run.dtype]
        self.model: nn.Module = run.build_model().to(device)
        self.layout = Layout.of(self.model)
        self.start = self.layout.flatten(dict(self.model.named_parameters()))
        refuse_misfit(self.model, run.data, self.dtype, device)

    def play(self, state: Any, memory: Memory, first_round: int) -> Iterator[Turn]:
        """The rounds from `first_round` on. The caller puts a turn's `writes` into the memory before the next."""
        method = self.run.server
        for round in range(first_round, self.run.rounds):
            sent = method.send(state)
            silent = self.run.silent_in(round)
            summary, writes, left_out, total_steps = None, {}, [], 0
            for client, rows in self.run.dealt(round).items():
                if client in silent:
                    continue
                remembered = memory.get(client)
                update, num_steps = self.train(client, round, sent, remembered, rows)
                total_steps += num_steps
                extras, remember = method.finish(update, num_steps, self.run.local.lr, sent, remembered)
                if not all(torch.isfinite(vector).all() for vector in (update, *extras.values())):
                    left_out.append(client)
                    continue
                reply = self.summarise(len(rows), update, extras)
                summary = reply if summary is None else summary.merge(reply)
                writes[client] = remember
            facts = None
            if summary is not None and summary.weight > 0:
                state, scalars = method.step(state, summary)
                facts = {name: float(value) for name, value in scalars.items()}
            answered = 0 if summary is None else int(summary.count)
            metrics = self.evaluate(state.params) if self.run.is_evaluated(round + 1) else None
            yield Turn(round + 1, state, facts, answered, left_out, writes, metrics, total_steps)

    def train(
        self, client: int, round: int, sent: Sent, memory: Vectors, rows: Indices | None = None
    ) -> tuple[Tensor, int]:
        """One client's local work on its own rows, or those given: its update, end minus start, and its steps."""
        run, rows = self.run, self.run.data.rows(client) if rows is None else rows
        mine = Examples(run.data, rows, self.dtype, self.device, augmented=run.local.augments)
        correction = run.method.correction(sent, memory)
        walk = local.begin(run.local, sent.params)
        self.model.train()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):  # for random layers
            torch.manual_seed(seeds.torch_seed(run.seed, round, client, "layers"))
            stream = {"seed": run.seed, "round": round, "client": client}
            plan = local.plan(run.local, len(rows), **stream)
            for batch, views in zip(plan, local.views(run.local, plan, **stream), strict=True):
                x, y = mine.batch(batch[batch >= 0], views[batch >= 0])
                grad = gradient(self.model, self.layout, run.data.task, walk.params, x, y)
                walk = local.advance(run.local, walk, grad, start=sent.params, correction=correction)
        return walk.params - sent.params, int(walk.num_steps)

    def summarise(self, num_examples: int, update: Tensor, extras: Vectors) -> Summary:
        """One client's reply, weighted by its examples."""
        weight = torch.tensor([num_examples], dtype=torch.float64, device=self.device)
        return Summary.of(update[None], weight, {name: vector[None] for name, vector in extras.items()})

    @torch.no_grad()
    def evaluate(self, params: Tensor) -> dict[str, float]:
        """The task's metrics on the whole test set."""
        data, named = self.run.data, self.layout.unflatten(params)
        if not len(data.y_test):
            return {}
        self.model.eval()
        outputs = []
        for start in range(0, len(data.y_test), _EVALUATION_BATCH):
            x = data.inputs(data.x_test[start : start + _EVALUATION_BATCH], self.dtype).to(self.device)
            outputs.append(torch.func.functional_call(self.model, named, (x,)))
        y = torch.from_numpy(data.y_test).to(self.device)
        return {name: float(value) for name, value in tasks.metrics(data.task, torch.cat(outputs), y).items()}


class Examples:
    """Some rows of a federation, as a model sees them batch by batch."""

    def __init__(
        self, data: FederatedData, rows: Indices, dtype: torch.dtype, device: torch.device, *, augmented: bool
    ) -> None:
        self.device, self.augmented, self.y = device, augmented, torch.from_numpy(data.y[rows]).to(device)
        if augmented:  # views are of what is stored
            self.x, self.transform = torch.from_numpy(np.array(data.x[rows])).to(device), data.transform(dtype, device)
        else:
            self.x = data.inputs(data.x[rows], dtype).to(device)

    def batch(self, places: Indices, views: Indices) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these places; in these views, where they are augmented."""
        at = torch.from_numpy(places).to(self.device)
        if not self.augmented:
            return self.x[at], self.y[at]
        return self.transform(augment.seen(self.x[at], torch.from_numpy(views).to(self.device))), self.y[at]


def gradient(model: nn.Module, layout: Layout, task: str, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient [D] of the mean loss on a batch."""
    params = params.detach().requires_grad_()
    outputs = torch.func.functional_call(model, layout.unflatten(params), (x,))
    return torch.autograd.grad(tasks.loss(task, outputs, y), params)[0]


class References:
    """Plays runs one after another, as the loop wants its engines."""

    name = "reference"

    def __init__(
        self, runs: list[Run], device: torch.device, *, precision: str = "float32", profile: Profile | None = None
    ) -> None:
        self.runs, self.precision, self.profile = runs, precision, profile or Profile()
        self.players = [Reference(run, device) for run in runs]
        self.starts = [player.start for player in self.players]

    def play(self, positions: list[Position], memories: list[Memory]) -> Iterator[tuple[int, Turn]]:
        """Every run to its end, then the next."""
        for number, (player, at) in enumerate(zip(self.players, positions, strict=True)):
            begun = time.perf_counter()
            with blame(number):
                for turn in player.play(at.state, memories[number], at.num_rounds):
                    self.profile.client_steps += turn.client_steps
                    self.profile.lane_steps += turn.client_steps
                    self.profile.seconds += time.perf_counter() - begun
                    yield number, turn
                    begun = time.perf_counter()

    def evaluate(self, number: int, params: Tensor) -> dict[str, float]:
        """One run's metrics."""
        return self.players[number].evaluate(params)


@torch.no_grad()
def refuse_misfit(model: nn.Module, data: FederatedData, dtype: torch.dtype, device: torch.device) -> None:
    """Find out now, not in some round, that the model cannot read the data, or keeps more than its parameters."""
    changed = ""
    try:
        inputs = data.inputs(data.x[:2], dtype).to(device)
        num_outputs = model.eval()(inputs).shape[-1]
        if dict(model.named_buffers()):
            changed = _changed_buffer(model, inputs)
    except torch.OutOfMemoryError:
        raise  # which says nothing about the model
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        found = Words(f"inputs of shape {data.input_shape}: {str(error).splitlines()[0]}")
        raise FedeveError("the model cannot read this data", got=found, do="use a model for such inputs") from error
    if changed:
        raise FedeveError(
            "the model keeps statistics in a buffer, which cannot be averaged like parameters",
            got=Words(f"{changed!r} changes while it trains"),
            do="use GroupNorm or LayerNorm, or leave that layer in its state of evaluation",
        )
    if num_outputs < data.num_outputs:
        do = f"give it {data.num_outputs} outputs"
        raise FedeveError("the model has fewer outputs than there are classes", got=num_outputs, do=do)


def _changed_buffer(model: nn.Module, inputs: Tensor) -> str:
    """The first buffer that training on these inputs changes, of a copy."""
    trial = copy.deepcopy(model).train()
    with torch.random.fork_rng([inputs.device] if inputs.device.type == "cuda" else []):
        trial(inputs)
    after = dict(trial.named_buffers())
    return next((name for name, before in model.named_buffers() if not torch.equal(before, after[name])), "")
