"""Hand-batched layers compute what PyTorch's do. Without a GPU Triton interprets the kernels, slowly and exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import DEVICE, LANES, assert_same_gradients, images, lanes_of
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

pytest.importorskip("triton", reason="hand-batched layers need Triton")

from fedeve.engines import batched, channels, convolution, lookup, narrow, norm, pooling
from fedeve.engines.batched import Batched

PRECISIONS = {"ieee": 2e-6, "tf32x3": 5e-6, "tf32": 2e-2} if DEVICE == "cuda" else {"ieee": 2e-6}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (1, 2, 0), (1, 1, 0), (5, 1, 0), ((3, 2), (1, 2), (2, 1))]
)
def test_convolutions(size: Any, stride: Any, padding: Any, precision: str) -> None:
    torch.manual_seed(0)
    # The second layer, whose input needs a gradient, has the geometry in question.
    model = nn.Sequential(nn.Conv2d(3, 17, 1), nn.Conv2d(17, 18, size, stride=stride, padding=padding))
    assert_same_gradients(model, images(), precision, PRECISIONS[precision])


@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [(5, 1, 2), (5, 1, 0), (3, 2, 1), (3, 2, 0), (1, 2, 0), (1, 1, 0), ((3, 2), (1, 2), (2, 1))],
)
def test_convolutions_with_few_channels(size: Any, stride: Any, padding: Any) -> None:
    """They have kernels of their own, in float32 also where TF32 would do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 5, size, stride=stride, padding=padding))
    assert_same_gradients(model, images(), "tf32", 2e-6)


def test_few_outputs_of_many_inputs_are_products_in_tf32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As LeNet-5's second layer; the errors, which have a border, go back through the other kernel."""
    used = []
    for name in ("convolve", "kernel_gradient"):
        kept = getattr(narrow, name)
        monkeypatch.setattr(narrow, name, lambda x, *rest, kept=kept: used.append(x.shape[2]) or kept(x, *rest))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 3))
    for precision, tolerance in {**PRECISIONS, "tf32": PRECISIONS.get("tf32", 2e-6)}.items():
        used.clear()
        assert_same_gradients(model.cpu(), images(size=6), precision, tolerance)
        few = [3, 3, 5]  # channels of what the other kernel saw: the first layer's images twice, the errors once
        assert sorted(used) == (few if precision == "tf32" else sorted([*few, 8, 8]))


def test_few_channels_of_so_many_pixels_that_several_programs_take_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 3, 2, padding=1))
    assert_same_gradients(model, images(channels=1, size=24), "tf32", 2e-6)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "piece"),
    [(3, 1, 1, 32), (3, 2, 1, 2048), (1, 2, 0, 2048), ((3, 2), (2, 1), (2, 1), 2048), (2, 3, 0, 2048)],
)
def test_convolutions_with_channels_last(
    size: Any, stride: Any, padding: Any, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in bfloat16, here in float32, with norms that find the channels last.

    A gradient summed in one piece is passed on as it lies, with the channels last.
    """
    monkeypatch.setattr(channels, "suits", lambda weight, precision: weight.shape[0] % channels.MULTIPLE == 0)
    monkeypatch.setattr(channels, "_PIECE", piece)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, size, stride=stride, padding=padding), nn.GroupNorm(2, 32), nn.ReLU()
    )
    assert_same_gradients(model, images(), "ieee", 3e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter has no bfloat16")
def test_gradients_in_bfloat16_are_as_near_those_of_float64_as_pytorchs_own() -> None:
    """Within a factor of three, over all lanes: what rounding does to one gradient is luck."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(2, 32), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(2, 64), nn.ReLU())
    model = nn.Sequential(first, second, nn.Flatten(), nn.Linear(64 * 25, 5))
    params, x = lanes_of(model), images().to(DEVICE)
    model.to(DEVICE)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).float().pow(3).mean()

    def loss_in_double(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).pow(3).mean()

    exact = vmap(grad(loss_in_double))({name: value.double() for name, value in params.items()}, x.double())
    with Batched("bf16"):
        ours = vmap(grad(loss))(params, x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        by_lane = [grad(loss)({name: value[n] for name, value in params.items()}, x[n]) for n in range(LANES)]
    for name, value in exact.items():
        theirs = torch.stack([lane[name] for lane in by_lane])
        assert (ours[name] - value).norm() < 3 * (theirs - value).norm() < 0.6 * value.norm(), name


def test_a_convolution_whose_channels_and_pixels_fill_several_blocks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 70, 3, padding=1, bias=False), nn.Conv2d(70, 17, (2, 1)))
    assert_same_gradients(model, images(channels=2, size=9), "ieee", 2e-6)


