"""The monitor: what FedEve would estimate, beside any method: both drifts and the gain, in every round's facts.

It is a filter that runs in the method's shadow: it sees the same summaries and changes nothing. It costs one vector
of server state and a few passes over vectors a round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import torch

from ..method import Facts, Method, Vector, observed, scalar_like
from ..methods import kalman
from ..methods.fedeve import FedEve
from ..methods.fedeveadam import FedEveAdam
from ..summary import Summary

FACTS = ("gain", "period_drift", "client_drift")


def watched(method: Method) -> Method:
    """The method with the monitor's facts beside its own; FedEve and its kin, which have them, as they are.

    >>> from fedeve import FedAvg, Summary
    >>> method = watched(FedAvg())
    >>> state, facts = method.step(method.init(torch.zeros(2)), Summary.of(torch.ones(3, 2), torch.ones(3)))
    >>> method.name, state.params.tolist(), sorted(facts)
    ('fedavg', [1.0, 1.0], ['client_drift', 'gain', 'period_drift'])
    """
    if isinstance(method, (FedEve, FedEveAdam, _Watch)):
        return method
    return _class(type(method))(**{f.name: getattr(method, f.name) for f in dataclasses.fields(method)})


class _Watch:
    """Goes before a method's class: `init` adds the filter's state to the method's, `step` moves both."""

    def init(self, params: Vector, *, num_clients: int = 1) -> Any:
        state = super().init(params, num_clients=num_clients)  # type: ignore[misc]
        cls: Any = type(state)
        return _state_class(cls)(*state, torch.zeros_like(params), scalar_like(params, 0.0))

    def step(self, state: Any, summary: Summary) -> tuple[Any, Facts]:
        plain = getattr(type(state), "plain", None)
        if plain is None:  # a state that was begun without the monitor has nothing to watch with
            return super().step(state, summary)  # type: ignore[misc]
        own, facts = super().step(plain(*state[:-2]), summary)  # type: ignore[misc]
        u, momentum = observed(state, summary), state.watch_momentum.double()
        period = kalman.period_drift(momentum, u, summary.count)  # (16), as FedEve's step
        client = kalman.client_drift(summary.spread, summary.count, u.shape[-1])
        fused = kalman.update(momentum, kalman.predict(state.watch_variance, period), u, client)
        seen = {"gain": fused.gain, "period_drift": period, "client_drift": client}
        return type(state)(*own, fused.mean.to(state.watch_momentum.dtype), fused.variance), seen | facts


@functools.cache
def _class(cls: type[Method]) -> type[Method]:
    # A subclass, not a wrapper: hyper-parameters stay fields, so engines that stack them need not know.
    return type(cls.__name__, (_Watch, cls), {"__doc__": cls.__doc__, "__module__": cls.__module__})


@functools.cache
def _state_class(cls: Any) -> Any:
    fields = (*cls._fields, "watch_momentum", "watch_variance")
    return type(cls.__name__, (namedtuple(cls.__name__, fields),), {"__slots__": (), "plain": cls})
