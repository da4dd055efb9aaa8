"""Files of torch.export: whole models, graph and weights."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree

__all__ = ["ExportedModel", "load_exported"]


class ExportedModel(nn.Module):
    """An exported program of one input and any batch, as a module whose parts have their own names.

    Parameters
    ----------
    program : ExportedProgram
        Of ``torch.export``.

    Attributes
    ----------
    input_shape : tuple of int
        Of one sample.

    Raises
    ------
    ValueError
        Where it takes more than one tensor, or batches of one size alone.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        given = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
        shapes = [tuple(node.meta["val"].shape) for node in given if isinstance(node.meta.get("val"), torch.Tensor)]
        if len(given) != 1 or len(shapes) != 1:
            raise ValueError(f"the exported program takes {len(given)} inputs; expected one tensor")
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
        # Its parts are this module's own, so that no path begins with another name; hidden, it is none of them.
        self._hidden = (parts,)
        self._modules, self._parameters, self._buffers = parts._modules, parts._parameters, parts._buffers
        self._non_persistent_buffers_set = parts._non_persistent_buffers_set

    def train(self, mode: bool = True) -> ExportedModel:
        """Nothing: a program goes on in the mode in which it was exported."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``(batch, *input_shape)``."""
        return self._hidden[0](x)  # type: ignore[no-any-return]


def _parts(program: torch.export.ExportedProgram) -> nn.Module:
    """The program as modules of the names that they had, where that is known."""
    try:
        return torch.export.unflatten(program)
    except RuntimeError:
        # PyTorch 2.6 cannot do it for what it traced itself, strictly.
        module = program.module()
        # What checks inputs, as limits on the batch, is in the way of tracing.
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.clear()
        if "_guards_fn" in module._modules:
            module._guards_fn = nn.Identity()
        return module


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """The model in a file of ``torch.export.save``.

    Loading such a file may run code of whoever made it: load none that you do not trust.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or takes more than one tensor, or batches of one size alone.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no exported program {path}; make one with torch.export.save")
    try:
        program = torch.export.load(path)
    except Exception as error:
        # What torch.export raises of a damaged file shares no base class.
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{path} cannot be loaded as an exported program ({reason}); export it again") from error
    try:
        return ExportedModel(program)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
