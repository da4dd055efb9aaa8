"""Frozen models: a model's inference for some shapes, and the file from which any machine records it anew.

A recording is of one machine: it has addresses, and kernels for its processor. A file has what recordings are made of,
weights, which layers are sparse, and shapes; so `FrozenModel.load` takes the model's class, as a state dict does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn

from ..runtime import HEADER, a_type, machine_memory, read_safetensors, run_times, write_safetensors
from ..tracing import check_initialised, check_module, name_of
from .conversion import SparseModel, SparsityReport, convert, copied, densify, expected_frozen
from .freezing import FrozenRun, record_run
from .layers import SparseLayer

_FORMAT = 1
#: Bytes of an element as it is drawn, at most but for complex numbers, and the copies of an input while it is recorded.
_DRAWN, _COPIES = 8, 4
#: What follows the name of a tensor that is mostly zeros: its other values, and their places.
_VALUES, _PLACES = ":values", ":places"


class FrozenModel:
    """A model for inference alone, on inputs of some shapes; made by `freeze`."""

    #: As a module in evaluation mode has it.
    training = False

    def __init__(self, model: nn.Module) -> None:
        """Take over a model, which nobody else runs or changes, and record nothing yet."""
        self._model = model
        self._name = name_of(model.model if isinstance(model, SparseModel) else model)
        self._runs: dict[tuple[Any, ...], FrozenRun] = {}
        #: What is known of the examples of each run's inputs.
        self._examples: list[list[dict[str, Any]]] = []

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The model's output, in memory of its own.

        Parameters
        ----------
        *inputs : Tensor
            Of shapes and dtypes that the model was frozen for.

        Raises
        ------
        TypeError, ValueError
            Where they are others.
        """
        run = self._runs.get(self._key(inputs))
        if run is not None:
            return run(*inputs)
        counts = {len(key): None for key in self._runs}
        if len(inputs) not in counts:
            expected = " or ".join(f"{count} input{'s' if count != 1 else ''}" for count in counts)
            raise TypeError(f"the frozen {self._name} takes {expected}, not {len(inputs)}")
        raise ValueError(
            f"the frozen {self._name} got {_shown(self._key(inputs))}; it was frozen for "
            f"{'; '.join(map(_shown, self._runs))}: add each shape that you use, by add(...)"
        )

    def _key(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        for each in inputs:
            if not isinstance(each, torch.Tensor):
                raise TypeError(f"an input of the frozen {self._name} is {a_type(each)}; expected a tensor")
        return tuple([(each.shape, each.dtype, each.device) for each in inputs])

    def add(self, *inputs: torch.Tensor) -> None:
        """Record the model for inputs of one more shape; all shapes share the weights.

        Parameters
        ----------
        *inputs : Tensor
            What the model is called with.

        Raises
        ------
        TypeError, ValueError
            As `freeze`.

        Examples
        --------
        >>> from jacsparse import freeze
        >>> frozen = freeze(nn.Linear(2, 3).eval(), torch.zeros(1, 2))
        >>> frozen.add(torch.zeros(16, 2))
        >>> frozen(torch.ones(16, 2)).shape
        torch.Size([16, 3])
        """
        key = self._checked_key(inputs)
        if key not in self._runs:
            self._runs[key] = record_run(self._name, self._model, inputs)
            self._examples.append([_described(each) for each in inputs])

    def _checked_key(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        if not inputs:
            raise TypeError(f"freeze takes what {self._name} is called with: at least one tensor")
        key = self._key(inputs)
        for each in inputs:
            if each.device.type != "cpu":
                raise ValueError(f"an input is on {each.device}; frozen models run on the CPU alone: move it by .cpu()")
        return key

    def eval(self) -> FrozenModel:
        """The model itself, which is in evaluation mode as it was frozen."""
        return self.train(False)

    def train(self, mode: bool = True) -> FrozenModel:
        """As ``Module.train``, for code that sets the mode that it finds; ValueError for training."""
        if mode:
            raise ValueError(f"the frozen {self._name} is for inference alone: train the model, and freeze it anew")
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, which layers are sparse, and shapes, as safetensors; the file appears whole or not at all.

        Tensors that are mostly zeros are written as their other values and places. Nothing in the file is code.

        Parameters
        ----------
        path : path-like
            The file to write.

        Raises
        ------
        TypeError
            Where the model's state dict has what is no tensor.
        OSError
            Where the file cannot be written.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, value in densify(self._model, masks=False).state_dict().items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"{name} of {self._name} is {a_type(value)}; a file takes a state dict of tensors alone"
                )
            tensors |= _compressed(name, value)
        sparse = sorted(_sparse_paths(self._model))
        description = {"frozen": self._name, "format": _FORMAT, "sparse": sparse, "inputs": self._examples}
        write_safetensors(path, tensors, description)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Self:
        """Read what `save` wrote into a copy of a model, and freeze that for the file's shapes, on this machine.

        Parameters
        ----------
        path : path-like
            The file.
        model : Module
            Of the architecture that was frozen, as its class makes it; its weights and masks do not count. It does
            not change.

        Raises
        ------
        FileNotFoundError
            Where there is no such file.
        ValueError
            Where it is damaged, no frozen model, or of another architecture.

        Examples
        --------
        >>> import tempfile
        >>> from jacsparse import freeze
        >>> frozen = freeze(nn.Linear(2, 3).eval(), torch.zeros(1, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frozen.save(f"{folder}/linear.safetensors")
        ...     loaded = FrozenModel.load(f"{folder}/linear.safetensors", nn.Linear(2, 3))
        >>> loaded
        FrozenModel(Linear of (1, 2): 0 sparse kernels, 1 operator of PyTorch)
        """
        check_initialised(check_module(model))
        name, sparse, examples, tensors = _read(path)
        with torch.inference_mode(False), torch.no_grad():
            frozen_model = densify(model, masks=False).eval()
            try:
                frozen_model.load_state_dict(_fitting(frozen_model.state_dict(), tensors), strict=False)
                if sparse:
                    report = SparsityReport((), False, None, None, f"as in {path}")
                    frozen_model = SparseModel(convert(frozen_model, sparse), report)
                if missing := sparse - _sparse_paths(frozen_model):
                    raise ValueError(f"{min(missing)!r} is no layer that can be sparse")
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path} holds a frozen {name}, which does not fit {name_of(model)}: {error}; give the model that "
                    "was frozen, as its class makes it"
                ) from error
        frozen = cls(frozen_model)
        for example in examples:
            frozen.add(*example)
        return frozen

    def __repr__(self) -> str:
        runs = "; ".join(
            f"{', '.join(str(tuple(shape)) for shape, *_ in key)}: {run}" for key, run in self._runs.items()
        )
        return f"FrozenModel({self._name} of {runs})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the frozen {self._name} is neither pickled nor copied, for it has addresses and machine code: save(path) "
            "writes it, and FrozenModel.load(path, model) reads it in another process"
        )


