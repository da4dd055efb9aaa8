"""Counts of torchvision's classic networks against counts by hooks over their layers' shapes.

torchvision imports beside the PyTorch that it was built for alone; beside any other these tests are skipped. One
environment that has both is torch 2.11.0 with torchvision 0.26.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import jacsparse
from jacsparse.flop.layers import OTHERS

try:
    import torchvision
except (ImportError, RuntimeError) as error:
    # Beside another PyTorch its own operators cannot be registered.
    pytest.skip(f"torchvision does not import: {error}", allow_module_level=True)

CONVOLUTIONAL = (
    "alexnet", "vgg11", "vgg16", "resnet18", "resnet50", "squeezenet1_1", "densenet121", "googlenet", "inception_v3",
    "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x1_0", "efficientnet_b0", "mnasnet1_0", "convnext_tiny",
    "regnet_y_400mf",
)  # fmt: skip
TRANSFORMERS = ("vit_b_16", "swin_t")
QUICK = ("resnet18", "squeezenet1_1", "shufflenet_v2_x1_0")
COLUMNS = ("dense_forward", "dense_input_gradient", "dense_weight_gradient")


def networks(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def network(name: str) -> tuple[nn.Module, int]:
    """A network without auxiliary outputs, and the side of its images."""
    torch.manual_seed(0)
    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = getattr(torchvision.models, name)(weights=None, **options)
    return model.eval(), 299 if name == "inception_v3" else 224


class Products:
    """Multiply-adds of layers, by hooks: forward, and those of the gradients of their inputs and weights."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = self.of_inputs = self.of_weights = 0
        attentions = [
            part for part in model.modules() if type(part).__name__ in ("MultiheadAttention", "ShiftedWindowAttention")
        ]
        inside = {part for attention in attentions for part in attention.modules()}
        for part in [*attentions, *(part for part in model.modules() if part not in inside)]:
            if part in attentions:
                part.register_forward_hook(self.attend, with_kwargs=True)
            elif isinstance(part, (nn.Conv2d, nn.Linear)):
                part.register_forward_hook(
                    lambda part, args, y: self.multiply(y[0].numel() * part.weight[0].numel(), *args)
                )

    def multiply(self, count: int, x: torch.Tensor) -> None:
        self.forward, self.of_weights = self.forward + count, self.of_weights + count
        self.of_inputs += count * x.requires_grad

    def attend(self, part: Any, args: Any, named: Any, output: Any) -> None:
        x = args[0] if args else named["query"]
        if isinstance(part, nn.MultiheadAttention):
            tokens, keys, width = x.shape[1], x.shape[1], x.shape[2]
        else:
            tall, wide = (
                -(-size // window) * window for size, window in zip(x.shape[1:3], part.window_size, strict=True)
            )
            tokens, keys, width = tall * wide, part.window_size[0] * part.window_size[1], x.shape[3]
        self.multiply(4 * tokens * width**2, x)
        self.forward += 2 * tokens * keys * width
        # Fused attention computes the scores again. With a bias that trains it is not fused.
        self.of_inputs += (5 if isinstance(part, nn.MultiheadAttention) else 4) * tokens * keys * width


class Elements(TorchFunctionMode):
    """Elements that all other functions read and write for one sample, forward and backward."""

    #: Identities, and what a layer's hook counts.
    FREE = (
        "add",
        "iadd",
        "radd",
        "flatten",
        "reshape",
        "view",
        "dropout",
        "contiguous",
        "size",
        "dim",
        "__get__",
        "conv2d",
        "linear",
    )

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.forward, self.backward = batch, 0, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.strip("_") if function.__name__ != "__get__" else "__get__"
        operands = [
            each
            for each in (args[0] if isinstance(args[0], (list, tuple)) else args)
            if isinstance(each, torch.Tensor) and each.requires_grad and not isinstance(each, nn.Parameter)
        ]
        identity = name == "cat" and len(operands) == 1
        if not operands or identity or name in self.FREE or not isinstance(result, (torch.Tensor, tuple)):
            return result
        for y in result if isinstance(result, tuple) else [result]:
            read = sum(each.numel() for each in operands)
            if name == "chunk":
                self.add(2 * y.numel(), y.numel() + read)
            elif name == "cat":
                self.add(read + y.numel(), 2 * read)
            elif not (name == "permute" and sum(size > 1 for size in y.shape[1:]) <= 1):
                self.add(read + y.numel(), read + y.numel() * len(operands))
        return result

    def add(self, forward: int, backward: int) -> None:
        self.forward += forward // self.batch
        self.backward += backward // self.batch


@contextlib.contextmanager
def hooked(model: nn.Module) -> Iterator[Products]:
    products = Products(model)
    yield products
    for part in model.modules():
        part._forward_hooks.clear()
        part._forward_hooks_with_kwargs.clear()


@pytest.mark.parametrize("name", networks(CONVOLUTIONAL + TRANSFORMERS))
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_products(name: str, training: bool) -> None:
    model, side = network(name)
    report = jacsparse.count_flop(model.train(training), (3, side, side), schedule="linear")
    with hooked(model) as products:
        model(torch.randn(2, 3, side, side))
    counted = [sum(layer[column] for layer in report.layers if layer["layer"] != OTHERS) for column in COLUMNS]
    assert counted == [2 * products.forward, 2 * products.of_inputs, 2 * products.of_weights]
    assert sum(layer["parameters"] for layer in report.layers) == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", networks(CONVOLUTIONAL))
def test_other_operators(name: str) -> None:
    model, side = network(name)
    report = jacsparse.count_flop(model, (3, side, side), schedule="linear")
    with Elements(2) as elements:
        model(torch.randn(2, 3, side, side))
    (others,) = (layer for layer in report.layers if layer["layer"] == OTHERS)
    assert (others["dense_forward"], others["dense_input_gradient"]) == (elements.forward, elements.backward)


@pytest.mark.full
def test_auxiliary_outputs_are_left_out() -> None:
    model = torchvision.models.googlenet(weights=None, init_weights=False).train()
    report = jacsparse.count_flop(model, (3, 224, 224), schedule="linear")
    assert report.counted == "Counted: logits for inputs (3 × 224 × 224)."
