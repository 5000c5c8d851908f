"""The rounds of a federation: Flower's loop, but replies are streamed in order, and rounds are saved and resumed."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from ..checkpoint import Checkpoint
from ..errors import FedeveError, Words
from .grid import in_order

if TYPE_CHECKING:
    from .strategy import MethodStrategy

log = getLogger("flwr")
_SERIES = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


@dataclass(frozen=True)
class Plan:
    """What Flower's `start` is told."""

    num_rounds: int = 3
    timeout: float = 3600
    train_config: ConfigRecord | None = None
    evaluate_config: ConfigRecord | None = None
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None


def play(hooks: Strategy, inner: MethodStrategy | None, grid: Grid, initial: ArrayRecord, plan: Plan) -> Result:
    """The rounds that are left, by the hooks of a strategy; `inner` is ours, where state is kept and numbers come from.

    `hooks` and `inner` are the same unless something of ours is wrapped around it.
    """
    log.log(INFO, "Starting %s strategy:", type(hooks).__name__)
    hooks.summary()
    result, done, begun = Result(arrays=initial), 0, time.monotonic()
    path = None if inner is None else inner.options.checkpoint
    if path is not None:
        _check_folder(path)
    if inner is not None:
        inner.forget()
    if inner is not None and path is not None and path.exists():
        done = _resume(inner, initial, result)
    elif plan.evaluate_fn is not None:
        _note(result.evaluate_metrics_serverapp, 0, plan.evaluate_fn(0, initial))
    train, evaluate = plan.train_config or ConfigRecord(), plan.evaluate_config or ConfigRecord()
    for number in range(done + 1, plan.num_rounds + 1):
        log.log(INFO, "[ROUND %s/%s]", number, plan.num_rounds)
        messages = list(hooks.configure_train(number, result.arrays, train, grid))
        arrays, metrics = hooks.aggregate_train(number, _replies(inner, grid, messages, plan.timeout))
        if arrays is not None:
            result.arrays = arrays
        _note(result.train_metrics_clientapp, number, metrics)
        messages = list(hooks.configure_evaluate(number, result.arrays, evaluate, grid))
        replies = _replies(inner, grid, messages, plan.timeout)
        _note(result.evaluate_metrics_clientapp, number, hooks.aggregate_evaluate(number, replies))
        if plan.evaluate_fn is not None:
            _note(result.evaluate_metrics_serverapp, number, plan.evaluate_fn(number, result.arrays))
        if inner is not None and path is not None and inner.state is not None:
            inner.adopt(result.arrays)
            _save(inner, path, number, result)
    log.log(INFO, "Strategy execution finished in %.2fs", time.monotonic() - begun)
    return result


def _replies(
    inner: MethodStrategy | None, grid: Grid, messages: Iterable[Message], timeout: float
) -> Iterable[Message]:
    if inner is None:  # a strategy of Flower's wants all replies at once
        return grid.send_and_receive(messages, timeout=timeout)
    return in_order(grid, messages, timeout=timeout, window=inner.options.window)


def _note(series: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        log.log(INFO, "\t└──> MetricRecord: %s", metrics)
        series[number] = metrics


def _identity(strategy: MethodStrategy) -> str:
    """A checksum of what makes two federations the same: method, seed and model."""
    assert strategy.wire is not None
    method = {"name": strategy.method.name, **dataclasses.asdict(strategy.method)}
    text = json.dumps([method, strategy.options.seed, strategy.wire.describe()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_folder(path: Path) -> None:
    """Make the folder of a checkpoint, so that it fails before the first round rather than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError("it may not be written to")
    except OSError as error:
        raise FedeveError(
            f"the folder of checkpoint {path} cannot be used", got=Words(str(error)), do="choose another"
        ) from None


def _save(strategy: MethodStrategy, path: Path, number: int, result: Result) -> None:
    from .strategy import snapshot

    series = {name: {str(n): dict(record) for n, record in getattr(result, name).items()} for name in _SERIES}
    left_out = {str(n): [dataclasses.asdict(one) for one in found] for n, found in strategy.left_out.items()}
    history = _packed({"series": series, "left_out": left_out, "lost": strategy.lost})
    values = {"num_rounds": number, "federation": strategy.federation}
    Checkpoint({**snapshot(strategy), "history": history}, values).save(path, identity=_identity(strategy))


def _resume(strategy: MethodStrategy, initial: ArrayRecord, result: Result) -> int:
    """Put the strategy and the result where the checkpoint left them; how many rounds are done."""
    from .checks import LeftOut
    from .strategy import restore

    path = strategy.options.checkpoint
    strategy.begin(initial, num_clients=1)  # the population is part of the state that is restored
    found = Checkpoint.load(path, identity=_identity(strategy))
    try:
        restore(strategy, dict(found.tensors))
        done, strategy.federation = int(found.values["num_rounds"]), str(found.values["federation"])
        history = _unpacked(found.tensors["history"])
        for name in _SERIES:
            setattr(result, name, {int(n): MetricRecord(metrics) for n, metrics in history["series"][name].items()})
        strategy.left_out = {int(n): [LeftOut(**one) for one in ones] for n, ones in history["left_out"].items()}
        strategy.lost = {int(n): why for n, why in history["lost"].items()}
    except KeyError as error:
        raise FedeveError(
            f"checkpoint {path} is not a strategy's", got=Words(f"no {error}"), do="choose another"
        ) from None
    result.arrays = strategy.arrays()
    log.log(INFO, "Continuing after round %d, as %s says", done, path)
    if strategy.method.remembers:
        name = strategy.method.name
        log.log(WARNING, "%s: clients must have kept what they remember in fedeve-memory, or the numbers differ", name)
    return done


def _packed(history: dict[str, Any]) -> Tensor:
    """What grows with the rounds as bytes [n]: the plain values of a checkpoint have a limit of 100 MB."""
    return torch.frombuffer(bytearray(gzip.compress(json.dumps(history).encode(), mtime=0)), dtype=torch.uint8)


def _unpacked(history: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(history.numpy().tobytes()))
    return found
