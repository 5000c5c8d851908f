"""ResNet-18 with GroupNorm has the published structure, trains in an engine and under vmap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedeve import FedAvg, FederatedData, FedeveError, Layout, LocalWork, Run, simulate
from fedeve.models.resnet import ResNet18

SHAPE = (3, 32, 32)


def by_hand(*, channels: int, outputs: int, stem: str) -> int:
    """Parameters: 3x3 convolutions without bias, two numbers a channel for every norm, the last layer."""
    total = channels * 64 * (9 if stem == "cifar" else 49) + 2 * 64
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        total += 9 * before * after + 3 * 9 * after * after + 4 * 2 * after
        if before != after:
            total += before * after + 2 * after
    return total + 512 * outputs + outputs


@pytest.mark.parametrize(
    ("channels", "outputs", "stem", "published"),
    [
        (3, 100, "cifar", 11_220_132),
        (3, 10, "cifar", 11_173_962),  # as in the CIFAR literature
        (3, 1000, "imagenet", 11_689_512),  # torchvision's resnet18
        (1, 62, "cifar", None),
    ],
)
def test_the_number_of_parameters_is_the_published_one(channels, outputs, stem, published):
    found = Layout.of(ResNet18((channels, 32, 32), outputs, stem=stem)).num_params
    assert found == by_hand(channels=channels, outputs=outputs, stem=stem)
    assert published in (None, found)


def test_it_is_built_of_the_layers_of_torchvisions_resnet18():
    # The shapes of torchvision's resnet18(num_classes=7), in its order.
    expected = [(64, 3, 7, 7), (64,), (64,)]
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        expected += [(after, before, 3, 3), (after,), (after,), (after, after, 3, 3), (after,), (after,)]
        expected += [(after, before, 1, 1), (after,), (after,)] if before != after else []
        expected += [(after, after, 3, 3), (after,), (after,)] * 2
    expected += [(7, 512), (7,)]
    model = ResNet18(SHAPE, 7, stem="imagenet")
    assert [tuple(param.shape) for param in model.parameters()] == expected
    strides = [module.stride[0] for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert strides == [2, *[1] * 4, 2, 1, 2, 1, 1, 2, 1, 2, 1, 1, 2, 1, 2, 1, 1]


@pytest.mark.parametrize(("stem", "sides"), [("cifar", [32, 32, 16, 8, 4]), ("imagenet", [8, 8, 4, 2, 1])])
def test_the_stem_decides_the_size_of_the_maps(stem, sides):
    model = ResNet18(SHAPE, 5, stem=stem)
    x = model.stem(torch.zeros(2, *SHAPE))
    found = [x.shape[-1]]
    for stage in range(4):
        x = model.blocks[2 * stage : 2 * stage + 2](x)
        found.append(x.shape[-1])
    assert found == sides
    assert x.shape[:2] == (2, 512)


@pytest.mark.parametrize("groups", [1, 2, 64])
def test_every_norm_is_a_group_norm_of_so_many_groups_and_nothing_has_statistics(groups):
    model = ResNet18(SHAPE, 5, groups=groups)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 20
    assert {norm.num_groups for norm in norms} == {groups}
    assert not list(model.buffers())


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (3, 32, 32), (3, 21, 33), (8, 8)])
def test_a_batch_of_images_becomes_a_batch_of_logits(stem, shape):
    model = ResNet18(shape, 7, stem=stem, groups=64)
    for batch in (1, 3):
        assert model(torch.zeros(batch, *shape)).shape == (batch, 7)


def test_examples_of_a_batch_do_not_see_each_other():
    model, x = ResNet18(SHAPE, 5), torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))


def test_a_block_adds_its_shortcut():
    torch.manual_seed(0)
    block = ResNet18(SHAPE, 5).blocks[0]
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 64, 8, 8)
    assert torch.equal(block(x), torch.relu(x))


@pytest.mark.parametrize("groups", [0, -2, 3, 128, 2.0, "2", True, None])
def test_groups_that_do_not_divide_the_channels_are_refused(groups):
    with pytest.raises(FedeveError, match=r"model\.groups"):
        ResNet18(SHAPE, 5, groups=groups)


@pytest.mark.parametrize("stem", ["CIFAR", "", None, 3])
def test_an_unknown_stem_is_refused(stem):
    with pytest.raises(FedeveError, match=r"unknown model\.stem.*cifar, imagenet"):
        ResNet18(SHAPE, 5, stem=stem)


@pytest.mark.parametrize("shape", [(), (100,), (3, 7, 32), (1, 1, 32, 32)])
def test_inputs_that_are_no_images_are_refused(shape):
    with pytest.raises(FedeveError, match="wants images"):
        ResNet18(shape, 5)


def test_gradients_of_many_models_at_once_are_those_of_each():
    models = [ResNet18((3, 8, 8), 4).double() for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.tensor([[0, 1, 2], [3, 3, 0]])

    def loss(params, x, y):
        return cross_entropy(torch.func.functional_call(models[0], params, (x,)), y)

    stacked, _ = torch.func.stack_module_state(models)
    together = torch.func.vmap(torch.func.grad(loss))(stacked, x, y)
    for lane, model in enumerate(models):
        params = {name: param.detach() for name, param in model.named_parameters()}
        alone = torch.func.grad(loss)(params, x[lane], y[lane])
        for name, grad in alone.items():
            torch.testing.assert_close(together[name][lane], grad)


def test_it_trains_in_the_reference_engine():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (4, 3, 8, 8), dtype=np.uint8), np.array([0, 1, 2, 0])
    data = FederatedData.from_arrays(x, y, [[0, 1], [2, 3]], x_test=x, y_test=y)
    torch.manual_seed(0)
    run = Run(method=FedAvg(), data=data, model=ResNet18((3, 8, 8), 3), rounds=2, cohort=2, eval_every=1,
              local=LocalWork(lr=0.01, batch=2))  # fmt: skip
    losses = simulate(run, engine="reference", device="cpu").metric("loss")
    assert losses[1] < 0.95 * losses[0]
