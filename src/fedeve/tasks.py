"""Tasks: what a model's outputs mean, which loss trains them and which metrics judge them.

`classes`: logits [B, C], cross-entropy, top-1 accuracy.
`ranking`: one logit per row [B, 1], binary cross-entropy; AUC, HR@K and NDCG@K. Test rows lie user by user, as many for
each, the positive first.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from . import metrics as judged

TASKS = ("classes", "ranking")
CUTS = (5, 10)


def loss(task: str, outputs: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch; in `ranking`, leading axes of the outputs are models."""
    return cross_entropy(outputs, y) if task == "classes" else losses(task, outputs, y).mean(-1)


def losses(task: str, outputs: Tensor, y: Tensor) -> Tensor:
    """[..., B] the loss of every example."""
    assert task in TASKS, task
    if task == "classes":
        return cross_entropy(outputs, y, reduction="none")
    scores = outputs[..., 0]
    return binary_cross_entropy_with_logits(scores, y.to(scores.dtype).expand_as(scores), reduction="none")


def metrics(task: str, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a record says of the outputs on the whole test set."""
    assert task in TASKS, task
    mean_loss = loss(task, outputs.double(), y)
    if task == "classes":
        return {"accuracy": judged.accuracy(outputs, y), "loss": mean_loss}
    users = y.reshape(int(y.sum()), -1)
    assert (users[:, 0] == 1).all() and (users[:, 1:] == 0).all(), "test rows must lie user by user, the positive first"
    scores = outputs[..., 0]
    ranks = judged.ranks(scores.unflatten(-1, users.shape))
    hits = {f"hr@{k}": judged.hit_rate(ranks, k) for k in CUTS}
    gains = {f"ndcg@{k}": judged.ndcg(ranks, k) for k in CUTS}
    return {"auc": judged.auc(scores, y), **hits, **gains, "loss": mean_loss}
