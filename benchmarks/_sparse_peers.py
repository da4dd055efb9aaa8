"""Peers that train or run pruned networks; each raises ImportError where it is not installed."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

__all__ = ["DEEPSPARSE", "ONNX_RUNTIME", "SPARSEPROP", "deepsparse_call", "onnx_runtime_call", "sparseprop_model"]

SPARSEPROP, ONNX_RUNTIME, DEEPSPARSE = "SparseProp", "ONNX Runtime", "DeepSparse"


def without_masks(model: nn.Module) -> nn.Module:
    """A copy whose weights hold zeros where they are pruned."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if hasattr(part, "weight_mask"):
            prune.remove(part, "weight")
    return model


def sparseprop_model(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The model with SparseProp's layers where these are faster, by its own choice, for a batch of that shape."""
    try:
        from sparseprop.utils import swap_modules_with_sparse
    except ImportError as error:
        raise ImportError("SparseProp is not installed: pip install sparseprop") from error
    # It prints what it chooses.
    with contextlib.redirect_stdout(io.StringIO()):
        return swap_modules_with_sparse(without_masks(model), shape)  # type: ignore[no-any-return]


def onnx_runtime_call(model: nn.Module, x: torch.Tensor, folder: str) -> Callable[[], Any]:
    """A run of the model by ONNX Runtime on as many threads as PyTorch uses, from a file in a folder."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("ONNX Runtime is not installed: pip install onnx onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    path = _exported(model, x, folder)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, inputs)


def deepsparse_call(model: nn.Module, x: torch.Tensor, folder: str) -> Callable[[], Any]:
    """A run of the model by DeepSparse, whose licence allows evaluation alone."""
    try:
        from deepsparse import compile_model
    except ImportError as error:
        raise ImportError("DeepSparse is not installed; it needs Python 3.11 and an environment of its own") from error
    # It reads no newer set of operators.
    path = _exported(model, x, folder, opset=13)
    engine = compile_model(path, batch_size=len(x), num_cores=torch.get_num_threads())
    inputs = [x.numpy()]
    return lambda: engine.run(inputs)


def _exported(model: nn.Module, x: torch.Tensor, folder: str, opset: int | None = None) -> str:
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ImportError("onnx is not installed: pip install onnx") from error
    path = f"{folder}/model.onnx"
    torch.onnx.export(without_masks(model), (x,), path, dynamo=False, opset_version=opset)
    return path
