"""Tasks: what a model's outputs mean, which loss trains them and which metrics judge them.

`classes`: logits [B, C], cross-entropy, top-1 accuracy.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from . import metrics as judged


def loss(task: str, outputs: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch."""
    assert task == "classes", task
    return cross_entropy(outputs, y)


def metrics(task: str, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a record says of the outputs on the whole test set."""
    assert task == "classes", task
    return {"accuracy": judged.accuracy(outputs, y), "loss": cross_entropy(outputs.double(), y)}
