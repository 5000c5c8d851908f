"""DIN: its size, its attention against the plain formula, and what padding must not do."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fedeve import FedeveError
from fedeve.models.din import DIN, SIZES

MOVIELENS = (6040, 2, 7, 21, 3439, 3707)
SMALL = (11, 2, 7, 21, 9, 30)


def din(cardinalities: tuple[int, ...] = SMALL, **options: object) -> DIN:
    torch.manual_seed(3)
    return DIN((2,), 1, cardinalities=cardinalities, **options)


def inputs(*shape: int, history: int = 8, seed: int = 0) -> torch.Tensor:
    """Random rows whose histories are padded by 0, 1, 2, ... up to all of it, in turn."""
    generator = torch.Generator().manual_seed(seed)
    known = [torch.randint(1, count, (*shape, 1), generator=generator) for count in SMALL]
    items = torch.randint(1, SMALL[-1], (*shape, history), generator=generator)
    padding = torch.arange(shape[-1]).expand(shape) % (history + 1)
    items[torch.arange(history) < padding.unsqueeze(-1)] = 0
    return torch.cat([*known, items], dim=-1)


def test_parameters_by_hand():
    embeddings = 6040 * 15 + 2 * 2 + 7 * 3 + 21 * 5 + 3439 * 15 + 3707 * 15
    attention = (4 * 15 * 15 + 15) + (15 + 1)
    width = 15 + 2 + 3 + 5 + 15 + 15 + 15
    layers = (width * 32 + 32) + (32 * 16 + 16) + (16 + 1)
    assert embeddings + attention + layers == 201_668
    assert sum(p.numel() for p in din(MOVIELENS).parameters()) == 201_668


def test_one_logit_per_row_for_any_length_of_history():
    assert din()(inputs(5)).shape == (5, 1)
    assert din()(inputs(5, history=50)).shape == (5, 1)
    assert din()(inputs(3, 4)).shape == (3, 4, 1)


def slow(model: DIN, row: torch.Tensor) -> torch.Tensor:
    """One row by the formula: a score for every item that is there, of the concatenation."""
    tables = [table.weight for table in model.embed.values()]
    known = [table[index] for table, index in zip(tables, row[: len(SIZES)].tolist(), strict=True)]
    candidate, item = known[-1], tables[-1]
    history = [item[index] for index in row[len(SIZES) :].tolist() if index]
    attended = torch.zeros_like(candidate)
    if history:
        attention = model.attention
        pairs = [torch.cat([candidate, past, candidate - past, candidate * past]) for past in history]
        scores = torch.stack([attention.score(attention.hidden(pair).relu())[0] for pair in pairs])
        attended = (scores.softmax(0)[:, None] * torch.stack(history)).sum(0)
    return model.head(torch.cat([*known, attended]))


def test_rows_follow_the_formula_whatever_the_length_of_their_history():
    model, x = din(spread=1.0).double(), inputs(40)
    assert torch.allclose(model(x), torch.stack([slow(model, row) for row in x]), atol=1e-12)


def test_attention_depends_on_the_candidate_and_on_each_item():
    model, x = din(spread=1.0), inputs(1).expand(3, -1).clone()
    x[1, 5], x[2, -1] = x[0, 5] % 29 + 1, x[0, -1] % 29 + 1
    attended = model.attention(model.embed["item"](x[:, 5]), model.embed["item"](x[:, 6:]), x[:, 6:] != 0)
    assert not torch.allclose(attended[0], attended[1])
    assert not torch.allclose(attended[0], attended[2])


def test_the_order_of_a_history_and_the_amount_of_padding_do_not_matter():
    model, x = din().double(), inputs(9)
    turned = torch.cat([x[:, :6], x[:, 6:].flip(-1)], dim=-1)
    wider = torch.cat([x[:, :6], torch.zeros(9, 40, dtype=torch.int64), x[:, 6:]], dim=-1)
    assert torch.allclose(model(turned), model(x), atol=1e-12)
    assert torch.allclose(model(wider), model(x), atol=1e-12)


def test_padding_is_never_looked_at_nor_trained():
    model, x = din(), inputs(20)
    before = model(x)
    before.sum().backward()
    assert model.embed["item"].weight.grad[0].abs().max() == 0
    with torch.no_grad():
        model.embed["item"].weight[0] = 1e6
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_empty_history_gives_numbers_and_gradients_of_numbers(dtype):
    model, x = din().to(dtype), inputs(6)
    x[:, 6:] = 0
    logits = model(x)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.attention.hidden.weight.grad.abs().max() == 0
    assert model.embed["item"].weight.grad.abs().max() > 0  # of the candidate


def loss(model: DIN, params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return binary_cross_entropy_with_logits(functional_call(model, params, (x,))[:, 0], y)


def test_gradients_of_many_models_at_once_are_those_of_each():
    model, x = din().double(), inputs(4, 6)
    y = (x.sum(-1) % 2).double()
    noise = torch.Generator().manual_seed(1)
    lanes = {
        name: p.detach() + 0.1 * torch.randn(4, *p.shape, dtype=p.dtype, generator=noise)
        for name, p in model.named_parameters()
    }
    together = vmap(grad(lambda p, x, y: loss(model, p, x, y)))(lanes, x, y)
    for lane in range(4):
        alone = grad(lambda p, lane=lane: loss(model, p, x[lane], y[lane]))({n: p[lane] for n, p in lanes.items()})
        for name, value in alone.items():
            assert torch.allclose(together[name][lane], value, atol=1e-12), name


def test_gradients_are_right_by_finite_differences():
    model, x = din().double(), inputs(9)
    table = model.embed["item"].weight.detach().clone().requires_grad_()
    attention = model.attention.hidden.weight.detach().clone().requires_grad_()

    def logits(table: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        return functional_call(model, {"embed.item.weight": table, "attention.hidden.weight": attention}, (x,))

    assert torch.autograd.gradcheck(logits, (table, attention))


def test_only_the_rows_looked_up_have_gradients():
    model, x = din(), inputs(1)
    model(x).sum().backward()
    seen = one_hot(x[0, 5:], SMALL[-1]).sum(0).bool()
    assert torch.equal(model.embed["item"].weight.grad.abs().sum(-1) > 0, seen)
    assert (model.embed["user"].weight.grad.abs().sum(-1) > 0).nonzero().tolist() == [[x[0, 0].item()]]


def test_data_without_categories_is_refused():
    with pytest.raises(FedeveError, match="DIN embeds 6 inputs") as caught:
        DIN((28, 28), 62, cardinalities=())
    assert "movielens1m" in str(caught.value)
