"""Files of torch.export, which have whole models: graph and weights."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree

from ..runtime import parts_of_program


class ExportedModel(nn.Module):
    """An exported program of one input and any batch, as a module whose parts have the names of the original model.

    Parameters
    ----------
    program : ExportedProgram
        A program of ``torch.export``.

    Attributes
    ----------
    input_shape : tuple of int
        The shape of one sample.

    Raises
    ------
    ValueError
        Where the program takes more than one tensor, or batches of only one size.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        inputs = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
        shapes = [tuple(node.meta["val"].shape) for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
        if len(inputs) != 1 or len(shapes) != 1:
            raise ValueError(f"the exported program takes {len(inputs)} inputs; expected one tensor")
        if program.call_spec.in_spec != _pytree.tree_structure(((None,), {})):
            raise ValueError(
                "the exported program takes its input by name, or among others in a list; expected one tensor, by "
                "position: export it with torch.export.export(model, (x,), ...)"
            )
        (shape,) = shapes
        sizes = shape[1:]
        if not shape or isinstance(shape[0], int) or not all(isinstance(size, int) for size in sizes):
            raise ValueError(
                f"the exported program takes an input of {tuple(map(str, shape))}; expected any batch, of samples "
                "of one size: export it with dynamic_shapes=({0: torch.export.Dim('batch')},)"
            )
        self.input_shape = sizes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = _parts(program)
        # This module takes over the parts, so that their paths have no prefix. A tuple keeps the module that runs them
        # from being registered.
        self._program = (parts,)
        self._modules, self._parameters, self._buffers = parts._modules, parts._parameters, parts._buffers
        self._non_persistent_buffers_set = parts._non_persistent_buffers_set

    def train(self, mode: bool = True) -> ExportedModel:
        """Return the module unchanged: a program stays in the mode in which it was exported."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The program's output, for an input ``(batch, *input_shape)``."""
        return self._program[0](x)  # type: ignore[no-any-return]


def _parts(program: torch.export.ExportedProgram) -> nn.Module:
    """The program as modules with the names of the original model, where PyTorch knows them."""
    parts = parts_of_program(program)
    if parts is not None:
        return parts
    module = program.module()
    # The program's checks of inputs, such as limits on the batch, cannot be traced.
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.clear()
    if "_guards_fn" in module._modules:
        module._guards_fn = nn.Identity()
    return module


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """The model in a file of ``torch.export.save``.

    Loading such a file may run code of its author: load only files that you trust.

    Parameters
    ----------
    path : path-like
        The file to load.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or its program takes more than one tensor, or batches of only one size.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no exported program {path}; make one with torch.export.save")
    try:
        program = torch.export.load(path)
    except Exception as error:
        # The errors of torch.export for a damaged file share no base class.
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{path} cannot be loaded as an exported program ({reason}); export it again") from error
    try:
        return ExportedModel(program)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
