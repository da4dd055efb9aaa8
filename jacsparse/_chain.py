"""A module as a chain of stages: what back-propagation goes through, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from torch import nn

from ._jacobian import SparseJacobian
from ._modules import Kept, arguments_of, call_of, is_inactive, is_known, refresh_weights, twin, undrawn
from .patterns import Call, Pattern, Rule, UnsupportedOperatorError, rule_for

__all__ = ["Chain", "Record", "Stage", "chain", "check_input", "check_shape"]


@dataclass(frozen=True)
class Stage:
    """One operator of a chain, with the modules around it that only reshape.

    Attributes
    ----------
    path : str
        Of the operator in the model, as in ``features.0``.
    modules : tuple of (str, Module)
        What runs, in order, with paths; one of them is the operator.
    operator : Module
        The one that computes.
    in_shape, out_shape : tuple of int
        Of the stage, without the batch axis.
    call : Call
        The operator's, while only shapes are known.
    kept : tuple of Kept
        The weights of which the pattern leaves some out.
    """

    path: str
    modules: tuple[tuple[str, nn.Module], ...]
    operator: nn.Module
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    call: Call
    kept: tuple[Kept, ...] = ()

    @functools.cached_property
    def rule(self) -> Rule:
        """How the operator's pattern and values are made."""
        return rule_for(self.call)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Of the transposed Jacobian, ``(in_size, out_size)``."""
        return self.rule.pattern(self.call).T

    def run(self, x: torch.Tensor) -> Record:
        """The stage's output for a batch, with a graph of its own: nothing before `x` is reached from it.

        Raises
        ------
        RuntimeError
            Where a hook changes what a module takes or gives: the operator's Jacobian would be another one.
        """
        # Parameters of the record's own: the user's hooks on theirs are for autograd to call, once, not for the stage.
        self._check_alike(x)
        own = {
            id(parameter): parameter.detach().requires_grad_()
            for parameter in self.operator.parameters()
            if parameter.requires_grad
        }
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = operator_input = operator_output = leaf
            hooked, arguments = False, {}
            for path, module in self.modules:
                # An in-place operator would overwrite the stage's input, which the stage before may need.
                given = y.clone() if getattr(module, "inplace", False) else y
                running = twin(module, own)
                y = _called(running, given, path)
                hooked |= _pulls(running, y)
                if module is self.operator:
                    operator_input, operator_output, arguments = given, y, arguments_of(running)
        if y.dtype != x.dtype:
            raise TypeError(f"{self.path} makes {y.dtype} of {x.dtype}; run it outside torch.autocast")
        return Record(self, leaf, y, own, operator_input, operator_output, arguments, hooked)

    def _check_alike(self, x: torch.Tensor) -> None:
        for name, tensor in (*self.operator.named_parameters(), *self.operator.named_buffers()):
            if tensor.device != x.device:
                raise ValueError(f"{self.path}.{name} is on {tensor.device}, its input on {x.device}; move one of them")
            if tensor.is_floating_point() and tensor.dtype != x.dtype:
                raise TypeError(f"{self.path}.{name} is {tensor.dtype}, its input {x.dtype}; convert one of them")

    def keeping(self, kept: Sequence[Kept]) -> Stage:
        """The same stage with a pattern that leaves out what these weights do."""
        some = tuple(weight for weight in kept if not bool(weight.mask.all()))
        return replace(self, call=replace(self.call, kept={weight.name: weight.mask for weight in some}), kept=some)

    def __repr__(self) -> str:
        return f"<Stage {self.path}: {self.call.operator}, {self.in_shape} to {self.out_shape}>"


def _called(module: nn.Module, x: torch.Tensor, path: str) -> torch.Tensor:
    """``module(x)``, hooks and all, where no hook changes what goes in or comes out."""
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    forward = module.forward

    def look(taken: torch.Tensor) -> torch.Tensor:
        output = forward(taken)
        seen.append((taken, output, output._version))
        return output

    module.forward = look
    y = module(x)
    taken, given, version = seen[0]
    if not _same(taken, x) or not _same(given, y) or y._version != version:
        raise RuntimeError(
            f"{path}: a forward hook changes the module's input or output, so its Jacobian is not the operator's; "
            "make the change in a module of its own"
        )
    return y


def _pulls(module: nn.Module, y: torch.Tensor) -> bool:
    """Whether a hook is run when a gradient passes through the module."""
    everywhere = nn.modules.module
    hooks = (module._backward_hooks, module._backward_pre_hooks, y._backward_hooks)
    return any((*hooks, everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one, or one is the other as PyTorch's backward hooks wrap it."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


@dataclass
class Record:
    """What a stage computed for one batch.

    Attributes
    ----------
    input, output : Tensor
        ``(batch, *shape)``; a graph leads from one to the other and to the stage's parameters.
    parameters : dict of int to Tensor
        The graph's own parameters, by the ``id`` of the module's; those that train.
    """

    stage: Stage
    input: torch.Tensor
    output: torch.Tensor
    parameters: dict[int, torch.Tensor] = field(repr=False)
    _operator_input: torch.Tensor = field(repr=False)
    _operator_output: torch.Tensor = field(repr=False)
    #: The operator's arguments: its weights as pruning hooks and parametrisations made them for this forward.
    _arguments: dict[str, Any] = field(repr=False)
    #: Whether a hook sees gradients on their way through.
    hooked: bool = False

    def __post_init__(self) -> None:
        # No derivative depends on what is only added.
        self._versions = {
            name: value._version
            for name, value in self._arguments.items()
            if isinstance(value, torch.Tensor) and name not in ("bias", "running_mean")
        }

    def adapted(self) -> Record:
        """The same record, of a stage whose pattern leaves out what is zero in the weights of this forward."""
        if all(kept.holds(self._arguments[kept.name]) for kept in self.stage.kept):
            return self
        # Masks are in the stage's key: what does not hold is what was zero by chance.
        kept = [Kept(name, self._arguments[name], None) for name in self.stage.rule.weights]
        return replace(self, stage=self.stage.keeping(kept))

    @property
    def batch(self) -> int:
        """Samples."""
        return self.input.shape[0]

    def vjp(self, gradient: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` for each sample, ``(batch, *out_shape)`` to ``(batch, *in_shape)``: the operator's own backward."""
        return self.pull_back(gradient, (), for_input=True)[0]

    def pull_back(
        self, gradient: torch.Tensor, parameters: Sequence[int], *, for_input: bool
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Gradients of the input and of parameters (equation 2.2), for a gradient of the output.

        Parameters
        ----------
        gradient : Tensor, (batch, *out_shape)
            Of the output.
        parameters : sequence of int
            Which, by the ``id`` of the module's.
        for_input : bool
            Whether the input's is wanted too; it is empty otherwise.
        """
        wanted = [*([self.input] if for_input else []), *(self.parameters[key] for key in parameters)]
        if not wanted:
            return gradient.new_empty(0), {}
        found = torch.autograd.grad(
            self.output, wanted, gradient.reshape(self.output.shape), retain_graph=True, materialize_grads=True
        )
        own = found[1:] if for_input else found
        return found[0] if for_input else gradient.new_empty(0), dict(zip(parameters, own, strict=True))

    def jacobian(self) -> SparseJacobian:
        """``J`` for the whole batch."""
        return self._filled(self.stage.pattern.T, self.stage.rule.values, slice(None))

    def transposed_jacobian(self, samples: slice = slice(None)) -> SparseJacobian:
        """``J.T`` for a slice of the batch."""
        return self._filled(self.stage.pattern, self.stage.rule.transposed_values, samples)

    def _filled(
        self, pattern: Pattern, values: Callable[[Call, Pattern], torch.Tensor], samples: slice
    ) -> SparseJacobian:
        try:
            return SparseJacobian(pattern, values(self._call(samples), pattern))
        except torch.OutOfMemoryError as error:
            rows, columns = pattern.shape
            raise torch.OutOfMemoryError(f"{self.stage.path}, {rows:,} × {columns:,}: {error}") from error

    def winners(self, samples: slice = slice(None)) -> torch.Tensor | None:
        """For a stage that selects, what it selects: int32, ``(windows, batch)``."""
        return self.stage.rule.selection(self._call(samples))

    def _call(self, samples: slice) -> Call:
        stage = self.stage
        for name, version in self._versions.items():
            if self._arguments[name]._version != version:
                raise RuntimeError(
                    f"{stage.path}.{name} was changed in place between forward and backward; run the forward again"
                )
        for kept in stage.kept:
            if not kept.holds(self._arguments[kept.name]):
                raise RuntimeError(
                    f"{stage.path}.{kept.name}: weights that were pruned or zero when the pattern was made are not "
                    "zero any more; make the chain again, keep them zero by a mask (torch.nn.utils.prune), or pass "
                    "pruned=False"
                )
        given, made = self._operator_input.detach(), self._operator_output.detach()
        whole = samples == slice(None)
        return replace(
            stage.call,
            arguments=self._arguments,
            input=given if whole else given[samples],
            output=made if whole else made[samples],
            node=self._operator_output.grad_fn if whole else None,
            vjp=lambda gradient: self._operator_vjp(gradient, samples),
        )

    def _operator_vjp(self, gradient: torch.Tensor, samples: slice) -> torch.Tensor:
        # The graph holds the whole batch; samples do not mix, so the others may have any gradient.
        whole = gradient.new_zeros(self.output.shape)
        whole[samples] = gradient.reshape(whole[samples].shape)
        return self.vjp(whole)[samples]


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

    def run(self, x: torch.Tensor) -> list[Record]:
        """Forward for a batch: what each stage computed, each with a graph of its own."""
        check_input("x", x, self.in_shape)
        records: list[Record] = []
        for stage in self.stages:
            try:
                records.append(stage.run(x))
            except RuntimeError as error:
                _check_devices(stage, x, error)
                raise
            x = records[-1].output
        return records

    def adapted(self, records: Sequence[Record]) -> tuple[Chain, list[Record]]:
        """A chain whose patterns hold for the weights that made these records, and the records as its own."""
        own = [record.adapted() for record in records]
        if all(new is old for new, old in zip(own, records, strict=True)):
            return self, own
        return Chain(self.module, [record.stage for record in own], self.in_shape, self.out_shape), own

    def __repr__(self) -> str:
        lines = [f"<Chain of {len(self)} stages, {self.in_shape} to {self.out_shape}>"]
        lines += [
            f"  {stage.path}: {stage.call.operator} {stage.in_shape} to {stage.out_shape}, {stage.pattern.T.summary()}"
            for stage in self.stages
        ]
        return "\n".join(lines)


def chain(module: nn.Module, input_shape: Sequence[int], *, pruned: bool = True) -> Chain:
    """The chain of a module's operators.

    Parameters
    ----------
    module : Module
        A single operator, or ``nn.Sequential``, nested at will.
    input_shape : sequence of int
        Of the input, without the batch axis.
    pruned : bool
        Whether patterns leave out pruned weights: those that a mask of ``torch.nn.utils.prune`` removes and, without a
        mask, those that are exactly zero.

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
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module")
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
        with undrawn():
            current = twin(leaf, aside=True)
            refresh_weights(current)
        call = call_of(current, shape, path=path)
        waiting.append((path, leaf))
        if not is_inactive(leaf):
            rule = rule_for(call)
            start = stages[-1].out_shape if stages else in_shape
            stage = Stage(path, tuple(waiting), leaf, start, call.out_shape, call)
            if pruned:
                stage = stage.keeping([Kept.of(current, name) for name in rule.weights])
            rule.check(stage.call)
            stages.append(stage)
            waiting = []
        shape = call.out_shape
    if waiting and stages:
        last = stages[-1]
        stages[-1] = replace(last, modules=(*last.modules, *waiting), out_shape=shape)
    return Chain(module, stages, in_shape, shape)


def _leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that nn.Sequential, nested at will, runs, with their paths."""
    if is_known(module) or type(module).forward is not nn.Sequential.forward:
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
            f"input_shape is {shape!r}; expected the sizes of one sample, without the batch, each at least 1"
        )
    return sizes


def _check_devices(stage: Stage, x: torch.Tensor, error: RuntimeError) -> None:
    """ValueError in the place of `error` where a stage's weights are not where its input is."""
    for name, value in stage.call.arguments.items():
        if isinstance(value, torch.Tensor) and value.device != x.device:
            raise ValueError(
                f"{stage.path}.{name} is on {value.device} and the input on {x.device}; move one of them"
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
