"""What engines hand to the loop: one turn per round of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..method import Vectors


@dataclass(frozen=True)
class Turn:
    """What one round did: the new state, what to note of it, and what clients remember from now on."""

    num_rounds: int
    """Rounds done so far, this one included."""
    state: Any
    facts: dict[str, float] | None
    """The method's facts; None where nobody who has data answered, which leaves the state as it was."""
    answered: int
    left_out: list[int] = field(default_factory=list)
    """Clients whose update was not finite."""
    writes: dict[int, Vectors] = field(default_factory=dict)
    metrics: dict[str, float] | None = None
    """The evaluation, where one was due after this round."""
    client_steps: int = 0
    """Local steps of all clients together."""
