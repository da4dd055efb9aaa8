"""Synthetic gradients against one step written down plainly."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks._synthetic_gradients import GradientPredictor, SyntheticGradients
from tests.training.test_delayed_gradients import SGD, assert_equal_states, convolutional, images


def test_one_module_is_plain_training_bit_for_bit():
    plain, trained = convolutional(), convolutional()
    first = SGD(plain.parameters())
    dni = SyntheticGradients(trained, modules=1, classes=3, optimizer=SGD, example=images(1)[0][0])
    for number, (x, y) in enumerate(images(4)):
        torch.manual_seed(number)
        first.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        first.step()
        torch.manual_seed(number)
        dni.step(x, y)
    assert_equal_states(dict(trained.state_dict()), dict(plain.state_dict()))


def test_a_step_moves_modules_and_predictors_as_written():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    lr = 0.1
    optimizer = functools.partial(torch.optim.SGD, lr=lr)
    dni = SyntheticGradients(model, modules=3, classes=3, optimizer=optimizer, example=x)
    for predictor in dni.predictors:
        nn.init.normal_(predictor.layers[-1].weight, std=0.3)
    parts, predictors = copy.deepcopy(dni.partition), copy.deepcopy(dni.predictors)
    dni.step(x, y)
    h1 = parts[0](x)
    a1 = h1.detach().requires_grad_()
    h2 = parts[1](a1)
    a2 = h2.detach().requires_grad_()
    p1, p2 = predictors[0](h1.detach(), y), predictors[1](h2.detach(), y)
    expected = {}
    for part, output, gradient in ((parts[0], h1, p1.detach()), (parts[1], h2, p2.detach())):
        weights = list(part.parameters())
        expected.update(zip(weights, torch.autograd.grad(output, weights, gradient, retain_graph=True), strict=True))
    loss = functional.cross_entropy(parts[2](a2), y)
    weights = list(parts[2].parameters())
    *of_weights, target2 = torch.autograd.grad(loss, [*weights, a2])
    expected.update(zip(weights, of_weights, strict=True))
    (target1,) = torch.autograd.grad(h2, a1, p2.detach())
    for predictor, prediction, target in ((predictors[0], p1, target1), (predictors[1], p2, target2)):
        weights = list(predictor.parameters())
        error = (prediction - target).square().mean()
        expected.update(zip(weights, torch.autograd.grad(error, weights), strict=True))
    before = [p for module in (*parts, *predictors) for p in module.parameters()]
    after = [p for module in (*dni.partition, *dni.predictors) for p in module.parameters()]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.detach(), old.detach() - lr * expected[old], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 6, 5), (7,)])
def test_predictions_begin_at_zero_and_see_the_labels(shape):
    predictor = GradientPredictor(shape, 3)
    activation = torch.randn(8, *shape)
    zeros, ones = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    assert not predictor(activation, zeros).any()
    nn.init.normal_(predictor.layers[-1].weight)
    assert not torch.equal(predictor(activation, zeros), predictor(activation, ones))


def test_the_example_changes_nothing():
    model, example = convolutional(), images(1)[0][0]
    before = copy.deepcopy(model.state_dict())
    SyntheticGradients(model, modules=3, classes=3, optimizer=SGD, example=example)
    assert_equal_states(dict(model.state_dict()), dict(before))
    assert model.training


def test_activations_of_other_shapes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten())
    with pytest.raises(ValueError, match=r"an activation has shape \(5, 4\), without the batch"):
        SyntheticGradients(model, modules=2, classes=3, optimizer=SGD, example=torch.randn(2, 5, 3))