def freeze(model: nn.Module, *inputs: torch.Tensor) -> FrozenModel:
    """A model's inference on inputs of one shape, without the model's own Python code.

    The model runs once, and what it runs is recorded: sparse layers' kernels, and PyTorch's operators. Weights,
    running statistics and all else that no input reaches are constants from then on. A call of what is returned gives
    what the model gives, in less time where layers are small; it has no gradients.

    Parameters
    ----------
    model : Module
        In evaluation mode, and on the CPU; mostly from `sparsify`. It does not change, and later changes of it have no
        effect. Where `sparsify` has chosen its sparse layers, they are chosen anew, for layers without Python code of
        their own: by their sizes, unless what `sparsify` chose is clearly faster when it is frozen. Where the two
        differ, both are measured, for half a second or three runs each.
    *inputs : Tensor
        What the model is called with. `FrozenModel.add` takes those of further shapes.

    Returns
    -------
    FrozenModel
        To be called as the model; `FrozenModel.save` writes it.

    Raises
    ------
    TypeError
        Where the model is no module, or an input no tensor.
    ValueError
        Where the model is in training mode, or is not on the CPU; where what it computes depends on the values of an
        input in Python, as in ``if x.sum() > 0``; or where it gives something else for other values of the inputs than
        its recorded steps.

    Examples
    --------
    >>> from torch.nn.utils import prune
    >>> from jacsparse import freeze, sparsify
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()).eval()
    >>> _ = prune.l1_unstructured(model[0], "weight", 0.9)
    >>> x = torch.randn(1, 3, 8, 8)
    >>> frozen = freeze(sparsify(model, x, measure=False), x)
    >>> torch.allclose(frozen(x), model(x), atol=1e-6)
    True
    """
    check_module(model)
    check_initialised(model)
    if training := [path for path, part in model.named_modules() if part.training]:
        where = training[0] or name_of(model.model if isinstance(model, SparseModel) else model)
        raise ValueError(f"{where} is in training mode; freeze takes a model for inference: call its eval() first")
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ValueError(f"{path} is on {tensor.device}; frozen models run on the CPU alone: move it by .cpu()")
    with torch.inference_mode(False), torch.no_grad():
        model = copied(model)
        frozen = FrozenModel(model)
        frozen._checked_key(inputs)
        expected = expected_frozen(model, inputs) if isinstance(model, SparseModel) else None
    if expected is None:
        frozen.add(*inputs)
        return frozen
    other = FrozenModel(expected)
    other.add(*inputs)
    sparsified = record_run(frozen._name, model, inputs, is_compared=False)
    as_sparsified, as_expected = run_times(lambda: sparsified(*inputs), lambda: other(*inputs))
    if not as_sparsified.clearly_below(as_expected):
        return other
    frozen.add(*inputs)
    return frozen


