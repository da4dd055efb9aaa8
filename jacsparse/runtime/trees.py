"""Tuples, lists and dicts of tensors and other leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

#: How a leaf makes up a tree that is one.
LEAF = _pytree.tree_flatten(0)[1]


def flattened(tree: Any) -> tuple[list[Any], _pytree.TreeSpec]:
    """The leaves of a tree, and how they make it up."""
    # PyTorch's function leaves a cycle, which would keep a tensor until the garbage collector runs.
    return ([tree], LEAF) if isinstance(tree, (torch.Tensor, int, float)) else _pytree.tree_flatten(tree)
