"""Counts of whole networks against counts by hand: plain functions of their sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jacsparse.models import build
from torch import nn

import jacsparse
from jacsparse.flop.layers import OTHERS


def counted(report: dict[str, Any] | jacsparse.FlopReport) -> tuple[float, float, float]:
    """FLOP of all layers that multiply: forward, of inputs' and of weights' gradients."""
    layers = report["layers"] if isinstance(report, dict) else report.layers
    names = ("dense_forward", "dense_input_gradient", "dense_weight_gradient")
    return tuple(sum(layer[name] for layer in layers if layer["layer"] != OTHERS) for name in names)  # type: ignore[return-value]


def step(first: int, others: int, attention: int = 0, of_attention: int = 0) -> tuple[int, int, int]:
    """FLOP of a training step from multiply-adds: those of the layer that reads the input, which takes no gradient.

    Those of all others, and of attention, whose gradients take `of_attention`.
    """
    return 2 * (first + others + attention), 2 * (others + of_attention), 2 * (first + others)


# Convolutional networks: positions of the output times weights.


def lenet5() -> tuple[int, int, int]:
    first = 28 * 28 * 6 * 3 * 25
    return step(first, 10 * 10 * 16 * 6 * 25 + 400 * 120 + 120 * 84 + 84 * 10)


def vgg11() -> tuple[int, int, int]:
    sides, channels = (32, 16, 8, 8, 4, 4, 2, 2), (3, 64, 128, 256, 256, 512, 512, 512, 512)
    first, *others = (side**2 * 9 * channels[n] * channels[n + 1] for n, side in enumerate(sides))
    return step(first, sum(others) + 512 * 512 + 512 * 512 + 512 * 10)


def resnet(units: int) -> tuple[int, int, int]:
    groups = ((16, 16, 32), (16, 32, 16), (32, 64, 8))
    others = sum(side**2 * 9 * (into * out + (2 * units - 1) * out * out) for into, out, side in groups)
    return step(32 * 32 * 9 * 3 * 16, others + 64 * 10)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lenet5", lenet5()),
        ("vgg11", vgg11()),
        ("resnet8", resnet(1)),
        ("resnet56", resnet(9)),
        ("resnet110", resnet(18)),
    ],
)
def test_convolutional_networks(name: str, expected: tuple[int, int, int]) -> None:
    assert counted(jacsparse.count_flop(build(name).eval(), (3, 32, 32), schedule="linear")) == expected


# Transformers: fused attention's backward pass computes the scores again, so that it takes five products for two.


def vit(side: int, patch: int, width: int, layers: int, hidden: int, classes: int) -> tuple[int, int, int]:
    patches = (side // patch) ** 2
    tokens = patches + 1
    block = tokens * (4 * width**2 + 2 * width * hidden)
    attention = layers * 2 * tokens**2 * width
    first = patches * 3 * patch**2 * width
    return step(first, layers * block + width * classes, attention, attention * 5 // 2)


def swin(side: int, patch: int, width: int, depths: tuple[int, ...], window: int, classes: int) -> tuple[int, int, int]:
    tokens = (side // patch) ** 2
    first, others, attention = tokens * 3 * patch**2 * width, 0, 0
    for stage, depth in enumerate(depths):
        others += depth * tokens * 12 * width**2
        attention += depth * 2 * tokens * window**2 * width
        if stage < len(depths) - 1:
            # Four tokens become one of twice the width.
            tokens //= 4
            others += tokens * 4 * width * 2 * width
            width *= 2
    # Attention with a bias that trains is not fused: two products for each.
    return step(first, others + width * classes, attention, 2 * attention)


#: Counts in a process of its own, whose memory is measured: the report, and the most bytes that it had.
_MEASURED = """
import json, resource, torch, jacsparse, transformers
model = {model}
report = jacsparse.count_flop(model.eval(), (3, 224, 224), schedule="linear")
print(json.dumps([report.to_dict(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=2, num_labels=1000))",
            vit(224, 16, 768, 2, 3072, 1000),
        ),
        pytest.param(
            "transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))",
            vit(224, 16, 768, 12, 3072, 1000),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000))",
            swin(224, 4, 96, (2, 2, 6, 2), 7, 1000),
            marks=pytest.mark.full,
        ),
    ],
    ids=["two blocks of ViT-B/16", "ViT-B/16", "Swin-T"],
)
def test_vision_transformers_take_little_memory(model: str, expected: tuple[int, int, int]) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", _MEASURED.format(model=model)]
    report, nbytes = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert counted(report) == expected
    assert report["counted"] == "Counted: logits for inputs (3 × 224 × 224)."
    assert nbytes < 4 * 2**30


