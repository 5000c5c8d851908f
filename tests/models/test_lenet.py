"""Models by name have the sizes and shapes they are known for."""

from __future__ import annotations

import pytest
import torch

from fedeve import FedeveError, Layout, models

IMAGE_MODELS = ("linear", "lenet5", "cnn")


@pytest.mark.parametrize(
    ("name", "num_classes", "num_params"),
    [
        ("lenet5", 10, 61_706),
        ("lenet5", 62, 66_126),
        # 320 + 18,496 (convolutions) + 9216 * 128 + 128 + 128 * classes + classes
        ("cnn", 10, 1_199_882),
        ("cnn", 62, 1_206_590),
        ("linear", 10, 7_850),
    ],
)
def test_the_number_of_parameters_is_the_published_one(name, num_classes, num_params):
    assert Layout.of(models.create(name, (28, 28), num_classes)).num_params == num_params


def test_lenet5_is_built_of_the_layers_of_its_paper():
    shapes = [tuple(shape) for shape in Layout.of(models.create("lenet5", (28, 28), 10)).shapes]
    assert shapes == [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,)]


def test_cnn_is_built_of_the_layers_of_the_literature():
    shapes = [tuple(shape) for shape in Layout.of(models.create("cnn", (28, 28), 62)).shapes]
    assert shapes == [(32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 9216), (128,), (62, 128), (62,)]


@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (3, 32, 32), (3, 21, 33), (12, 12)])
def test_a_batch_of_images_becomes_a_batch_of_logits(name, shape):
    model = models.create(name, shape, 7)
    for batch in (1, 4):
        assert model(torch.zeros(batch, *shape)).shape == (batch, 7)


@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
def test_grey_images_with_and_without_a_channel_axis_are_the_same(name):
    model, x = models.create(name, (28, 28), 5), torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), model(x[:, None]))


@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
def test_examples_of_a_batch_do_not_see_each_other(name):
    model, x = models.create(name, (28, 28), 5), torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))


@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
def test_weights_come_from_torchs_random_state(name):
    vectors = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = models.create(name, (12, 12), 5)
        vectors.append(Layout.of(model).flatten(dict(model.named_parameters())))
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_the_linear_model_is_logistic_regression_on_any_shape():
    model, x = models.create("linear", (2, 3), 4), torch.arange(12.0).reshape(2, 2, 3)
    _, linear = model
    assert torch.equal(model(x), x.reshape(2, 6) @ linear.weight.T + linear.bias)


@pytest.mark.parametrize(("name", "smallest"), [("lenet5", 12), ("cnn", 6)])
def test_the_smallest_image_works_and_a_smaller_one_is_refused(name, smallest):
    assert models.create(name, (smallest, smallest), 3)(torch.zeros(2, smallest, smallest)).shape == (2, 3)
    for shape in [(smallest - 1, smallest), (3, smallest, smallest - 1), (smallest - 1, 100)]:
        with pytest.raises(FedeveError, match=f"at least {smallest}x{smallest}"):
            models.create(name, shape, 3)


@pytest.mark.parametrize("name", ["lenet5", "cnn"])
@pytest.mark.parametrize("shape", [(), (100,), (1, 1, 28, 28)])
def test_inputs_that_are_no_images_are_refused(name, shape):
    with pytest.raises(FedeveError, match="wants images"):
        models.create(name, shape, 3)


def test_an_unknown_model_names_the_nearest_known_one():
    with pytest.raises(FedeveError, match=r"unknown model.*did you mean 'lenet5'\?"):
        models.create("lenet", (28, 28), 10)
