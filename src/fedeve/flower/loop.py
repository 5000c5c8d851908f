"""The rounds of a federation: Flower's loop, but replies are streamed in order, and rounds are saved and resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO, getLogger
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

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
    if inner is not None:
        inner.forget()
    if inner is not None and inner.options.checkpoint is not None and inner.options.checkpoint.exists():
        done = _resume(inner, grid, initial, result)
    elif plan.evaluate_fn is not None:
        _note(result.evaluate_metrics_serverapp, 0, plan.evaluate_fn(0, initial))
    train, evaluate = plan.train_config or ConfigRecord(), plan.evaluate_config or ConfigRecord()
    for number in range(done + 1, plan.num_rounds + 1):
        log.log(INFO, "[ROUND %s/%s]", number, plan.num_rounds)
        messages = hooks.configure_train(number, result.arrays, train, grid)
        arrays, metrics = hooks.aggregate_train(number, _replies(inner, grid, messages, plan.timeout))
        if arrays is not None:
            result.arrays = arrays
        _note(result.train_metrics_clientapp, number, metrics)
        messages = hooks.configure_evaluate(number, result.arrays, evaluate, grid)
        replies = _replies(inner, grid, messages, plan.timeout)
        _note(result.evaluate_metrics_clientapp, number, hooks.aggregate_evaluate(number, replies))
        if plan.evaluate_fn is not None:
            _note(result.evaluate_metrics_serverapp, number, plan.evaluate_fn(number, result.arrays))
        if inner is not None and inner.options.checkpoint is not None and inner.state is not None:
            _save(inner, number, result)
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


def _save(strategy: MethodStrategy, number: int, result: Result) -> None:
    from .strategy import snapshot

    series = {name: {str(n): dict(record) for n, record in getattr(result, name).items()} for name in _SERIES}
    left_out = {str(n): [dataclasses.asdict(one) for one in found] for n, found in strategy.left_out.items()}
    values = {"num_rounds": number, "series": series, "left_out": left_out, "lost": strategy.lost}
    strategy.options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    Checkpoint(snapshot(strategy), values).save(strategy.options.checkpoint, identity=_identity(strategy))


def _resume(strategy: MethodStrategy, grid: Grid, initial: ArrayRecord, result: Result) -> int:
    """Put the strategy and the result where the checkpoint left them; how many rounds are done."""
    from .checks import LeftOut
    from .strategy import restore

    strategy.begin(initial, num_clients=1)  # the population is part of the state that is restored
    found = Checkpoint.load(strategy.options.checkpoint, identity=_identity(strategy))
    try:
        restore(strategy, dict(found.tensors))
        values: dict[str, Any] = dict(found.values)
        for name in _SERIES:
            setattr(result, name, {int(n): MetricRecord(metrics) for n, metrics in values["series"][name].items()})
        strategy.left_out = {int(n): [LeftOut(**one) for one in ones] for n, ones in values["left_out"].items()}
        strategy.lost = {int(n): why for n, why in values["lost"].items()}
    except KeyError as error:
        path = strategy.options.checkpoint
        raise FedeveError(
            f"checkpoint {path} is not a strategy's", got=Words(str(error)), do="choose another"
        ) from None
    result.arrays = strategy.arrays()
    log.log(INFO, "Continuing after round %d, as %s says", values["num_rounds"], strategy.options.checkpoint)
    return int(values["num_rounds"])