# Language models: of tokens, whose embedding has a gradient.

TOKENS, WIDTH, HEADS, GROUPS, HIDDEN, WORDS = 12, 32, 4, 2, 48, 100


def language_model(block: int, head: int) -> tuple[int, int, int]:
    """Two blocks with so many weights each, and the weights of a head."""
    attention = 2 * 2 * TOKENS**2 * WIDTH
    return step(0, TOKENS * (2 * block + head), attention, attention * 5 // 2)


LANGUAGE_MODELS = {
    "GPT2LMHeadModel": language_model(4 * WIDTH**2 + 8 * WIDTH**2, WIDTH * WORDS),
    "BertForMaskedLM": language_model(4 * WIDTH**2 + 2 * WIDTH * HIDDEN, WIDTH**2 + WIDTH * WORDS),
    "LlamaForCausalLM": language_model(
        2 * WIDTH**2 + 2 * WIDTH * WIDTH * GROUPS // HEADS + 3 * WIDTH * HIDDEN, WIDTH * WORDS
    ),
    "OPTForCausalLM": language_model(4 * WIDTH**2 + 2 * WIDTH * HIDDEN, WIDTH * WORDS),
}


def made(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1}
    configs = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=HEADS, **words),
        "BertForMaskedLM": lambda: transformers.BertConfig(**sizes, **words),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**sizes, **words, num_key_value_heads=GROUPS),
        "OPTForCausalLM": lambda: transformers.OPTConfig(**sizes, **words, ffn_dim=HIDDEN, word_embed_proj_dim=WIDTH),
    }
    model: nn.Module = getattr(transformers, name)(configs[name]())
    return model.eval()


def inputs() -> Iterator[tuple[str, Any]]:
    """The same tokens as one input, by keyword beside a mask, and with labels."""
    tokens = torch.arange(3 * TOKENS).reshape(3, TOKENS)
    yield "logits", tokens
    yield "logits", {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    yield "loss", {"input_ids": tokens, "labels": tokens}


def skip_on_old(name: str) -> None:
    if name == "LlamaForCausalLM" and torch.__version__.startswith("2.6."):
        pytest.skip("transformers repeats keys and values by other operators there")


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(name: str) -> None:
    skip_on_old(name)
    model = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for entry, arguments in inputs():
        report = jacsparse.count_flop(model, inputs=arguments, schedule="linear")
        assert counted(report) == LANGUAGE_MODELS[name]
        assert report.counted.startswith(f"Counted: {entry} for input")
        assert report.counted.endswith(f"the embeddings of {'input_ids' if isinstance(arguments, dict) else 'inputs'}.")
        assert report.counted in " ".join(str(report).split()) and report.to_dict()["counted"] == report.counted
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_tokens_are_observed(name: str) -> None:
    skip_on_old(name)
    model, (_, tokens) = made(name), next(inputs())
    report = jacsparse.count_flop(model, inputs=tokens[:2], structure="observed", schedule="linear")
    assert report.samples == 2 and counted(report) == LANGUAGE_MODELS[name]
    rows = {row.structure: row for row in report.backpropagation}
    assert 0 < rows["observed"].activations <= rows["pruned"].activations
