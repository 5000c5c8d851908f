"""Replies are checked before any arithmetic: what a client sent is either whole and sane, or named and left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from ..method import Method, Sent
from .arrays import MisfitError, Spec, Wire, read

MARK = "fedeve"
"""The record with which a client that corrects its gradients says so, and the one with what else it sends."""
EXTRAS = "fedeve.extras"
UPDATE, MOVED = "update", "statistics"


@dataclass(frozen=True)
class Reply:
    """What a client sent: its place in the cohort, its weight and its vectors, `update` first."""

    place: int
    node: int
    weight: float
    vectors: Mapping[str, Tensor]
    norms: Mapping[str, float]


@dataclass(frozen=True)
class LeftOut:
    """A reply that was not used, whose it was, and why."""

    node: int
    place: int | None
    reason: str


def needs_correction(method: Method) -> bool:
    """Whether clients must correct their gradients, which one that knows nothing of it would not do."""
    return type(method).correction is not Method.correction


def weight_of(content: RecordDict, key: str, *, most: float) -> float:
    """The number of examples a reply says it was made from; raises `MisfitError` if it is none."""
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise MisfitError(f"has {len(records)} metric records instead of one")
    value = records[0].get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MisfitError(f"has no number under {key!r}")
    if not math.isfinite(value) or value <= 0:
        raise MisfitError(f"says {key} = {value}")
    if value > most:
        raise MisfitError(f"says {key} = {value:g}, more than {most:g}")
    return float(value)


def read_reply(
    message: Message,
    place: int,
    *,
    wire: Wire,
    sent: Sent,
    start: Tensor,
    method: Method,
    weighted_by: str,
    most: float,
) -> Reply:
    """A reply whose every number was looked at; raises `MisfitError` with what is wrong.

    `start` are the running statistics that were sent.
    """
    if message.has_error():
        raise MisfitError(f"failed: {message.error.reason}")
    content = message.content
    weight = weight_of(content, weighted_by, most=most)
    mark = content.config_records.get(MARK)
    if needs_correction(method) and (mark is None or mark.get("method") != method.name):
        raise MisfitError(f"was not corrected for {method.name}; its client needs fedeve.flower.correct")
    record = _model_arrays(content)
    wire.check(record)
    vectors = {UPDATE: wire.vector(record).sub_(sent.params)}
    if wire.named("statistics"):
        vectors[MOVED] = wire.vector(record, "statistics") - start
    vectors |= _extras(content, method, sent.params)
    norms = {name: norm_of(vector) for name, vector in vectors.items()}
    for name, norm in norms.items():
        if not math.isfinite(norm):
            raise MisfitError(f"its {name} is too large to square")
    return Reply(place, message.metadata.src_node_id, weight, vectors, norms)


def norm_of(vector: Tensor) -> float:
    """The norm in float64, a piece at a time, since a copy of the vector in float64 would be the largest thing here."""
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in vector.split(1 << 16)))


def _model_arrays(content: RecordDict) -> ArrayRecord:
    records = [record for name, record in content.array_records.items() if name != EXTRAS]
    if len(records) != 1:
        raise MisfitError(f"has {len(records)} array records instead of one")
    return records[0]


def _extras(content: RecordDict, method: Method, like: Tensor) -> dict[str, Tensor]:
    if not method.replies:
        return {}
    record = content.array_records.get(EXTRAS) or ArrayRecord()
    spec = Spec(tuple(like.shape), str(like.dtype).removeprefix("torch."), "params")
    missing = [name for name in method.replies if name not in record]
    if missing:
        raise MisfitError(f"misses {missing[0]!r}, which {method.name} needs; its client needs fedeve.flower.correct")
    # Copied, since what comes out of a message cannot be written to.
    return {name: torch.from_numpy(read(name, record[name], spec).copy()) for name in method.replies}


def metrics_of(content: RecordDict) -> RecordDict:
    """A reply's metrics alone: arrays are gone by the time metrics are averaged."""
    return RecordDict({name: MetricRecord(dict(record)) for name, record in content.metric_records.items()})


def averaged(contents: list[RecordDict], key: str) -> MetricRecord:
    """The mean, weighted by `key`, of every metric that all contents have in the same form."""
    records = [next(iter(content.metric_records.values())) for content in contents]
    weights = [float(record[key]) for record in records]  # type: ignore[arg-type]
    total = math.fsum(weights)
    out = MetricRecord()
    for name, first in records[0].items():
        values = [record.get(name) for record in records]
        if name == key:
            continue
        if not isinstance(first, list):
            if all(isinstance(value, int | float) for value in values):
                out[name] = _mean([float(v) for v in values], weights, total)  # type: ignore[arg-type]
        elif all(isinstance(value, list) and len(value) == len(first) for value in values):
            columns = zip(*values, strict=True)
            out[name] = [_mean([float(v) for v in column], weights, total) for column in columns]
    return out


def _mean(values: list[float], weights: list[float], total: float) -> float:
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
