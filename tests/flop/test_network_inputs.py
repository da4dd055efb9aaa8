"""Counts of modules that take tokens, or several inputs, and return more than a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import Pattern
from torch import nn

import jacsparse
from jacsparse import count_flop
from jacsparse.flop import estimate
from jacsparse.flop.layers import OTHERS

TOKENS = torch.tensor([[1, 2, 0], [3, 3, 1]])


def steps(report: jacsparse.FlopReport) -> dict[str, tuple[float, float, float]]:
    """Dense FLOP of each layer: forward, of inputs' and of weights' gradients."""
    names = ("dense_forward", "dense_input_gradient", "dense_weight_gradient")
    return {layer["layer"]: tuple(layer[name] for name in names) for layer in report.layers}


class Sum(nn.Module):
    """A sum of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.a(x) + self.b(y) * scale


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.randn(1, 4), torch.randn(1, 5)),
        [torch.randn(2, 4), torch.randn(2, 5), 2.0],
        {"y": torch.randn(3, 5), "x": torch.randn(3, 4)},
        {"x": torch.randn(3, 4), "y": torch.randn(3, 5), "scale": 0.5},
    ],
    ids=["two", "a number beside", "named", "named and a number"],
)
def test_branches_of_several_inputs_are_all_counted(inputs: Any) -> None:
    report = count_flop(Sum(), inputs=inputs, schedule="linear")
    layers = steps(report)
    assert {name: layers[name] for name in ("a", "b.0", "b.2")} == {
        "a": (24.0, 0.0, 24.0),
        "b.0": (60.0, 0.0, 60.0),
        "b.2": (36.0, 36.0, 36.0),
    }
    # ReLU and the scale: what takes the inputs apart is no operator of the network.
    scaled = report.layers[-1]["dense_forward"] - 12
    assert report.layers[-1]["layer"] == OTHERS and scaled in (0, 6)
    assert report.counted in (
        "Counted: the output for inputs[0] (4), inputs[1] (5).",
        "Counted: the output for y (5), x (4).",
        "Counted: the output for x (4), y (5).",
    )


def test_each_of_several_inputs_is_observed() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 5)
    y[0] = 0
    model = Sum()
    one, both = (
        count_flop(model, inputs=(x[:count], y[:count]), structure="observed", schedule="linear") for count in (1, 2)
    )
    other = count_flop(model, inputs={"x": x[1:], "y": y[1:]}, structure="observed", schedule="linear")
    assert (one.samples, both.samples) == (1, 2)
    weights = [report.backpropagation[2].weights for report in (one, both, other)]
    assert weights[0] < weights[2] and weights[1] == pytest.approx((weights[0] + weights[2]) / 2)


