"""State dicts as training programs write them: under keys, behind prefixes, beside others, with masks elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from jacsparse.models import load_weights
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from torch.nn.utils import parametrizations, prune

import jacsparse

State = dict[str, torch.Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval()


def pruned() -> nn.Sequential:
    model = network()
    for part in (model[0], model[3]):
        prune.l1_unstructured(part, "weight", 0.75)
        prune.remove(part, "weight")
    return model


def behind(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def same(one: nn.Module, other: nn.Module) -> None:
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(one.eval()(x), other.eval()(x))


FORMS: dict[str, Callable[[State], Any]] = {
    "Lightning": lambda state: {"epoch": 1, "state_dict": behind("model.", state), "hyper_parameters": {"lr": 0.1}},
    "Lightning, of DataParallel": lambda state: {"state_dict": behind("net.module.", state)},
    "averaged": lambda state: {"n_averaged": torch.tensor(7), **behind("module.", state)},
    "EMA alone": lambda state: {"model_ema": behind("module.", state), "decay": torch.tensor(0.9)},
    "in callbacks": lambda state: {"callbacks": {"EMA": {"state": state}}},
    "profiled": lambda state: {"net": {**state, "total_ops": torch.zeros(1), "0.total_params": torch.zeros(1)}},
    "with arguments": lambda state: {"args": argparse.Namespace(lr=0.1), "model": state},
    "FSDP and checkpoints within": lambda state: {
        name.replace("0.", "0._fsdp_wrapped_module._checkpoint_wrapped_module.", 1): value
        for name, value in state.items()
    },
    "beside an optimiser": lambda state: {
        "model": state, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3), "step": torch.tensor(3)}}}
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_load(tmp_path: Path, form: str) -> None:
    trained, model = pruned(), network()
    torch.save(FORMS[form](trained.state_dict()), tmp_path / "last.ckpt")
    load_weights(model, tmp_path / "last.ckpt")
    same(model, trained)
    layers = jacsparse.count_flop(model, (3, 4, 4), schedule="linear").layers
    assert [layer["zeros"] for layer in layers if layer["zeros"]] == [81, 24]


def test_what_torch_itself_writes(tmp_path: Path) -> None:
    trained, model = pruned(), network()
    averaged = torch.optim.swa_utils.AveragedModel(trained)
    averaged.update_parameters(trained)
    for name, wrapper in (("averaged", averaged), ("compiled", torch.compile(trained)), ("plain", trained)):
        torch.save(wrapper.state_dict(), tmp_path / f"{name}.pt")
        load_weights(model, tmp_path / f"{name}.pt")
        same(model, trained)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_several_are_named(tmp_path: Path, suffix: str) -> None:
    one, other, model, file = pruned(), pruned(), network(), tmp_path / f"last{suffix}"
    states = behind("model.", one.state_dict()) | behind("ema.module.", other.state_dict())
    safetensors.torch.save_file(states, file) if suffix == ".safetensors" else torch.save({"state_dict": states}, file)
    keys = "" if suffix == ".safetensors" else "state_dict."
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # In the file's order, which is safetensors' own.
    places = ["ema.module.", "model."] if suffix == ".safetensors" else ["state_dict.model.", "state_dict.ema.module."]
    message = (
        rf"{file} has the weights of Sequential under several prefixes, '{places[0]}', '{places[1]}'; say under which, "
        rf"as in jacsparse.models.load_weights\(model, '{file}', prefix='{places[1]}'\)"
    )
    with pytest.raises(ValueError, match=message):
        load_weights(model, file)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for prefix, trained in ((f"{keys}model", one), (f"{keys}ema.module.", other)):
        load_weights(model, file, prefix=prefix)
        same(model, trained)
    with pytest.raises(ValueError, match=rf"no weights of Sequential under the prefix 'net', but under '{places[0]}'"):
        load_weights(model, file, prefix="net")


def test_others_beside_them_are_named(tmp_path: Path) -> None:
    trained, model, file = pruned(), network(), tmp_path / "last.ckpt"
    torch.save({"state_dict": {"loss.weight": torch.ones(2), **behind("model.", trained.state_dict())}}, file)
    with pytest.raises(ValueError, match=r"under the prefix 'state_dict.model.', and others .*, as loss.weight; leave"):
        load_weights(model, file)
    load_weights(model, file, prefix="state_dict.model.")
    same(model, trained)


def test_what_does_not_fit_behind_a_prefix(tmp_path: Path) -> None:
    model, file = network(), tmp_path / "last.ckpt"
    states = behind("net.", {**network().state_dict(), "0.weight": torch.zeros(4, 3, 5, 5)})
    torch.save({"state_dict": states, "epoch": 3}, file)
    with pytest.raises(ValueError, match=r"under the prefix 'state_dict.net.', does not fit Sequential: 0.weight is"):
        load_weights(model, file)
    torch.save({**network().state_dict(), "7.weight": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match=r"does not fit Sequential: 7.weight is \(2,\), not expected"):
        load_weights(model, file)


def test_the_prefix_of_the_file_itself(tmp_path: Path) -> None:
    trained, model, file = pruned(), network(), tmp_path / "last.pt"
    torch.save({**trained.state_dict(), "ema": network().state_dict()}, file)
    load_weights(model, file, prefix="")
    same(model, trained)


MASKS: dict[str, Callable[[State], Any]] = {
    "alone": lambda masks: masks,
    "named": lambda masks: {f"{name}_mask": mask for name, mask in masks.items()},
    "under a key": lambda masks: {"epoch": 1, "masks": behind("module.", masks)},
    "of a sparsifier": lambda masks: {"state": {name: {"mask": mask} for name, mask in masks.items()}},
    "as floats": lambda masks: {name: mask.float() for name, mask in masks.items()},
    "of pruning": lambda masks: {
        f"{name}_{part}": mask.float() for name, mask in masks.items() for part in ("orig", "mask")
    },
}  # fmt: skip


@pytest.mark.parametrize("form", MASKS)
def test_a_file_of_masks(tmp_path: Path, form: str) -> None:
    trained, model = network(), network()
    masks = {name: torch.rand_like(trained.get_parameter(name)) > 0.7 for name in ("0.weight", "3.weight")}
    torch.save({"state_dict": behind("model.", trained.state_dict())}, tmp_path / "weights.pt")
    torch.save(MASKS[form](masks), tmp_path / "masks.pt")
    load_weights(model, tmp_path / "weights.pt", masks=tmp_path / "masks.pt")
    assert all(torch.equal(model.get_buffer(f"{name}_mask"), mask) for name, mask in masks.items())
    for name, mask in masks.items():
        trained.get_parameter(name).data *= mask
    same(model, trained)


def test_masks_in_the_file_are_not_left_out_silently(tmp_path: Path) -> None:
    model, file = network(), tmp_path / "last.pt"
    mask = torch.rand(4, 3, 3, 3) > 0.5
    torch.save({"state_dict": network().state_dict(), "masks": {"0.weight": mask}}, file)
    message = rf"{file} has masks beside the weights, as that of 0.weight; .*\(model, '{file}', masks='{file}'\)"
    with pytest.raises(ValueError, match=message):
        load_weights(model, file)
    load_weights(model, file, masks=file)
    assert torch.equal(model.get_buffer("0.weight_mask"), mask)


def test_masks_that_are_none(tmp_path: Path) -> None:
    model, weights, file = network(), tmp_path / "weights.pt", tmp_path / "masks.pt"
    torch.save(network().state_dict(), weights)
    torch.save({"5.weight": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=rf"{file} has no mask of Sequential; name masks .* as 0.weight_mask"):
        load_weights(model, weights, masks=file)
    for mask in (torch.full((4, 3, 3, 3), 0.5), torch.ones(3)):
        torch.save({"0.weight": mask}, file)
        with pytest.raises(ValueError, match=r"0.weight_mask is torch.float32 .*, not a mask of 0.weight"):
            load_weights(model, weights, masks=file)
    assert not prune.is_pruned(model)


def test_a_sparsifier_of_torch_ao(tmp_path: Path) -> None:
    trained, model, file = network(), network(), tmp_path / "last.pt"
    sparsifier = WeightNormSparsifier(sparsity_level=0.5)
    sparsifier.prepare(trained, [{"tensor_fqn": "3.weight"}])
    sparsifier.step()
    torch.save(trained.state_dict(), file)
    with pytest.raises(ValueError, match=r"3.weight is missing, .* parametrised: .* squash_mask .* masks=FILE"):
        load_weights(model, file)
    torch.save({"model": trained.state_dict(), "sparsifier": sparsifier.state_dict()}, file)
    with pytest.raises(ValueError, match=r"cannot be read as a state dict .* save the weights alone"):
        load_weights(model, file, masks=file)
    torch.save({"model": trained.state_dict(), "sparsifier": dict(sparsifier.state)}, file)
    load_weights(model, file, masks=file)
    same(model, trained)
    assert 0 < int((model.get_buffer("3.weight_mask") == 0).sum()) < 32
    load_weights(trained, file, prefix="model.")
    same(model, trained)


class Mask(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


def test_a_masking_parametrization(tmp_path: Path) -> None:
    trained, model = network(), network()
    nn.utils.parametrize.register_parametrization(trained[0], "weight", Mask(torch.rand(4, 3, 3, 3).round()))
    torch.save({"state_dict": behind("model.", trained.state_dict())}, tmp_path / "last.pt")
    load_weights(model, tmp_path / "last.pt")
    same(model, trained)
    assert torch.equal(model.get_buffer("0.weight_mask"), trained[0].parametrizations.weight[0].mask)


def test_other_parametrizations(tmp_path: Path) -> None:
    trained, file = network(), tmp_path / "last.pt"
    parametrizations.weight_norm(trained[3])
    torch.save(trained.state_dict(), file)
    with pytest.raises(ValueError, match=r"3.weight is missing, .* are parametrised: .*remove_parametrizations"):
        load_weights(network(), file)
    model = network()
    parametrizations.weight_norm(model[3])
    load_weights(model, file)
    same(model, trained)


def test_dicts_without_end(tmp_path: Path) -> None:
    trained, model = pruned(), network()
    content: dict[str, Any] = {}
    content["self"], content["state_dict"] = content, trained.state_dict()
    deep: dict[str, Any] = {}
    content["deep"] = deep
    for _ in range(300):
        deep["in"] = deep = {}
    torch.save(content, tmp_path / "last.pt")
    load_weights(model, tmp_path / "last.pt")
    same(model, trained)


def test_a_file_of_ours_has_one_model(tmp_path: Path) -> None:
    model = jacsparse.models.build("lenet5")
    jacsparse.models.save_checkpoint(tmp_path / "m.safetensors", model)
    with pytest.raises(ValueError, match=r"m.safetensors was saved by jacsparse, .*: leave out prefix and masks"):
        load_weights(model, tmp_path / "m.safetensors", prefix="ema.")
