"""Nested states, as those of optimisers, as a list of tensors and a text of JSON: written and read without pickling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ..runtime import a_type

#: The names under which a container is written, by its type; a tensor is its place in the list.
_TENSOR, _DICT, _LIST, _TUPLE = "tensor", "dict", "list", "tuple"


def to_tensors(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state by their numbers, and as ``tree`` the UTF-8 bytes of JSON that says where each belongs.

    Parameters
    ----------
    state : object
        Mappings, lists, tuples, tensors, strings, numbers and None within each other.

    Raises
    ------
    TypeError
        Where it has an object of another kind.

    Examples
    --------
    >>> tensors = to_tensors({"state": {0: torch.ones(2)}, "betas": (0.9, 0.999), "step": None})
    >>> sorted(tensors)
    ['0', 'tree']
    >>> from_tensors(tensors)
    {'state': {0: tensor([1., 1.])}, 'betas': (0.9, 0.999), 'step': None}
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_written(state, tensors)).encode()
    return {
        **{str(number): tensor for number, tensor in enumerate(tensors)},
        "tree": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `to_tensors` wrote.

    Raises
    ------
    KeyError, TypeError, ValueError
        Where it is damaged.
    """
    return _read(json.loads(tensors["tree"].numpy().tobytes()), tensors)


def _written(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        # JSON's own objects have strings alone as keys.
        return {_DICT: [[_written(key, tensors), _written(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {_LIST if isinstance(value, list) else _TUPLE: [_written(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state has {a_type(value)}; expected tensors, numbers, strings and containers of these")


def _read(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return tensors[str(content)]
    if kind == _DICT:
        return {_read(key, tensors): _read(item, tensors) for key, item in content}
    items = [_read(item, tensors) for item in content]
    if kind not in (_LIST, _TUPLE):
        raise ValueError(f"a state has a {kind}")
    return items if kind == _LIST else tuple(items)
