"""DIN, the deep interest network (Zhou et al. 2018), in the size of the FedEve paper: how likely is this item next?

Its inputs are whole numbers, as `data/movielens.py` looks them up. Losses and metrics are not here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import FedeveError

SIZES = {"user": 15, "gender": 2, "age": 3, "occupation": 5, "zip": 15, "item": 15}
"""Numbers in the embedding of each categorical input, in the order of the inputs."""


class Attention(nn.Module):
    """How much each item of a history matters for a candidate: a score for [candidate, item, difference, product]."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(4 * size, hidden)
        self.score = nn.Linear(hidden, 1)

    def forward(self, candidate: Tensor, history: Tensor, present: Tensor) -> Tensor:
        """The history's weighted sum [B, E], of `candidate` [B, E], `history` [B, H, E] and who is `present` [B, H]."""
        # W [c, h, c - h, c * h] = (W1 + W3) c + (W2 - W3 + W4 diag(c)) h: the concatenation, four times the history,
        # is never made, and each pair costs a quarter of the products.
        w1, w2, w3, w4 = self.hidden.weight.chunk(4, dim=-1)
        constant = candidate @ (w1 + w3).mT + self.hidden.bias
        mix = (w2 - w3) + w4 * candidate.unsqueeze(-2)
        scores = self.score(torch.relu(history @ mix.mT + constant.unsqueeze(-2))).squeeze(-1)
        # The smallest number, not -inf: a history without items then has equal weights, all of them masked below,
        # and neither it nor its gradient is 0/0.
        scores = torch.where(present, scores, torch.finfo(scores.dtype).min)
        weights = torch.where(present, scores.softmax(-1), 0)
        return (weights.unsqueeze(-2) @ history).squeeze(-2)


class DIN(nn.Module):
    """DIN with attention of hidden size 15 and layers 32, 16, 1: 201,668 parameters for MovieLens-1M.

    Embeddings start normal with deviation `spread`. Where the paper is silent: ReLU everywhere, the softmax sees only
    items that are there (item 0 is padding), and an empty history counts as a zero vector.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        cardinalities: tuple[int, ...],
        hidden: int = 15,
        spread: float = 0.1,
    ) -> None:
        super().__init__()
        if len(cardinalities) != len(SIZES):
            raise FedeveError(
                f"DIN embeds {len(SIZES)} inputs ({', '.join(SIZES)})",
                got=cardinalities,
                do="use it with data that has them, such as movielens1m",
            )
        self.embed = nn.ModuleDict(
            {name: nn.Embedding(count, SIZES[name]) for name, count in zip(SIZES, cardinalities, strict=True)}
        )
        for table in self.embed.values():
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=spread)
        self.attention = Attention(SIZES["item"], hidden)
        self.head = nn.Sequential(
            nn.Linear(sum(SIZES.values()) + SIZES["item"], 32), nn.ReLU(),
            nn.Linear(32, 16), nn.ReLU(),
            nn.Linear(16, num_outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[B, 6 + H] whole numbers, the last H the history -> logits [B, outputs]."""
        *tables, item = self.embed.values()
        known = [table(x[..., place]) for place, table in enumerate(tables)]
        items = x[..., len(SIZES) :]
        # The candidate and the history are looked up together, so that their table has one gradient.
        candidate, history = item(x[..., len(SIZES) - 1 :]).split((1, items.shape[-1]), dim=-2)
        candidate = candidate.squeeze(-2)
        attended = self.attention(candidate, history, items != 0)
        logits: Tensor = self.head(torch.cat([*known, candidate, attended], dim=-1))
        return logits
