"""A module as a function of one tensor of samples, whatever it takes and returns."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ..patterns import UnsupportedOperatorError, remedy_for
from ..runtime import a_type
from ..stages import check_tensor
from ..tracing import SAMPLES, check_module, memory_of, name_of, undisturbed

#: The entries of outputs that are counted: the first one that an output has.
ENTRIES = ("loss", "logits", "last_hidden_state")
_EMBEDDINGS = (functional.embedding, torch.embedding)
#: What ``torch.nn.utils.rnn`` packs sequences by.
_PACK = torch._VF._pack_padded_sequence  # type: ignore[attr-defined]


class Network(nn.Module):
    """A module as a function of one tensor, with its parts at their own paths.

    The tensor has all floating-point inputs of a sample. Integers have no gradient: where an embedding reads them, a
    tensor of zeros is added to its result, and that is an input.

    Parameters
    ----------
    module : Module
        What is counted. The output of a recurrent layer is that of its steps.
    inputs : Tensor, sequence or mapping
        Its one argument, its positional arguments or its keyword arguments. Tensors have samples along their first
        axis; what is no tensor is passed as it is.

    Attributes
    ----------
    count : int
        The number of samples.
    """

    #: What is counted, which is no part of its own.
    module: nn.Module

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        super().__init__()
        check_module(module)
        if isinstance(module, nn.RNNBase):
            layer = module = copy.copy(module)
            layer.batch_first = True
        # Parts have the paths that they have in the module, and messages its name.
        names = ("_modules", "_parameters", "_buffers", "training")
        vars(self).update({name: vars(module)[name] for name in names}, __qualname__=name_of(module), module=module)
        named = isinstance(inputs, Mapping)
        several = isinstance(inputs, (list, tuple)) and not isinstance(inputs, PackedSequence)
        self._inputs: dict[Any, Any] = dict(inputs if named else enumerate(inputs if several else [inputs]))
        #: Whether the module has arguments, and not one input.
        self.takes_several = named or several
        self._names = {key: f"inputs[{key!r}]" if self.takes_several else "inputs" for key in self._inputs}
        self.count = self._checked()
        self._check_arguments()
        tensors = {key: value for key, value in self._inputs.items() if isinstance(value, torch.Tensor)}
        self._floats = [key for key, value in tensors.items() if value.is_floating_point()]
        self._integers = [key for key in tensors if key not in self._floats]
        self._shapes = [tuple(tensors[key].shape[1:]) for key in self._floats]
        #: The integers that an embedding reads, and the entry of the output that is counted, by their names.
        self._embedded, self._entry = list[str](), ""
        #: Zeros that are added to what embeddings make of one sample.
        self._terms = self._embeddings() if self._integers else []
        self._shapes += [tuple(term.shape[1:]) for term in self._terms]
        if not self._shapes:
            raise ValueError(
                f"{', '.join(self._names.values())}: no gradient ends there, as no embedding reads these integers as "
                "they are; give what the module computes of them"
            )

    def _checked(self) -> int:
        """The number of samples; an error where an input is none that can be counted."""
        counts = dict[str, int]()
        for key, value in self._inputs.items():
            name = self._names[key]
            if isinstance(value, PackedSequence):
                raise TypeError(
                    f"{name} is a PackedSequence; a count is of one sequence: give a padded batch of its length, as "
                    "(batch, time, features)"
                )
            if not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point() or value.is_complex():
                check_tensor(name, value)
            if not value.ndim:
                raise ValueError(f"{name} has no axis; expected samples along the first axis: {name}[None]")
            counts[name] = len(value)
        if len(set(counts.values())) > 1 or not counts:
            numbers = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no tensor"
            raise ValueError(f"inputs have other numbers of samples: {numbers}; expected tensors of as many samples")
        tensors = {name: self._inputs[key] for key, name in self._names.items() if name in counts}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
        if len(set(dtypes.values())) > 1:
            listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise TypeError(f"inputs have several dtypes: {listed}; convert them to one")
        count = next(iter(counts.values()))
        if not count:
            raise ValueError("inputs is an empty batch; a count needs at least one sample")
        return count

    def _check_arguments(self) -> None:
        """Raise ValueError where the module takes other arguments."""
        try:
            signature = inspect.signature(self.module.forward)
        except ValueError:
            # Code that is not Python's tells none.
            return
        try:
            signature.bind(*self._positional(self._inputs), **self._keywords(self._inputs))
        except TypeError as error:
            raise ValueError(
                f"{name_of(self)}: {error}; it takes {', '.join(signature.parameters)}: give those that it needs by "
                "inputs, a list or a dict of tensors, or by --input once for each"
            ) from error

    def samples(self, number: int | None = None, copies: int = SAMPLES) -> torch.Tensor:
        """The tensor of all samples, or of copies of one, whose integers the next runs take.

        Returns
        -------
        Tensor, (samples, *shape), or (samples, elements) of several inputs
        """
        self._arguments = self._inputs
        if number is not None:
            self._arguments = {key: _repeated(value, number, copies) for key, value in self._inputs.items()}
        count = self.count if number is None else copies
        parts = [self._arguments[key] for key in self._floats] + [_repeated(term, 0, count) for term in self._terms]
        return parts[0] if len(parts) == 1 else torch.cat([part.reshape(count, -1) for part in parts], 1)

    def forward(self, x: torch.Tensor) -> Any:
        """The entry of the module's output that is counted; an output without entries as it is."""
        parts = [x]
        if self.joins:
            pieces = x.split(list(map(math.prod, self._shapes)), 1)
            parts = [piece.reshape(len(x), *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        arguments = {**self._arguments, **dict(zip(self._floats, parts, strict=False))}
        terms = iter(parts[len(self._floats) :])
        with _Embeddings(name_of(self), self._memory(), lambda result, _: result + next(terms)):
            return self._chosen(self._called(arguments), len(x))

    def _called(self, arguments: Mapping[Any, Any]) -> Any:
        return self.module(*self._positional(arguments), **self._keywords(arguments))

    @staticmethod
    def _positional(arguments: Mapping[Any, Any]) -> list[Any]:
        return [value for key, value in arguments.items() if isinstance(key, int)]

    @staticmethod
    def _keywords(arguments: Mapping[Any, Any]) -> dict[str, Any]:
        return {key: value for key, value in arguments.items() if isinstance(key, str)}

    def _memory(self) -> dict[int, str]:
        """The names of the integers that the module is given, by their memory."""
        return {memory_of(self._arguments[key]): self._name(key) for key in self._integers}

    def _name(self, key: Any) -> str:
        return key if isinstance(key, str) else self._names[key]

    def _embeddings(self) -> list[torch.Tensor]:
        """Zeros as what embeddings make of one sample's integers, in the order in which they run."""
        terms = list[torch.Tensor]()

        def noted(result: torch.Tensor, name: str) -> torch.Tensor:
            terms.append(torch.zeros_like(result))
            self._embedded.append(name)
            return result

        # Copies: inputs that are one tensor have their own memory.
        self._arguments = {key: _repeated(value, 0, 1) for key, value in self._inputs.items()}
        try:
            with undisturbed(self.module), torch.no_grad(), _Embeddings(name_of(self), self._memory(), noted):
                self._called(self._arguments)
        except UnsupportedOperatorError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{name_of(self)}: {self._sizes()} does not fit it: {error}") from error
        return terms

    def refuse_packed(self) -> None:
        """Raise UnsupportedOperatorError where the module packs sequences, be it after it reads their lengths."""
        inputs = {key: _repeated(value, 0, SAMPLES) for key, value in self._inputs.items()}
        mode = _Embeddings(name_of(self), {}, lambda result, _: result)
        try:
            with undisturbed(self.module), torch.no_grad(), mode:
                self._called(inputs)
        except UnsupportedOperatorError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError):
            # Whoever calls tells what was wrong before.
            return

    @property
    def joins(self) -> bool:
        """Whether the tensor is of several inputs, which `forward` takes apart."""
        return len(self._shapes) > 1

    def _chosen(self, output: Any, count: int) -> Any:
        if isinstance(self.module, nn.RNNBase):
            return output[0]
        entries: Mapping[Any, Any] | None = None
        if isinstance(output, Mapping):
            entries = output
        elif is_dataclass(output):
            entries = vars(output)
        elif isinstance(output, tuple) and hasattr(output, "_asdict"):
            entries = output._asdict()
        if entries is None:
            return output
        tensors = [str(key) for key, value in entries.items() if isinstance(value, torch.Tensor)]
        self._entry = next((name for name in ENTRIES if name in tensors), tensors[0] if len(tensors) == 1 else "")
        if not self._entry:
            raise UnsupportedOperatorError(
                f"{name_of(self)}: its output is {a_type(output)} with the entries {', '.join(map(str, entries))}, of "
                f"which none is {', '.join(ENTRIES)}; wrap it in a module that returns one tensor"
            )
        chosen = entries[self._entry]
        # A loss is one number for all samples.
        return chosen if chosen.ndim else chosen.expand(count)

    @property
    def counted(self) -> str:
        """What was counted, in words, after a run; empty for one tensor of one."""
        if not self._entry and not self._integers and not self.takes_several:
            return ""
        ends = f" The gradient ends at the embeddings of {', '.join(dict.fromkeys(self._embedded))}."
        return f"Counted: {self._entry or 'the output'} for {self._sizes()}.{ends if self._embedded else ''}"

    def _sizes(self) -> str:
        """The inputs with a sample's sizes."""
        tensors = {self._name(key): self._inputs[key] for key in (*self._floats, *self._integers)}
        sizes = {name: " × ".join(map(str, tensor.shape[1:])) for name, tensor in tensors.items()}
        return ", ".join(f"{name} ({size})" if size else name for name, size in sizes.items())


def _repeated(value: Any, number: int, copies: int) -> Any:
    """Copies of a sample; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value[number : number + 1].repeat(copies, *[1] * (value.ndim - 1))


class _Embeddings(TorchFunctionMode):
    """Passes what embeddings make of some integers, with the name of these, through a function.

    It refuses a module that packs sequences.
    """

    def __init__(
        self, module: str, names: Mapping[int, str], passed: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> None:
        super().__init__()
        self.module, self.names, self.passed = module, names, passed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _PACK:
            raise UnsupportedOperatorError(
                f"{self.module} packs sequences, whose lengths may differ; a count is of one sequence: "
                f"{remedy_for('aten._pack_padded_sequence')}"
            )
        if function not in _EMBEDDINGS:
            return function(*args, **(kwargs or {}))
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        if all(tensor.is_floating_point() for tensor in tensors):
            raise ValueError("an embedding reads tokens: give integers by inputs, or by --input ids:12")
        result = function(*args, **(kwargs or {}))
        name = next((self.names[memory_of(each)] for each in tensors if memory_of(each) in self.names), None)
        return result if name is None else self.passed(result, name)
