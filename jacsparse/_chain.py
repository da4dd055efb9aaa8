"""A module as a chain of stages: what back-propagation goes through, one after the other."""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ._accumulation import Accumulation, Region, empty_pattern
from ._jacobian import SparseJacobian
from ._modules import (
    Kept,
    call_of,
    check_module,
    fingerprint,
    has_own_hooks,
    is_inactive,
    is_known,
    parts_of,
    refresh_weights,
    runs_as,
    tensors_of,
    twin,
    undrawn,
)
from ._order import Order, accumulated, best_order
from ._stages import TRAINS, Edge, ModuleStage, Record, Stage, pull_back_all
from ._traced import traced_stages
from .patterns import Call, Identity, Pattern, UnsupportedOperatorError

__all__ = ["Chain", "Record", "Stage", "chain", "check_input", "check_shape"]


class Chain:
    """The stages of a module, in order.

    Made by `chain`. Modules that only reshape (Flatten, Identity, inactive Dropout) are no stages: they run with the
    stage that follows them, or with the last one.

    Attributes
    ----------
    stages : tuple of Stage
        The operators, the one next to the input first.
    in_shape, out_shape : tuple of int
        Without the batch axis.
    """

    def __init__(
        self, module: nn.Module, stages: Sequence[Stage], in_shape: tuple[int, ...], out_shape: tuple[int, ...]
    ) -> None:
        self.module = module
        self.stages = tuple(stages)
        self.in_shape, self.out_shape = in_shape, out_shape

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def run(self, x: torch.Tensor, *, trains: bool = True) -> list[Record]:
        """Forward for a batch: what each stage computed, with a graph of its own; of parameters too where it trains."""
        check_input("x", x, self.in_shape)
        records: list[Record] = []
        state: dict[Any, Any] = {TRAINS: trains}
        for stage in self.stages:
            try:
                records.append(stage.run(x, state))
            except RuntimeError as error:
                _check_devices(stage, x, error)
                raise
            x = records[-1].output
        return records

    @property
    def factors(self) -> list[Pattern | Region]:
        """Of each stage the transposed Jacobian, as what counts ask of it."""
        return [stage.factor() for stage in self.stages]

    @functools.cached_property
    def order(self) -> Order:
        """In which order `jacobian` multiplies: the one of least predicted cost; of at least one stage."""
        return best_order(self.stages)

    @functools.cached_property
    def _accumulated(self) -> tuple[Accumulation, int | None]:
        return accumulated(self.stages, self.order)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Of the whole module's transposed Jacobian, ``(in_size, out_size)``."""
        rows, columns = math.prod(self.in_shape), math.prod(self.out_shape)
        if not len(self):
            return Pattern.of(Identity(rows))
        accumulation, result = self._accumulated
        if result is not None:
            return accumulation.matrices[result].pattern
        return empty_pattern(rows, columns)

    def jacobian(self, x: torch.Tensor) -> SparseJacobian:
        """The whole module's Jacobian at each sample of a batch; of batch 1 where all share the values."""
        chain, records = self.adapted(self.run(x, trains=False))
        return chain._jacobian(x, records)

    def _jacobian(self, x: torch.Tensor, records: Sequence[Record]) -> SparseJacobian:
        if len(records) == 1:
            return records[0].jacobian()
        if not len(self):
            return SparseJacobian(self.pattern, x.new_ones((self.pattern.nnz, 1)))
        accumulation, result = self._accumulated
        if result is None:
            return SparseJacobian(self.pattern.T, x.new_empty((0, len(x))))
        values = accumulation.run(
            result,
            lambda key: records[key[0]].values(key[1]),
            lambda span, matrix: pull_back_all(records[span[0] : span[1] + 1], matrix),
        )
        return SparseJacobian(self.pattern, values).T

    def adapted(self, records: Sequence[Record]) -> tuple[Chain, list[Record]]:
        """A chain whose patterns hold for the weights that made these records, and the records as its own."""
        own = [record.adapted() for record in records]
        if all(new is old for new, old in zip(own, records, strict=True)):
            return self, own
        return Chain(self.module, [record.stage for record in own], self.in_shape, self.out_shape), own

    def __repr__(self) -> str:
        lines = [f"<Chain of {len(self)} stages, {self.in_shape} to {self.out_shape}>"]
        lines += [
            f"  {stage.path}: {stage.name} {stage.in_shape} to {stage.out_shape}, {stage.pattern.T.summary()}"
            for stage in self.stages
        ]
        return "\n".join(lines)


