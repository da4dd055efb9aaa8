"""The built-in models: shapes, stages, options and light imports."""

from __future__ import annotations

import pytest
import torch
from jacsparse.models import MODELS, VGG11, LeNet5, build
from jacsparse.models.classifiers import SequenceClassifier
from torch import nn

import jacsparse
from jacsparse import models


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("classes", "channels"), [(10, 3), (100, 1)])
def test_shapes(name: str, classes: int, channels: int) -> None:
    model = build(name, num_classes=classes, in_channels=channels)
    assert isinstance(model, MODELS[name])
    sample = (channels, 32) if isinstance(model, SequenceClassifier) else (channels, 32, 32)
    assert model(torch.randn(2, *sample)).shape == (2, classes)


def test_stages_of_the_thesis() -> None:
    stages = jacsparse.chain(VGG11().features, (3, 32, 32))
    operators = [stage.name.removeprefix("aten.") for stage in stages]
    assert len(stages) == 21
    assert [operators.count(name) for name in ("convolution", "relu", "max_pool2d_with_indices")] == [8, 8, 5]
    assert [part.out_channels for part in VGG11().features if isinstance(part, nn.Conv2d)] == [
        64, 128, 256, 256, 512, 512, 512, 512,
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "stages"), [(VGG11(), 26), (VGG11().train(), 28), (LeNet5(), 11)])
def test_the_whole_model_is_a_chain(model: nn.Module, stages: int) -> None:
    if stages == 26:
        model.eval()
    assert len(jacsparse.chain(model, (3, 32, 32))) == stages


@pytest.mark.parametrize(("name", "parameters"), [("resnet8", 75_290), ("resnet56", 853_018), ("resnet110", 1_727_962)])
def test_residual_networks_have_the_published_size(name: str, parameters: int) -> None:
    # He et al. (2016), Table 6: 0.85 and 1.7 million for ResNet-56 and ResNet-110.
    model = build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    convolutions = sum(isinstance(part, nn.Conv2d) for part in model.modules())
    assert convolutions + 1 == int(name.removeprefix("resnet"))


def test_residual_units_are_stages() -> None:
    stages = jacsparse.chain(build("resnet8").eval(), (3, 32, 32))
    assert [(stage.path, stage.name.removeprefix("aten.")) for stage in stages] == [
        ("stem.0", "convolution"), ("stem.1", "native_batch_norm"), ("stem.2", "relu"),
        ("group1.0", "6 operators"), ("group1.0:relu", "relu"),
        ("group2.0", "9 operators"), ("group2.0:relu", "relu"),
        ("group3.0", "9 operators"), ("group3.0:relu", "relu"),
        ("pool", "mean"), ("classifier", "addmm"),
    ]  # fmt: skip


def test_signals_pass_a_fresh_vgg11() -> None:
    with torch.no_grad():
        scores = VGG11().eval()(torch.randn(16, 3, 32, 32))
    assert scores.std(0).mean() > 0.05


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name: str) -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next(build(name).parameters())

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg16", {}, "model is 'vgg16'; expected one of bitstream, "),
        ("lenet5", {"dropout": 0.5}, "lenet5 has no option 'dropout'; it has num_classes, in_channels"),
        ("vgg11", {"num_classes": 0}, "num_classes is 0; expected an integer of at least 1"),
        ("vgg11", {"num_classes": 10.0}, "num_classes is 10.0"),
        ("lenet5", {"in_channels": True}, "in_channels is True"),
        ("vgg11", {"dropout": 1.0}, r"dropout is 1.0; expected a number in \[0, 1\)"),
        ("vgg11", {"dropout": float("nan")}, "dropout is nan"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **options)


def test_unknown_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'ResNet9'"):
        _ = models.ResNet9
