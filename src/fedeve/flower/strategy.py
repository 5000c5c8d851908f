"""MethodStrategy: any of our methods as a strategy of Flower's Message API.

A round: the method's `send` goes to a seeded cohort, replies are checked and folded in a fixed order, and `step` moves
the state. Flower's own loop can drive it; `start` is ours, because it streams replies, saves and resumes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING, getLogger
from typing import Any, ClassVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from ..errors import FedeveError, Words
from ..method import Method, Sent
from . import checks, loop
from .arrays import MisfitError, Wire
from .checks import EXTRAS, MARK, LeftOut
from .gather import Gathering
from .grid import Asked
from .nodes import Nodes, share_of
from .options import Sampling, check_method, read_options

Aggregate = Callable[[list[RecordDict], str], MetricRecord | None]
log = getLogger("flwr")


class MethodStrategy(Strategy):
    """A Flower strategy from a method, `MethodStrategy(FedEve(server_lr=1.0), fraction_train=0.1, seed=7)`.

    Up to `evaluate_metrics_aggr_fn` the arguments are those of Flower's FedAvg, with their meaning; the other keywords
    are those of `Options`. `left_out` and `lost` say which replies and rounds could not be used, by round.
    """

    hyper_parameters: ClassVar[tuple[str, ...]] = ()
    """The method's, where they are keywords of the strategy."""

    def __init__(
        self,
        method: Method,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregate | None = None,
        evaluate_metrics_aggr_fn: Aggregate | None = None,
        **options: Any,
    ) -> None:
        check_method(method)
        self.method = method
        flowers = tuple(inspect.signature(MethodStrategy.__init__).parameters)[2:-1]
        self.options = read_options(options, others=(*flowers, *self.hyper_parameters))
        sampling = Sampling(
            fraction_train=fraction_train, fraction_evaluate=fraction_evaluate, min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes, min_available_nodes=min_available_nodes,
        )  # fmt: skip
        self.fraction_train, self.fraction_evaluate = sampling.fraction_train, sampling.fraction_evaluate
        self.min_train_nodes, self.min_evaluate_nodes = sampling.min_train_nodes, sampling.min_evaluate_nodes
        self.min_available_nodes = sampling.min_available_nodes
        self.weighted_by_key, self.arrayrecord_key = weighted_by_key, arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or checks.averaged
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or checks.averaged
        self.nodes = Nodes(self.options.nodes, self.options.seed)
        self.left_out: dict[int, list[LeftOut]] = {}
        self.lost: dict[int, str] = {}
        self.wire: Wire | None = None
        self.state: Any = None
        self.statistics = torch.zeros(0)
        self.federation = ""
        self._sent = Sent(torch.zeros(0))
        self._returned: dict[str, Array] = {}
        self._cohort: dict[int, int] = {}
        self._asked = Asked()

    def summary(self) -> None:
        """Log what this strategy is."""
        values = ", ".join(f"{key}={value!r}" for key, value in dataclasses.asdict(self.method).items())
        log.log(INFO, "\t├──> Method: %s(%s)", type(self.method).__name__, values)
        log.log(INFO, "\t├──> Fraction: train (%.2f) | evaluate (%.2f)", self.fraction_train, self.fraction_evaluate)
        log.log(INFO, "\t└──> Seed %d, checkpoint: %s", self.options.seed, self.options.checkpoint or "none")

    # The server's state.

    def forget(self) -> None:
        """Be as new: what was learned, left out and lost belongs to the run before."""
        self.wire, self.state, self.left_out, self.lost = None, None, {}, {}

    def begin(self, arrays: ArrayRecord, *, num_clients: int) -> None:
        """Start from these arrays, with this population."""
        self.wire = Wire.of(arrays, statistics=self.options.statistics)
        self.statistics = self.wire.vector(arrays, "statistics")
        self.federation = uuid.uuid4().hex[:16]  # so that clients tell what they remember of it from anything else
        self._returned = dict(arrays)
        self.state = self.method.init(self.wire.vector(arrays), num_clients=self.options.num_clients or num_clients)

    def arrays(self) -> ArrayRecord:
        """The model to evaluate: the fused one, not the prediction that clients start from."""
        assert self.wire is not None
        record = self.wire.record(self.state.params, self.statistics)
        self._returned = dict(record)
        return record

    def adopt(self, arrays: ArrayRecord) -> None:
        """Take over arrays that were changed since we returned them (central differential privacy adds noise).

        They are compared one by one, since a subclass may put others into the record that we returned.
        """
        assert self.wire is not None
        if len(arrays) == len(self._returned) and all(a is self._returned.get(n) for n, a in arrays.items()):
            return
        try:
            self.wire.check(arrays)
            params, self.statistics = self.wire.vector(arrays), self.wire.vector(arrays, "statistics")
        except MisfitError as error:
            raise FedeveError(
                "the model's arrays changed between rounds", got=Words(str(error)), do="pass on what was returned"
            ) from None
        self.state = self.state._replace(params=params)
        self._returned = dict(arrays)

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for every client of the round's cohort: the prediction, and what corrections need."""
        if self.fraction_train == 0.0:
            return []
        self.nodes.wait(grid, max(self.min_available_nodes, self.min_train_nodes))
        if self.wire is None:
            self.begin(arrays, num_clients=len(self.nodes))
        else:
            self.adopt(arrays)
        chosen = self.nodes.cohort(share_of(len(self.nodes), self.fraction_train, self.min_train_nodes), server_round)
        log.log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(chosen), len(self.nodes))
        self._cohort = {node: place for place, node in enumerate(chosen)}
        content = self._message_content(server_round, config)
        messages = [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node) for node in chosen]
        self._asked = Asked(messages)
        return messages

    def _message_content(self, server_round: int, config: ConfigRecord) -> RecordDict:
        assert self.wire is not None
        sent = self.method.send(self.state)
        record = self.wire.record(sent.params, self.statistics)
        # Read back: in float16 what a client gets is not what the server has, and updates count from what it gets.
        self._sent = Sent(self.wire.vector(record), sent.extras)
        about = {"name": self.method.name, **dataclasses.asdict(self.method)}
        config["server-round"] = server_round
        told = {
            "method": about,
            "seed": self.options.seed,
            "federation": self.federation,
            "statistics": self.options.statistics,
        }
        config[MARK] = json.dumps(told)
        content = RecordDict({self.arrayrecord_key: record, self.configrecord_key: config})
        if sent.extras:
            content[EXTRAS] = ArrayRecord({name: Array(vector.numpy()) for name, vector in sent.extras.items()})
        return content

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and fold the replies and step; without enough good ones the state stays and the round is lost."""
        if self.wire is None:
            return None, None
        options = self.options
        gathering = Gathering(options.outlier, options.max_outliers, options.clip_norm)
        told: dict[int, RecordDict] = {}
        for message in self._ordered(replies):
            self._take(self._asked.node(message), message, gathering, told)
            del message  # the next one is fetched while this would still be held
        gathering.finish()
        cohort, sent = self._cohort, self._asked.sent
        self._cohort, self._asked = {}, Asked()  # the next round may be another's: a subclass can pass one over
        if not sent and not told and not gathering.left_out:
            return None, None
        heard = set(told) | {one.place for one in gathering.left_out}
        silent = [(node, place) for node, place in cohort.items() if place not in heard]
        gathering.left_out += [LeftOut(node, place, "did not answer in time") for node, place in silent]
        facts = self._step(gathering)
        for one in gathering.left_out:
            log.log(WARNING, "round %d: the reply of node %d is left out: %s", server_round, one.node, one.reason)
        if gathering.left_out:
            self.left_out[server_round] = gathering.left_out
        good = [told[place] for place in sorted(gathering.used)]
        metrics = (self.train_metrics_aggr_fn(good, self.weighted_by_key) if good else None) or MetricRecord()
        if gathering.lost:
            self.lost[server_round] = gathering.lost
            log.log(WARNING, "round %d is lost: %s; the model stays as it was", server_round, gathering.lost)
        metrics.update(facts)
        metrics.update(_counts(gathering, asked=len(cohort)))
        return (None if gathering.lost else self.arrays()), metrics

    def _ordered(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Replies in the cohort's order: our loop streams them so, Flower's gives a list."""
        if not isinstance(replies, Sequence):
            return replies
        return sorted(replies, key=lambda message: self._cohort.get(self._asked.node(message), len(self._cohort)))

    def _take(self, node: int, message: Message, gathering: Gathering, told: dict[int, RecordDict]) -> None:
        assert self.wire is not None
        place = self._cohort.get(node)
        try:
            if place is None:
                failed = f"failed: {message.error.reason}" if message.has_error() else "is not of this cohort"
                raise MisfitError(failed)
            if place in told:
                raise MisfitError("came twice")
            reply = checks.read_reply(
                message, place, wire=self.wire, sent=self._sent, start=self.statistics, method=self.method,
                weighted_by=self.weighted_by_key, most=self.options.max_examples,
            )  # fmt: skip
        except MisfitError as error:
            gathering.left_out.append(LeftOut(node, place, str(error)))
            return
        told[place] = checks.metrics_of(message.content)
        gathering.add(reply)

    def _step(self, gathering: Gathering) -> dict[str, float]:
        """Move the state, unless the round is lost; the method's facts."""
        good, least = gathering.num_good, self.options.min_replies
        if not gathering.lost and good < least:
            gathering.lost = f"{good} good replies, {least} needed"
        if gathering.lost or gathering.updates is None:
            return {}
        state, facts = self.method.step(self.state, gathering.updates.summary())
        if not all(bool(torch.isfinite(tensor).all()) for tensor in state):
            gathering.lost = "the new state would not be finite"
            return {}
        self.state = state
        if gathering.statistics is not None:
            self.statistics = (self.statistics.double() + gathering.statistics.mean).to(self.statistics.dtype)
        return {f"server/{name}": float(value) for name, value in facts.items()}

    # Evaluation by clients.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for every client that evaluates: the fused model."""
        if self.fraction_evaluate == 0.0:
            return []
        self.nodes.wait(grid, max(self.min_available_nodes, self.min_evaluate_nodes))
        size = share_of(len(self.nodes), self.fraction_evaluate, self.min_evaluate_nodes)
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        chosen = self.nodes.evaluators(size, server_round)
        messages = [Message(content=content, message_type=MessageType.EVALUATE, dst_node_id=node) for node in chosen]
        self._asked = Asked(messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The weighted mean of what clients measured, in a fixed order; unusable replies are named and left out."""
        good: dict[int, RecordDict] = {}
        for message in replies:
            node = self._asked.node(message)
            try:
                if message.has_error():
                    raise MisfitError(f"failed: {message.error.reason}")
                checks.weight_of(message.content, self.weighted_by_key, most=self.options.max_examples)
            except MisfitError as error:
                log.log(WARNING, "round %d: the evaluation of node %d is left out: %s", server_round, node, error)
                continue
            good[node] = checks.metrics_of(message.content)
        ordered = [good[node] for node in sorted(good, key=self.nodes.number)]
        return self.evaluate_metrics_aggr_fn(ordered, self.weighted_by_key) if ordered else None

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
        """Play `num_rounds` rounds, or those that are left where the checkpoint says that some are done."""
        plan = loop.Plan(num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        return loop.play(self, self, grid, initial_arrays, plan)


def _counts(gathering: Gathering, *, asked: int) -> dict[str, int]:
    return {
        "server/asked": asked,
        "server/answered": gathering.num_good,
        "server/left_out": len(gathering.left_out),
        "server/clipped": gathering.clipped,
        "server/lost": int(bool(gathering.lost)),
    }


def snapshot(strategy: MethodStrategy) -> dict[str, Tensor]:
    """Everything a checkpoint needs of the server's state."""
    named = {f"state.{name}": tensor for name, tensor in strategy.state._asdict().items()}
    return {**named, "statistics": strategy.statistics}


def restore(strategy: MethodStrategy, tensors: dict[str, Tensor]) -> None:
    """Put back what `snapshot` gave; the strategy has begun."""
    found = {name: tensors[f"state.{name}"] for name in strategy.state._fields}
    strategy.state, strategy.statistics = strategy.state._replace(**found), tensors["statistics"]
