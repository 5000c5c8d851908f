"""What a method is: it says what is sent, how a client's gradient is corrected, and what the server does with a
summary of the updates. It never sees data, models, devices, loops or identities; those are the engines'.

Everything is arithmetic on the last axis of flat vectors: a vector is `[..., D]`, a scalar `[...]`, and the leading
axes are lanes, so many runs stack without touching the method. No random numbers, no `.item()`, no `if` on tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from . import settings
from .errors import FedeveError, Words
from .summary import Summary

Vector: TypeAlias = Tensor  # [..., D], in the dtype of the params
Scalar: TypeAlias = Tensor  # [...], in float64
Vectors: TypeAlias = Mapping[str, Vector]
Facts: TypeAlias = dict[str, Scalar]


class State(Protocol):
    """What the server keeps between rounds: a NamedTuple of tensors, `params` always among them."""

    @property
    def params(self) -> Vector: ...


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Sent:
    """What goes down to every client of a cohort: where it starts, and further vectors by name."""

    params: Vector
    extras: Vectors = field(default_factory=dict)


class Correction(NamedTuple):
    """How a client's gradient is corrected at every local step: `grad + prox * (params - start) + shift`."""

    prox: float | Scalar = 0.0
    shift: Vector | None = None


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A server method. Its fields are its hyper-parameters; `init`, `send` and `step` are all that most need.

    A complete one, FedAvg with a decaying server rate:

    >>> import torch
    >>> from typing import NamedTuple
    >>> class CoolingState(NamedTuple):
    ...     params: Vector
    ...     rate: Scalar
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Cooling(Method):
    ...     decay: float = settings.setting(0.5, help="what the rate is multiplied with", low=0, high=1)
    ...     def init(self, params, *, num_clients=1):
    ...         return CoolingState(params, scalar_like(params, 1.0))
    ...     def step(self, state, summary):
    ...         params = state.params + lane(state.rate) * observed(state, summary)
    ...         return keep(state, params=params, rate=state.rate * self.decay), {"rate": state.rate}
    >>> method = Cooling()
    >>> state = method.init(torch.zeros(2))
    >>> updates = torch.tensor([[1.0, 0.0], [3.0, 0.0]])               # [S, D] = end - start
    >>> for _ in range(2):
    ...     start = method.send(state).params                          # where clients start
    ...     state, facts = method.step(state, Summary.of(updates, torch.tensor([1.0, 1.0])))
    >>> state.params
    tensor([3., 0.])
    """

    remembers: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors every client keeps between rounds, zero at first."""
    replies: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors a client sends up besides its update; `Summary.extras` holds their plain mean."""
    neutral: ClassVar[Mapping[str, float] | None] = None
    """Hyper-parameters with which the method is FedAvg, where there are such."""

    def __post_init__(self) -> None:
        settings.check(self, where=f"{self.name}.")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def init(self, params: Vector, *, num_clients: int = 1) -> Any:
        """The state before the first round. `num_clients` is the population, for those that need S/N."""

    def send(self, state: Any) -> Sent:
        """What clients of the next cohort receive."""
        return Sent(state.params)

    def correction(self, sent: Sent, memory: Vectors) -> Correction:
        """How one client's gradients are corrected, from what it was sent and what it remembers."""
        return Correction()

    def finish(
        self, update: Vector, num_steps: float | Scalar, lr: float | Scalar, sent: Sent, memory: Vectors
    ) -> tuple[Vectors, Vectors]:
        """After `num_steps` local steps at rate `lr`: what else a client sends, and what it remembers."""
        return {}, {}

    @abstractmethod
    def step(self, state: Any, summary: Summary) -> tuple[Any, Facts]:
        """The server's part of one round: a new state, and facts worth recording (scalars `[...]`)."""


def lane(scalar: float | Scalar) -> float | Tensor:
    """A scalar per lane, shaped so that it multiplies vectors: `[...]` becomes `[..., 1]`."""
    return scalar[..., None] if isinstance(scalar, Tensor) else scalar


def scalar_like(params: Vector, value: float) -> Scalar:
    """A float64 scalar for every lane of `params`."""
    return torch.full(params.shape[:-1], value, dtype=torch.float64, device=params.device)


def observed(state: State, summary: Summary) -> Vector:
    """The clients' averaged update in float64, checked to be of the state's shape."""
    if summary.mean.shape != state.params.shape:
        raise FedeveError(
            "the updates do not fit the model",
            got=Words(f"updates of shape {tuple(summary.mean.shape)}"),
            do=f"send updates of shape {tuple(state.params.shape)}, end minus start of every parameter",
        )
    return summary.mean


def keep(state: S, **fields: Tensor) -> S:
    """The state with new values in these fields, each in the dtype it had (arithmetic is done in float64)."""
    named: Any = state  # a NamedTuple, for which the type system has no word
    new: S = named._replace(**{name: value.to(getattr(state, name).dtype) for name, value in fields.items()})
    return new
