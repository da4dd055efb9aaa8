"""Architectures of Hugging Face's transformers, with random weights: causal ones, encoders, and those of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import jacsparse
from tests.jacobians.test_networks import check_scan

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 20,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE = {**{name: TEXT[name] for name in list(TEXT)[:4]}, "image_size": 16, "patch_size": 8}


class Of(nn.Module):
    """A model of embeddings or of pictures, and its first output alone."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.name: x})[0]


#: How each is made, the name of its input and the shape of a sample.
ARCHITECTURES: dict[str, tuple[Callable[[Any], nn.Module], str, tuple[int, ...]]] = {
    **{
        name: (
            lambda t, name=name: getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**GROUPED)),
            "inputs_embeds",
            (3, 16),
        )
        for name in ("Llama", "Qwen2", "Mistral")
    },
    **{
        name: (
            lambda t, name=name: getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**TEXT)),
            "inputs_embeds",
            (3, 16),
        )
        for name in ("GPTNeoX", "Bert", "Roberta")
    },
    "GPT2": (
        lambda t: t.GPT2Model(
            t.GPT2Config(n_embd=16, n_layer=1, n_head=4, vocab_size=20, n_positions=32, bos_token_id=0, eos_token_id=1)
        ),
        "inputs_embeds",
        (3, 16),
    ),
    "T5": (
        lambda t: t.T5EncoderModel(t.T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=20)),
        "inputs_embeds",
        (3, 16),
    ),
    "ViT": (lambda t: t.ViTModel(t.ViTConfig(**IMAGE)), "pixel_values", (3, 16, 16)),
    "Beit": (lambda t: t.BeitModel(t.BeitConfig(**IMAGE, vocab_size=20)), "pixel_values", (3, 16, 16)),
}


#: The others are compositions of the same operators.
SHORT = ("Llama", "GPT2", "T5", "ViT")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.full) for name in ARCHITECTURES]
)
def test_architecture(name: str) -> None:
    make, argument, shape = ARCHITECTURES[name]
    # Some of them go on in float32 whatever they are given.
    dtype = torch.float32 if name in ("Llama", "Qwen2", "Mistral", "T5") else torch.float64
    model = Of(make(transformers).eval(), argument).to(dtype)
    x = torch.randn(2, *shape, dtype=dtype)
    assert not jacsparse.verify(model, x).failed
    check_scan(model, x)