class Words(nn.Module):
    """Words, weighed by other numbers where there are some; a table is read by way of a function as well."""

    def __init__(self, output: Callable[[torch.Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.words, self.head, self.output = nn.Embedding(7, 4), nn.Linear(4, 2), output
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
        self.calls += 1
        x = nn.functional.embedding(ids.view(-1, ids.shape[-1]), self.words.weight) + self.words(ids)
        return self.output(self.head(x if weights is None else x * weights[..., None]))


@pytest.mark.parametrize("inputs", [TOKENS, (TOKENS, torch.rand(2, 3)), {"weights": torch.rand(2, 3), "ids": TOKENS}])
def test_tokens_have_no_gradient_and_their_embedding_has(inputs: Any) -> None:
    model = Words()
    assert steps(count_flop(model, inputs=inputs, schedule="linear"))["head"] == (48.0, 48.0, 48.0)
    assert not model.calls.any()
    model.words.weight.requires_grad_(False)
    report = count_flop(model, inputs=inputs, schedule="linear")
    assert steps(report)["head"] == (48.0, 0.0, 48.0)
    name = {dict: "ids", tuple: "inputs[0]", torch.Tensor: "inputs"}[type(inputs)]
    assert report.counted.endswith(f"The gradient ends at the embeddings of {name}.")


def test_the_rows_that_a_sample_reads_are_among_the_parameters() -> None:
    # Three rows, which are read twice, and the head.
    assert count_flop(Words(), inputs=TOKENS, schedule="linear").summary().weight_nbytes == 4 * (3 * 4 + 4 * 2 + 2)


@dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor
    cache: object = None


def test_the_entry_of_an_output_that_is_counted() -> None:
    outputs: dict[str, Callable[[torch.Tensor], Any]] = {
        "logits": lambda y: Output(y * 2, y),
        "loss": lambda y: {"logits": y, "loss": y.square().mean(), "attentions": None},
        "last_hidden_state": lambda y: {"last_hidden_state": y, "pooler_output": y[:, 0]},
        "scores": lambda y: {"scores": y, "names": ["a", "b"]},
    }
    for name, output in outputs.items():
        report = count_flop(Words(output), inputs=TOKENS, schedule="linear")
        assert steps(report)["head"] == (48.0, 48.0, 48.0)
        assert report.counted == f"Counted: {name} for inputs (3). The gradient ends at the embeddings of inputs."
    model = nn.Sequential(nn.Linear(3, 2), Named())
    report = count_flop(model, (3,), schedule="linear")
    assert report.counted == "Counted: logits for inputs (3)." and steps(report)["0"] == (12.0, 0.0, 12.0)
    assert count_flop(model[0], (3,), schedule="linear").counted == ""


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": x, "logits": x * 2}


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (
            Sum(),
            torch.randn(2, 4),
            r"Sum: missing a required argument: 'y'; it takes x, y, scale: give those that it needs by inputs",
        ),
        (Sum(), [torch.randn(2, 4)] * 4, "Sum: too many positional arguments"),
        (Sum(), {"x": torch.randn(2, 4), "z": torch.randn(2, 4)}, "Sum: missing a required argument: 'y'"),
        (Sum(), (torch.randn(2, 4), torch.randn(3, 5)), r"other numbers of samples: inputs\[0\] 2, inputs\[1\] 3"),
        (Sum(), (1.0, 2.0), "numbers of samples: no tensor; expected tensors"),
        (Sum(), (torch.randn(0, 4), torch.randn(0, 5)), "inputs is an empty batch"),
        (
            Sum(),
            {"x": torch.randn(2, 4), "y": torch.tensor(1.0)},
            r"inputs\['y'\] has no axis; .*inputs\['y'\]\[None\]",
        ),
        (nn.Identity(), TOKENS, "inputs: no gradient ends there, as no embedding reads these integers"),
        (Words(), TOKENS + 5, r"Words: inputs \(3\) does not fit it: index out of range"),
        (Words(), torch.rand(2, 3), "an embedding reads tokens: give integers by inputs, or by --input ids:12"),
        (nn.Linear(3, 2), TOKENS, r"Linear: inputs \(3\) does not fit it"),
    ],
)
def test_inputs_that_do_not_fit(model: nn.Module, inputs: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        count_flop(model, inputs=inputs)


def test_inputs_of_wrong_kinds() -> None:
    with pytest.raises(ValueError, match="input_shape is missing; give the shape of one sample, or inputs"):
        count_flop(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"inputs\[1\] is torch.float16; expected float32 or float64"):
        count_flop(Sum(), inputs=(torch.randn(2, 4), torch.randn(2, 5).half()))
    with pytest.raises(
        jacsparse.UnsupportedOperatorError, match="a dict with the entries a, b, of which none is loss, l"
    ):
        count_flop(Words(lambda y: {"a": y, "b": y}), inputs=TOKENS)
    with pytest.raises(TypeError, match=r"several dtypes: inputs\[0\] torch.float32, inputs\[1\] torch.float64; conv"):
        count_flop(Sum(), inputs=(torch.randn(2, 4), torch.randn(2, 5).double()))
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="its output is a tuple; wrap it in a module"):
        count_flop(Words(lambda y: (y, y)), inputs=TOKENS)


class Encoder(nn.Module):
    """Attention, of whose output the first token alone is read."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 3)
        if zeros:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[:, 0])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("zeros", [False, True])
def test_a_selection_needs_no_index_of_attention(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Encoder(zeros).eval(), torch.randn(1, 5, 8)
    expected = []
    for stage in jacsparse.chain(model, (5, 8)):
        factor = stage.factor()
        expected.append(factor if isinstance(factor, Pattern) else factor.edges)
    monkeypatch.setattr(Pattern, "indices", property(lambda _: pytest.fail("indices were made")))
    report = count_flop(model, (5, 8), schedule="linear")
    total = {row.structure: row.activations for row in report.backpropagation}
    assert (total["pruned"] == 0) == zeros and total["dense"] > 0
    monkeypatch.undo()
    # The last layer's keys and values reach all tokens, its queries the first alone.
    gradient = torch.autograd.functional.jacobian(lambda each: model(each).sum(), x) != 0
    assert report.input_gradient is not None and report.input_gradient.nnz == int(np.count_nonzero(gradient))


@pytest.mark.parametrize("fused", [False, True])
def test_masks_of_many_scores_leave_nothing_out(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    none, causal = torch.ones(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).tril()
    whole, masked = (count_flop(Masked(fused, mask), (2, 5, 4), schedule="linear") for mask in (none, causal))
    monkeypatch.setattr("jacsparse.patterns.rules._MOST_LISTED", 10)
    limited = count_flop(Masked(fused, causal), (2, 5, 4), schedule="linear")
    flop = [report.backpropagation[1].input_gradient for report in (masked, limited, whole)]
    # What fills scores takes no gradient of them in any case.
    assert flop[0] < flop[1] <= flop[2] and (flop[1] == flop[2]) == fused


class Masked(nn.Module):
    """Attention with a mask, fused or step by step."""

    def __init__(self, fused: bool, mask: torch.Tensor) -> None:
        super().__init__()
        self.fused, self.mask = fused, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)
        return (x @ x.mT).masked_fill(~self.mask, -torch.inf).softmax(-1) @ x


def test_memory_is_asked_for_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)), nn.ReLU()), torch.randn(1, 2, 9, 9)
    linear, scan = count_flop(model, (2, 9, 9), schedule="linear"), count_flop(model, (2, 9, 9))
    assert scan.total > linear.total
    monkeypatch.setattr(estimate, "machine_memory", lambda _: 2000)
    with pytest.raises(
        MemoryError, match=r"counting the products of blelloch:2 takes .* KiB or more, and this .* 1.95 KiB; pass sch"
    ):
        count_flop(model, (2, 9, 9))
    # Whoever leaves the products out needs no memory for them.
    assert count_flop(model, (2, 9, 9), accept=lambda _: False).total == linear.total
    with pytest.raises(MemoryError, match=r"the entries of observed Jacobians take .* KiB or more"):
        count_flop(nn.Sequential(*model, nn.Softmax(1)), (2, 9, 9), structure="observed", inputs=x, schedule="linear")
