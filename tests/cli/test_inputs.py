"""What the parts of models are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jacsparse.cli.inputs import layer_input, submodule_at


class Transcribed(nn.Module):
    """A recurrent layer that a model gives its samples, along either axis."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=batch_first)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * (x if self.layer.batch_first else x.transpose(0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.given(x))[0]


@pytest.mark.parametrize("steps", [None, 5, 2])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_recurrent_part_is_given_its_first_steps_as_in_the_model(batch_first: bool, steps: int | None) -> None:
    model, x = Transcribed(batch_first), torch.randn(2, 5, 3)
    part, samples = submodule_at(model, "layer", "--part", x)
    assert part is model.layer and torch.equal(samples, 2 * x)
    assert torch.equal(layer_input(part, samples, steps), model.given(x[:, :steps]))
