"""DriftMonitor: wraps any strategy of Flower's Message API, ours or theirs, and only measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import WARNING, getLogger
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ..errors import FedeveError
from ..methods.fedeve import FedEve
from . import checks, loop
from .arrays import STATISTICS, MisfitError, Wire
from .gather import Gathering
from .strategy import MethodStrategy

log = getLogger("flwr")


class DriftMonitor(Strategy):
    """Adds `drift/client`, `drift/period` and `drift/gain` to the metrics of the strategy it wraps.

    They are what FedEve would compute from the same updates: its filter runs beside the strategy, and nothing that is
    sent or averaged changes. Use it as the strategy: `DriftMonitor(FedAvg()).start(grid, ...)`. Rounds that the
    strategy loses, and models that cannot be measured (not finite, or trees), go without.
    """

    def __init__(self, strategy: Strategy, *, weighted_by_key: str | None = None) -> None:
        self.strategy = strategy
        self.weighted_by_key: str = weighted_by_key or str(getattr(strategy, "weighted_by_key", "num-examples"))
        self._filter = FedEve()
        self._state: Any = None
        self._wire: Wire | None = None
        self._warned = False
        self._start = torch.zeros(0)
        self._gathering, self._place = self._gather(), 0

    def summary(self) -> None:
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._gathering, self._wire = self._gather(), None
        if messages:  # what is sent, not `arrays`: a strategy may send a prediction
            self._begin(_model(messages[0]) or ArrayRecord())
        return messages

    def _begin(self, record: ArrayRecord) -> None:
        ours = self.strategy.options if isinstance(self.strategy, MethodStrategy) else None
        try:
            self._wire = Wire.of(record, statistics=STATISTICS if ours is None else ours.statistics)
            self._start = self._wire.vector(record)
        except FedeveError as error:
            if not self._warned:
                log.log(WARNING, "the drifts are not measured: %s", error)
            self._warned = True

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        watched: Iterable[Message] = self._watch(replies)
        if isinstance(replies, Sequence):  # as it came, for strategies that want a list
            watched = list(watched)
        arrays, metrics = self.strategy.aggregate_train(server_round, watched)
        if arrays is not None and (measured := self._measure()):
            metrics = MetricRecord() if metrics is None else metrics
            metrics.update(measured)
        return arrays, metrics

    def _watch(self, replies: Iterable[Message]) -> Iterator[Message]:
        for message in replies:
            self._look(message)
            yield message

    def _gather(self) -> Gathering:
        """What the wrapped strategy would fold: ours leaves out and clips, Flower's take all they can read."""
        if isinstance(self.strategy, MethodStrategy):
            options = self.strategy.options
            return Gathering(options.outlier, options.max_outliers, options.clip_norm)
        return Gathering(None, 1, None)

    def _look(self, message: Message) -> None:
        """Fold a usable reply in; others are the strategy's business."""
        if self._wire is None or message.has_error():
            return
        try:
            record = _model(message)
            if record is None:
                raise MisfitError("has no arrays")
            self._wire.check(record)
            weight = checks.weight_of(message.content, self.weighted_by_key, most=float("inf"))
            update = self._wire.vector(record).sub_(self._start)
            norms = {checks.UPDATE: checks.norm_of(update)}
            if not math.isfinite(norms[checks.UPDATE]):
                raise MisfitError("its update is too large to square")
        except MisfitError:
            return
        self._place += 1
        reply = checks.Reply(self._place, message.metadata.src_node_id, weight, {checks.UPDATE: update}, norms)
        self._gathering.add(reply)

    def _measure(self) -> dict[str, float]:
        self._gathering.finish()
        if self._gathering.updates is None:
            return {}
        if self._state is None:
            self._state = self._filter.init(torch.zeros_like(self._start))
        self._state, facts = self._filter.step(self._state, self._gathering.updates.summary())
        return {
            "drift/client": float(facts["client_drift"]),
            "drift/period": float(facts["period_drift"]),
            "drift/gain": float(facts["gain"]),
        }

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """The wrapped strategy's rounds, measured; a strategy of ours still streams, saves and resumes."""
        self._state, self._warned = None, False
        plan = loop.Plan(num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        inner = self.strategy if isinstance(self.strategy, MethodStrategy) else None
        return loop.play(self, inner, grid, initial_arrays, plan)


def _model(message: Message) -> ArrayRecord | None:
    return next((record for name, record in message.content.array_records.items() if name != checks.EXTRAS), None)