def chain(
    module: nn.Module, input_shape: Sequence[int], *, pruned: bool = True, like: torch.Tensor | None = None
) -> Chain:
    """The chain of a module's operators.

    Parameters
    ----------
    module : Module
        Of operators that have a rule: ``nn.Sequential`` of them is taken as it is, everything else is traced.
    input_shape : sequence of int
        Of the input, without the batch axis.
    pruned : bool
        Whether patterns leave out pruned weights: those that a mask of ``torch.nn.utils.prune`` removes and, without a
        mask, those that are exactly zero.
    like : Tensor, optional
        Of the input's dtype, on its device: where a module without parameters asks for them.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule; the message begins with its path in the model.
    TypeError
        Where `module` is no Module.
    ValueError
        Where the input shape does not fit, or a parameter is neither on the CPU nor on a CUDA device.

    Examples
    --------
    >>> from torch import nn
    >>> [stage.path for stage in chain(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), (3, 8, 8))]
    ['0', '1']
    """
    check_module(module)
    shape = check_shape(input_shape)
    in_shape = shape
    stages: list[Stage] = []
    waiting: list[tuple[str, nn.Module]] = []
    for path, leaf in _leaves(module, ""):
        for name, parameter in leaf.named_parameters():
            if parameter.device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"{path}.{name} is on {parameter.device}; this runs on CPUs and CUDA: move it with .cpu()"
                )
        start = stages[-1].out_shape if stages else in_shape
        if not is_known(leaf):
            traced = traced_stages(leaf, shape, "" if leaf is module else path, pruned=pruned, like=like)
            if waiting:
                # What only reshapes runs by itself, as nothing that follows is a module.
                traced = [_reshaping(waiting, start, shape), *traced]
                waiting = []
            stages += traced
            shape = stages[-1].out_shape if stages else shape
            continue
        with undrawn():
            current = twin(leaf, aside=True)
            refresh_weights(current)
        call = call_of(current, shape, path=path)
        waiting.append((path, leaf))
        shape = tuple(call.out_shape[1:])
        if not is_inactive(leaf):
            edge = Edge("input", "output", call)
            edge.rule.check(call)
            if pruned:
                edge = edge.keeping([Kept.of(current, name) for name in edge.rule.weights])
            stages.append(ModuleStage(path, start, shape, (edge,), "input", "output", tuple(waiting), leaf))
            waiting = []
    if waiting and stages:
        last = stages[-1]
        if isinstance(last, ModuleStage):
            stages[-1] = replace(last, modules=(*last.modules, *waiting), out_shape=shape)
        else:
            stages.append(_reshaping(waiting, last.out_shape, shape))
    return Chain(module, stages, in_shape, shape)


@dataclass
class _Kept:
    """A chain that was made before: it runs a twin of the module, which is gone when its user lets go of it."""

    module: weakref.ref[nn.Module]
    key: tuple[Any, ...]
    tensors: list[torch.Tensor]
    chain: Chain


#: The last ones, by the module's ``id``.
_KEPT: OrderedDict[int, _Kept] = OrderedDict()
_MOST = 8


def kept_chain(
    module: nn.Module, input_shape: Sequence[int], *, pruned: bool = True, like: torch.Tensor | None = None
) -> Chain:
    """As `chain`; the one of an earlier call, plans and all, where nothing has changed since, weights included.

    Its parameters are the module's, but those of parametrisations are not: it is for values, not for gradients of them.
    """
    if not all(map(_keepable, parts_of(check_module(module)))):
        return chain(module, input_shape, pruned=pruned, like=like)
    tensors = list(tensors_of(module))
    if any(tensor.is_inference() for tensor in tensors):
        return chain(module, input_shape, pruned=pruned, like=like)
    versions = tuple((id(tensor), tensor._version) for tensor in tensors)
    key = (check_shape(input_shape), pruned, fingerprint(module, like), versions)
    kept = _KEPT.get(id(module))
    if kept is None or kept.module() is not module or kept.key != key:
        made = chain(twin(module), input_shape, pruned=pruned, like=like)
        number = id(module)
        kept = _Kept(weakref.ref(module, lambda _: _KEPT.pop(number, None)), key, tensors, made)
        _KEPT[number] = kept
        while len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    return kept.chain


def _keepable(part: nn.Module) -> bool:
    """Whether a module has nothing that a twin of it would not follow: hooks, and weights that it would make once."""
    return not has_own_hooks(part) and not parametrize.is_parametrized(part)


def _reshaping(
    waiting: Sequence[tuple[str, nn.Module]], in_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> Stage:
    """A stage of modules that only reshape, where there is no operator beside them to run with."""
    path, last = waiting[-1]
    call = Call("aten.identity", {}, (1, *in_shape), (1, *out_shape), path)
    return ModuleStage(
        path, in_shape, out_shape, (Edge("input", "output", call),), "input", "output", tuple(waiting), last
    )


def _leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that nn.Sequential, nested at will, runs, with their paths."""
    if is_known(module) or not isinstance(module, nn.Sequential) or not runs_as(module, nn.Sequential):
        yield path or type(module).__name__, module
        return
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise UnsupportedOperatorError(
            f"{path or type(module).__name__}: hooks of a container are not run; register them on the modules inside"
        )
    # Not named_children, which gives a module that is used twice only once.
    for name, child in module._modules.items():
        if child is not None:
            yield from _leaves(child, f"{path}.{name}" if path else name)


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as a tuple, where it is the shape of a sample.

    Raises
    ------
    ValueError
        Where it is no sequence of integers of at least 1.
    """
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"input_shape is {_said(shape)}; expected the sizes of one sample, without the batch, each at least 1"
        )
    return sizes


def _said(shape: object) -> str:
    return f"a tensor: give x.shape[1:] of {tuple(shape.shape)}" if isinstance(shape, torch.Tensor) else repr(shape)


def _check_devices(stage: Stage, x: torch.Tensor, error: RuntimeError) -> None:
    """ValueError in the place of `error` where a stage's weights are not where its input is."""
    for edge in stage.edges:
        for name, value in edge.call.arguments.items():
            if isinstance(value, torch.Tensor) and value.device != x.device:
                raise ValueError(
                    f"{edge.call.path}.{name} is on {value.device} and the input on {x.device}; move one of them"
                ) from error


def check_input(name: str, x: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """`x` where it is a batch that this library can work on.

    Raises
    ------
    TypeError
        Where it is no tensor of float32 or float64.
    ValueError
        Where its shape or device does not fit.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} is {x.dtype}; expected float32 or float64: convert it with {name}.float()")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {x.device}; this runs on CPUs and CUDA: move it, and the module, with .cpu()")
    if torch.is_inference_mode_enabled() or x.is_inference():
        raise RuntimeError(f"{name} has no gradient in torch.inference_mode; use torch.no_grad instead")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; expected a dense tensor: {name}.to_dense()")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, *sample)")
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, {', '.join(map(str, shape))})")
    return x