@pytest.mark.parametrize(("size", "padding"), [(5, 2), (3, 1), (5, 4)])
def test_nothing_outside_the_images_is_read(size: int, padding: int) -> None:
    """What lies before and after them in memory is not a number, and would spoil every sum it came into."""
    w = torch.randn(1, 4, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    memory = torch.full((3, 2, 3, 9, 9), float("nan"), device=DEVICE)
    memory[1] = images()[0].to(DEVICE)
    x, edges = memory[1:2], ((1, 1), (padding, padding))
    out = convolution.convolve(x, w, None, *edges, "ieee")
    slope = convolution.kernel_gradient(x, out, (size, size), *edges, "ieee")
    back = convolution.input_gradient(out, w, (9, 9), *edges, "ieee")
    assert out.isfinite().all() and slope.isfinite().all() and back.isfinite().all()


@pytest.mark.parametrize("window", [2, 3, (2, 3)])
def test_max_pooling_and_its_remainders(window: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(window))
    assert_same_gradients(model, images(), "ieee", 2e-6)


def test_of_equal_pixels_the_first_wins_and_what_is_not_a_number_wins_always() -> None:
    x = torch.zeros(1, 1, 2, 4, device=DEVICE)
    x[0, 0, 1, 3] = float("nan")
    with Batched("ieee"):
        ours, slope = (
            functional.max_pool2d(x, 2),
            vmap(grad(lambda x: functional.max_pool2d(x, 2).nan_to_num().sum()))(x),
        )
    assert torch.equal(ours.isnan(), functional.max_pool2d(x, 2).isnan())
    assert slope[0, 0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_a_long_linear_layer_is_summed_in_pieces() -> None:
    torch.manual_seed(0)
    x = torch.randn(LANES, 2, 2560, generator=torch.Generator().manual_seed(2))
    assert_same_gradients(nn.Sequential(nn.Linear(2560, 4)), x, "ieee", 2e-6)


def indices(rows: int, *shape: int, seed: int = 2, zeros: float = 0.3) -> Tensor:
    """Random rows of a table for every lane, many of them the first."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, rows, (LANES, *shape), generator=generator)
    return torch.where(torch.rand(index.shape, generator=generator) < zeros, 0, index).to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "size", "shape"),
    [(7, 5, (6,)), (1, 1, (1,)), (300, 3, (4, 5)), (40, 2, (16, 11)), (70_000, 1, (3, 50)), (6, 17, (2, 7))],
)
def test_embeddings(rows: int, size: int, shape: tuple[int, ...]) -> None:
    """Few entries and many, rows looked up often and never, and more of them than short keys can tell apart."""
    torch.manual_seed(0)
    assert_same_gradients(nn.Sequential(nn.Embedding(rows, size), nn.Tanh()), indices(rows, *shape), "ieee", 2e-6)


@pytest.mark.parametrize("zeros", [0.0, 0.5, 1.0])
def test_the_gradient_of_a_row_that_fills_many_blocks(zeros: float) -> None:
    rows = 3
    index = indices(rows, 2300, zeros=zeros)
    assert index.shape[1] > (lookup._AHEAD + 1) * lookup._SIDE
    slope = torch.randn(LANES, 2300, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = torch.zeros(LANES, rows, 1, dtype=torch.float64, device=DEVICE)
    exact.scatter_add_(1, index[..., None], slope.double())
    torch.testing.assert_close(lookup.table_gradient(slope, index, rows).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num", [20, 150])
def test_an_embedding_passes_back_what_is_not_finite_and_only_to_its_row(num: int) -> None:
    index = indices(40, num, zeros=0.0)
    slope = torch.ones(LANES, num, 2, device=DEVICE)
    index[1, [3, 9, num - 1]], slope[1, 9, 1] = 7, torch.nan
    index[0, 5], slope[0, 5] = 0, torch.inf
    out = lookup.table_gradient(slope, index, 40)
    assert out[1, 7, 1].isnan() and out[0, 0].isinf().all()
    assert (~out.isfinite()).sum() == 3


@pytest.mark.parametrize("num", [20, 150])
def test_a_lane_of_an_embedding_has_the_same_bits_in_any_company(num: int) -> None:
    index, slope = indices(9, num), torch.randn(LANES, num, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    others, gaps = indices(9, num, seed=5), torch.full_like(slope, torch.nan)
    others[1], gaps[1] = index[1], slope[1]
    mine = lookup.table_gradient(slope, index, 9)[1]
    assert torch.equal(lookup.table_gradient(gaps, others, 9)[1], mine)
    assert torch.equal(lookup.table_gradient(slope[1:2], index[1:2], 9)[0], mine)


def test_an_embedding_reads_and_writes_nothing_outside_its_table() -> None:
    tables, index = torch.zeros(3, 4, 2, device=DEVICE), torch.tensor([[0, 4, -1, 3, 2**40]], device=DEVICE)
    assert lookup.look_up(tables[1:2], index)[0, :, 0].isnan().tolist() == [False, True, True, False, True]
    three = torch.tensor([[1, 1, 1], [0, 4, -1], [1, 1, 1]], device=DEVICE)  # beside the table are the neighbours'
    for index in (three, three.repeat(1, 50)):
        out = lookup.table_gradient(torch.ones(*index.shape, 2, device=DEVICE), index, 4)
        assert out[:, :, 0].ne(0).tolist() == [
            [False, True, False, False],
            [True, *[False] * 3],
            [False, True, False, False],
        ]


def test_an_embedding_that_lanes_share_or_that_nobody_batches() -> None:
    torch.manual_seed(0)
    table, index = torch.randn(5, 3, device=DEVICE), indices(5, 4)
    weights = torch.randn(LANES, 4, 3, device=DEVICE)

    def loss(table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return (functional.embedding(index, table) * weights).sum()

    with Batched("ieee"):
        shared = vmap(grad(loss), (None, 0, 0))(table, index, weights)
        same = vmap(grad(loss), (None, None, 0))(table, index[0], weights)
        alone = grad(loss)(table, index[0], weights[0])
    torch.testing.assert_close(shared, vmap(grad(loss), (None, 0, 0))(table, index, weights))
    torch.testing.assert_close(same, vmap(grad(loss), (None, None, 0))(table, index[0], weights))
    assert torch.equal(alone, same[0])


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}, {"dtype": torch.float64}],
    ids=str,
)
def test_special_embeddings_are_left_to_pytorch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "look_up", None)
    torch.manual_seed(0)
    layer, index = nn.Embedding(5, 3, **options).to(DEVICE), indices(5, 4)
    with Batched("ieee"):
        ours = layer(index)
    assert torch.equal(ours, layer(index))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 7),
        nn.MaxPool2d(3, stride=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.GroupNorm(2, 4, affine=False),
    ],
    ids=str,
)
def test_what_is_not_ours_is_left_to_pytorch(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((convolution, "convolve"), (pooling, "_pooled"), (norm, "normalise")):
        monkeypatch.setattr(module, name, None)
    x = torch.randn(2, 4, 9, 9, device=DEVICE)
    layer = layer.to(DEVICE)
    with Batched("ieee"):
        ours = layer(x)
    assert torch.equal(ours, layer(x))


def test_double_precision_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((convolution, "convolve"), (pooling, "_pooled"), (norm, "normalise")):
        monkeypatch.setattr(module, name, None)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2)).double().to(DEVICE)
    with Batched("ieee"):
        assert model(torch.zeros(2, 4, 9, 9, dtype=torch.float64, device=DEVICE)).shape == (2, 4, 3, 3)


def test_a_lane_does_not_notice_its_neighbours() -> None:
    """To the last bit, at one width: the sums of a lane are its own, whoever stands beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.MaxPool2d(2)).to(DEVICE)
    params, x = lanes_of(model.cpu()), images().to(DEVICE)
    others, y = lanes_of(model, seed=7), images(seed=8).to(DEVICE)
    model = model.to(DEVICE)
    for name, value in others.items():
        value[1] = params[name][1]
    y[1] = x[1]
    slopes = vmap(grad(lambda p, x: functional_call(model, p, (x,)).square().mean()))
    with Batched("ieee"):
        here, there = slopes(params, x), slopes(others, y)
    assert all(torch.equal(here[name][1], there[name][1]) for name in params)
    assert not any(torch.equal(here[name][0], there[name][0]) for name in params)


def test_the_layers_are_there_where_triton_is() -> None:
    assert batched.AVAILABLE
