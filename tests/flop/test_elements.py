"""Elements that operators without products read and write, and parameters that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import jacsparse
from jacsparse.flop.layers import OTHERS

Function = Callable[[torch.Tensor], torch.Tensor]


class Then(nn.Module):
    """A linear layer of 6 elements, and a function of what it gives."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


#: Functions of 6 elements, with what they read and write: forward, and of gradients.
FUNCTIONS: dict[str, tuple[Function, int, int]] = {
    "relu": (torch.relu, 6 + 6, 6 + 6),
    # Each part of a concatenation reads its share of the gradient.
    "cat": (lambda x: torch.cat([x.sin(), x.cos(), x], 1), 2 * (6 + 6) + 18 + 18, 2 * (6 + 6) + 18 + 18),
    # A product has one result, and two gradients.
    "mul": (lambda x: x.sin() * x.cos(), 2 * (6 + 6) + 6 + 6 + 6, 2 * (6 + 6) + 2 * (6 + 6)),
    # The gradient of a slice has zeros, which are written.
    "slice": (lambda x: x[:, :2].sin(), 2 + 2 + 2 + 2, 2 + 6 + 2 + 2),
    "sum": (lambda x: x.sum(1, keepdim=True), 6 + 1, 1 + 6),
    "identity": (lambda x: x + x.view(len(x), 2, 3).flatten(1), 0, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elements_are_counted_once(name: str) -> None:
    function, forward, backward = FUNCTIONS[name]
    report = jacsparse.count_flop(Then(function), (6,), schedule="linear")
    others = [layer for layer in report.layers if layer["layer"] == OTHERS]
    assert sum(layer["dense_forward"] for layer in others) == forward
    assert sum(layer["dense_input_gradient"] for layer in others) == backward
    dense = next(each for each in report.backpropagation if each.structure == "dense")
    assert dense.activations + dense.input_gradient == backward + 2 * 36


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_is_more_without_zeros(name: str) -> None:
    for layer in jacsparse.count_flop(Then(FUNCTIONS[name][0]), (6,), schedule="linear").layers:
        assert layer["pruned_input_gradient"] <= layer["dense_input_gradient"]


class Tokens(nn.Module):
    """A class token before other tokens, with biases by the distance of positions and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(3, 4))
        self.register_buffer("places", torch.tensor([0, 1, 2, 1, 0, 2]))
        self.dropout, self.last = nn.Dropout(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.last(self.dropout(tokens + self.table[self.places]))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_parameters_that_repeat_are_counted_once(training: bool, trains: bool) -> None:
    model = Tokens().train(training).requires_grad_(trains)
    report = jacsparse.count_flop(model, (5, 4), schedule="linear")
    assert sum(layer["parameters"] for layer in report.layers) == sum(each.numel() for each in model.parameters())


class Named(NamedTuple):
    logits: torch.Tensor
    auxiliary: torch.Tensor


def test_entry_of_a_named_tuple() -> None:
    class Model(Then):
        def forward(self, x: torch.Tensor) -> Named:  # type: ignore[override]
            y = self.layer(x)
            return Named(y, y.sin())

    report = jacsparse.count_flop(Model(torch.relu), (6,), schedule="linear")
    assert report.counted == "Counted: logits for inputs (6)."
    assert [layer["layer"] for layer in report.layers] == ["layer"]


def test_weights_that_are_nan_are_counted_and_infinite_ones_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for layer, bad in ((model[0], [torch.inf, -torch.inf]), (model[1], [torch.inf, torch.nan])):
            layer.weight[0, :2] = torch.tensor(bad)
    assert jacsparse.count_flop(model, (3,), schedule="linear").nan_weights == {"1": 1}
