"""What sparse and frozen models return in objects of any class, against the dense model."""

from __future__ import annotations

import copy
import functools
import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from jacsparse.sparse import freeze, sparsify
from jacsparse.sparse.blocks import BlockTensor
from jacsparse.sparse.outputs import leaves_of

from ..helpers import close
from .test_sparsify import pruned


@dataclass
class Detections:
    boxes: torch.Tensor
    others: list[Any] = field(default_factory=list)
    name: str = "boxes"


@dataclass(frozen=True, slots=True)
class FrozenDetections:
    boxes: torch.Tensor


class Slotted:
    __slots__ = ("__hidden", "unset")

    def __init__(self, x: torch.Tensor) -> None:
        self.__hidden = x


class KeyCache:
    """Keys and values of each layer, as of a language model, which knows itself."""

    def __init__(self, *layers: torch.Tensor) -> None:
        self.layers = [SimpleNamespace(keys=each, values=(each, each + 1)) for each in layers]
        self.again = self


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dataclass": lambda y: Detections(y, [y.relu(), {"sum": y.sum()}]),
    "a frozen dataclass with slots": FrozenDetections,
    "slots": Slotted,
    "a cache": lambda y: (y.sum(), KeyCache(y, y * 2)),
    "a set": lambda y: {y},
    "a deque": lambda y: deque([y, y.relu()], maxlen=2),
    "a named tuple": lambda y: Pair(y, y.relu()),
    "a distribution": lambda y: torch.distributions.Normal(y, 1.0, validate_args=False),
    "a view of a dict": lambda y: MappingProxyType({"y": y}),
    "the same twice": lambda y: [y, y],
    "a number beside it": lambda y: {"y": y, "size": 1.5, "name": "y", "none": None, "module": nn.Linear(1, 1)},
}  # fmt: skip


class Returning(nn.Module):
    """A layer, and what code makes of its output."""

    def __init__(self, code: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.code = nn.Conv2d(3, 4, 3), code

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(self.conv(x))


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [each for each in leaves_of(value) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs(name: str, batch: int) -> None:
    model, x = pruned(Returning(OUTPUTS[name])).eval(), torch.randn(batch, 3, 5, 6, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    for _ in range(2):
        output, expected = sparse(x), tensors_of(model(x))
        found = tensors_of(output)
        assert type(output) is type(model(x)) and len(found) == len(expected) > 0
        for actual, wanted in zip(found, expected, strict=True):
            assert not isinstance(actual, BlockTensor) and actual.requires_grad == wanted.requires_grad
            close(actual, wanted, 1e-12)
    torch.autograd.backward([each.sum() for each in found if each.requires_grad])
    if not isinstance(output, MappingProxyType):
        torch.save([each.detach() for each in tensors_of(output)], io.BytesIO())


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "a view of a dict"])
def test_frozen_outputs(name: str) -> None:
    model, x = pruned(Returning(OUTPUTS[name])).eval(), torch.randn(3, 3, 5, 6, dtype=torch.float64)
    frozen = freeze(sparsify(model, x, measure=False), x)
    outputs = [frozen(x), frozen(2 * x)]
    before = copy.deepcopy(tensors_of(outputs[0]))
    for output, at in zip(outputs, (x, 2 * x), strict=True):
        expected = tensors_of(model(at))
        assert type(output) is type(model(at)) and len(tensors_of(output)) == len(expected)
        for actual, wanted in zip(tensors_of(output), expected, strict=True):
            close(actual, wanted.detach(), 1e-12)
    assert all(map(torch.equal, before, tensors_of(outputs[0])))


def test_a_part_that_gives_blocks_is_frozen() -> None:
    model, x = pruned(Returning(lambda y: y)).eval(), torch.randn(3, 3, 5, 6, dtype=torch.float64)
    frozen = freeze(sparsify(model, x, measure=False).model, x)
    assert type(frozen(x)) is torch.Tensor
    close(frozen(x), model(x).detach(), 1e-12)


def _each(y: torch.Tensor) -> Any:
    yield y


class OpaqueCache(functools.partial):
    """A cache that cannot be written to."""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (_each, "Returning returns a generator, whose layers run after the call has ended: return a list"),
        (lambda y: map(torch.relu, [y]), "returns a map, whose layers run after"),
        (lambda y: [lambda: y], "a function with activations inside, .*: return them in a list, a dict or a dataclass"),
        (lambda y: {"y": functools.partial(torch.relu, y)}, "a partial with activations inside"),
        (lambda y: (y, OpaqueCache(torch.relu, y)), "an OpaqueCache with .*: call the model with use_cache=False"),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_looked_into(code: Callable[[torch.Tensor], Any], message: str) -> None:
    model, x = pruned(Returning(code)).eval(), torch.randn(3, 3, 5, 6, dtype=torch.float64)
    with pytest.raises(TypeError, match=message):
        sparsify(model, x, measure=False)(x)


def test_frozen_outputs_that_cannot_be_copied() -> None:
    x = torch.randn(3, 3, 5, 6)
    with pytest.raises(TypeError, match="Returning returns a function of tensors, or another object that copies share"):
        freeze(Returning(lambda y: [lambda: y]).eval(), x)
    with pytest.raises(TypeError, match=r"cannot be copied for each call .*mappingproxy.* return tensors in a list"):
        freeze(Returning(lambda y: MappingProxyType({"y": y})).eval(), x)


def test_a_frozen_model_that_counts() -> None:
    class Counting(Returning):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return Detections(self.conv(x), [self.calls])

    with pytest.raises(ValueError, match="or keep something from call to call"):
        freeze(Counting(lambda y: y).eval(), torch.randn(3, 3, 5, 6))


def test_a_language_models_cache() -> None:
    transformers = pytest.importorskip("transformers")
    configuration = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(configuration).eval()
    kind = type(model.transformer.h[0].mlp.c_fc)
    for part in model.modules():
        if type(part) is kind:
            with torch.no_grad():
                part.weight.mul_(torch.rand(part.weight.shape) < 0.3)
    ids = torch.randint(20, (2, 7))
    sparse = sparsify(model, ids, measure=False)
    assert sum(each.is_sparse for each in sparse.report().layers) == 4
    frozen = freeze(sparse, ids)
    with torch.no_grad():
        other = ids.flip(0)
        expected = tensors_of(model(other))
        for output in (sparse(other), frozen(other)):
            assert type(output) is type(model(other)) and len(tensors_of(output)) == len(expected) >= 3
            for actual, wanted in zip(tensors_of(output), expected, strict=True):
                close(actual, wanted, 1e-5)
