"""The server's part of a round in the lane engine: replies in, the next state and what is sent next out.

One pure function of tensors. On a GPU it is captured once for every method and cohort size and replayed, since its
sixty small kernels would cost the host more than they cost the chip. Runs are not stacked: a sum's order may depend on
how many are summed at once, and a run's bits must not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..method import Method, Sent, Vectors
from ..summary import Summary
from .batched import AVAILABLE
from .pool import captured


class Replies(NamedTuple):
    """What clients of a part sent: `updates` [S, D], their `weights` [S], local `steps` [S], what they remembered."""

    updates: Tensor
    weights: Tensor
    steps: Tensor
    memory: Vectors


class Outcome(NamedTuple):
    """What came of it: the state, what is sent next, what to remember [S, D], facts, and whose reply was finite [S]."""

    state: Any
    sent: Sent
    remember: Vectors
    facts: dict[str, Tensor]
    finite: Tensor


def finish(method: Method, sent: Sent, replies: Replies, lr: float) -> tuple[Vectors, Vectors, Tensor]:
    """What else clients send, what they remember, and whose reply is finite."""
    extras, remember = method.finish(replies.updates, replies.steps, lr, sent, replies.memory)
    return extras, remember, _finite(replies.updates, *extras.values())


def _finite(*vectors: Tensor) -> Tensor:
    ends = [end for vector in vectors for end in (vector.amax(-1), vector.amin(-1))]  # NaN is both; nothing is copied
    return torch.isfinite(torch.stack(ends)).all(0)


def _summary(replies: Replies, extras: Vectors) -> tuple[Summary, Tensor]:
    """The summary, and whose reply is finite."""
    updates = replies.updates
    if not (AVAILABLE and updates.is_cuda and updates.dtype == torch.float32):
        return Summary.of(updates, replies.weights, extras, trusted=True), _finite(updates, *extras.values())
    from .tally import tally

    summary, finite = tally(updates, replies.weights, extras)
    return summary, finite & _finite(*extras.values()) if extras else finite


def close(method: Method, state: Any, replies: Replies, lr: float) -> Outcome:
    """A round of one part, as if every reply were finite."""
    extras, remember = method.finish(replies.updates, replies.steps, lr, method.send(state), replies.memory)
    summary, finite = _summary(replies, extras)
    state, facts = method.step(state, summary)
    return Outcome(state, method.send(state), remember, facts, finite)


class Server:
    """Closes rounds. On a GPU the third like it is captured, and replayed from then on."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._seen: dict[Any, int] = {}
        self._captured: dict[Any, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def close(self, method: Method, state: Any, replies: Replies, lr: float) -> Outcome:
        """As the function of that name."""
        if not self.on_gpu:
            return close(method, state, replies, lr)
        key = (method, lr, replies.updates.shape, replies.updates.dtype)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < 3:
            return close(method, state, replies, lr)
        if key not in self._captured:
            self._captured[key] = _Captured(lambda s, r: close(method, s, r, lr), state, replies, self._pool)
        return self._captured[key](state, replies)


class _Captured:
    """A function of a state and replies as a CUDA graph over tensors of its own."""

    def __init__(self, function: Callable[[Any, Replies], Outcome], state: Any, replies: Replies, pool: Any) -> None:
        self.inputs = [tensor.clone() for tensor in _tensors(state, replies)]
        names = list(replies.memory)
        own_state = type(state)(*self.inputs[: len(state)])
        rest = self.inputs[len(state) :]
        own = Replies(rest[0], rest[1], rest[2], dict(zip(names, rest[3:], strict=True)))

        def run() -> None:
            self.outcome = function(own_state, own)

        self.graph = captured(run, pool)

    def __call__(self, state: Any, replies: Replies) -> Outcome:
        torch._foreach_copy_(self.inputs, _tensors(state, replies))
        self.graph.replay()
        out = self.outcome
        # Copies, since the next replay writes over these.
        return Outcome(
            type(out.state)(*(tensor.clone() for tensor in out.state)),
            Sent(out.sent.params.clone(), _cloned(out.sent.extras)),
            _cloned(out.remember),
            _cloned(out.facts),
            out.finite.clone(),
        )


def _cloned(named: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named.items()}


def _tensors(state: Any, replies: Replies) -> list[Tensor]:
    return [*state, replies.updates, replies.weights, replies.steps, *replies.memory.values()]