def _sparse_paths(model: nn.Module) -> set[str]:
    """The paths of a model's sparse layers."""
    inner = model.model if isinstance(model, SparseModel) else model
    return {path for path, part in inner.named_modules() if isinstance(part, SparseLayer)}


def _read(
    path: str | os.PathLike[str],
) -> tuple[str, set[str], list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    """A file's model, the paths of its sparse layers, an example for each shape, and its tensors."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}; expected a frozen model that FrozenModel.save wrote")
    tensors, metadata = read_safetensors(path, "frozen model", "write it anew by FrozenModel.save")
    try:
        description = json.loads(metadata[HEADER])
        name, sparse, inputs = (description[key] for key in ("frozen", "sparse", "inputs"))
        if description["format"] != _FORMAT:
            raise ValueError(f"its format is {description['format']!r}, this jacsparse reads {_FORMAT}")
        _check_memory(inputs)
        return str(name), {str(layer) for layer in sparse}, [[*map(_example, run)] for run in inputs], tensors
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is no frozen model that this jacsparse reads ({type(error).__name__}: {error}); write it anew by "
            "FrozenModel.save"
        ) from error


def _shown(key: tuple[Any, ...]) -> str:
    return " and ".join(f"{tuple(shape)} of {dtype} on {device}" for shape, dtype, device in key)


def _described(x: torch.Tensor) -> dict[str, Any]:
    """What an example is drawn from: shape and dtype, and of integers the least and the largest."""
    description: dict[str, Any] = {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
    if not x.is_floating_point() and not x.is_complex():
        low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
        description |= {"low": low, "high": high}
    return description


def _check_memory(inputs: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Raise ValueError, before memory is taken, where a file's inputs are more than this machine can record."""
    shapes = [each["shape"] for run in inputs for each in run]
    if any(type(size) is not int or size < 0 for shape in shapes for size in shape):
        raise ValueError("the shape of an input is none")
    nbytes = _DRAWN * _COPIES * sum(map(math.prod, shapes))
    memory = machine_memory(torch.device("cpu"))
    if nbytes > memory:
        raise ValueError(
            f"to record it for its inputs takes {nbytes / 2**30:,.0f} GiB or more, and this machine has "
            f"{memory / 2**30:,.0f} GiB; freeze the model for smaller batches"
        )


def _example(description: dict[str, Any]) -> torch.Tensor:
    """An input for which a model can be recorded."""
    dtype = getattr(torch, description["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{description['dtype']} is no dtype")
    draw = torch.Generator().manual_seed(0)
    if "low" in description:
        low, high = description["low"], description["high"]
        return torch.randint(low, high + 1, description["shape"], generator=draw).to(dtype)
    return torch.randn(description["shape"], generator=draw).to(dtype)


def _compressed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor as it is, or where most of it is zero, its other values and their places in order."""
    places = tensor.flatten().nonzero()[:, 0]
    if (
        not tensor.is_floating_point()
        or 2 * len(places) >= tensor.numel()
        or tensor.numel() > torch.iinfo(torch.int32).max
    ):
        return {name: tensor}
    return {name + _VALUES: tensor.flatten()[places], name + _PLACES: places.to(torch.int32)}


def _fitting(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's weights among a file's tensors; ValueError where they are not those of the state dict."""
    weights: dict[str, torch.Tensor] = {}
    for name, expected in state.items():
        tensor = tensors.pop(name) if name in tensors else None
        if {name + _VALUES, name + _PLACES} <= tensors.keys():
            values, places = tensors.pop(name + _VALUES), tensors.pop(name + _PLACES)
            # Of the model's size, whatever the file says.
            tensor = torch.zeros(expected.numel(), dtype=values.dtype)
            is_index = places.dtype == torch.int32 and places.shape == values.shape == (len(values),)
            if not is_index or (len(places) and not 0 <= places.min() <= places.max() < len(tensor)):
                raise ValueError(f"the places of {name} are none")
            tensor[places.long()] = values
            tensor = tensor.view(expected.shape)
        if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            form = "missing" if tensor is None else f"{tensor.dtype} of {tuple(tensor.shape)}"
            raise ValueError(f"{name} is {form}, not {expected.dtype} of {tuple(expected.shape)}")
        weights[name] = tensor
    if tensors:
        raise ValueError(f"{min(tensors)} is not expected")
    return weights
