"""A module as a chain of stages: what back-propagation goes through, one after the other."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ._accumulation import Accumulation, Region, empty_pattern
from ._backward import has_hooks
from ._jacobian import SparseJacobian
from ._memory import check_size
from ._modules import check_module, tensors_of, undisturbed, without_autocast
from ._order import Order, accumulated, best_order
from ._pruned import Kept, mask_of
from ._stages import Edge, Record, Stage, pull_back_all, working
from .patterns import Call, Identity, Pattern, UnsupportedOperatorError
from .tracing import Operation, Program, Recording, contents_of, is_users, key_of, program_of, record

__all__ = [
    "Chain",
    "Chains",
    "Record",
    "Run",
    "Stage",
    "chain",
    "check_input",
    "check_shape",
    "recent_chains",
    "recorded",
    "samples_of",
]


class Chain:
    """The stages of a module, in order.

    Made by `chain`. Operators that only reshape are no stages: they run with the stage that follows them, or with the
    last one.

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

    def records(self, recording: Recording) -> tuple[Chain, list[Record]]:
        """What each stage did in a run; of a chain whose patterns hold for the weights of that run."""
        records = [Record(stage, recording).adapted() for stage in self.stages]
        stages = [own.stage for own in records]
        if all(one is other for one, other in zip(stages, self.stages, strict=True)):
            return self, records
        return Chain(self.module, stages, self.in_shape, self.out_shape), records

    def run(self, x: torch.Tensor) -> list[Record]:
        """Run the module on a batch: what each stage did, with patterns that hold for this run."""
        check_input("x", x, self.in_shape)
        return Chains(self.module).of(x)[1].records

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

    def jacobian(self, records: Sequence[Record], x: torch.Tensor) -> SparseJacobian:
        """The whole module's Jacobian at each sample of a batch; of batch 1 where all share the values."""
        refuse_hooks(records)
        if len(self):
            batch = 1 if all(stage.shared for stage in self.stages) else len(x)
            check_size(type(self.module).__name__, self.stages, batch * x.element_size(), x.device)
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
        It is run once, on a few random samples; what that changes in it is undone.
    input_shape : sequence of int
        Of the input, without the batch axis.
    pruned : bool
        Whether patterns leave out pruned weights: those that a mask of ``torch.nn.utils.prune`` removes and, without a
        mask, those that are exactly zero, where leaving them out pays.
    like : Tensor, optional
        Of the input's dtype, on its device: where a module without parameters asks for them.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule, or what runs depends on what the input holds; the message begins with its path.
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
    x = samples_of(module, check_shape(input_shape), like)
    with undisturbed(module):
        recording = recorded(module, x, readable=False)
        with without_autocast(x.device):
            made = made_of(recording, pruned=pruned)
        refuse_hooks(made.records(recording)[1])
    for edge in (edge for stage in made for edge in stage.edges):
        if edge.call.sources is not None and edge.call.sources.rows > 1:
            raise edge.call.unsupported(
                f"{edge.call.operator} mixes the samples of a batch: it moves the elements of each in another way",
                "each sample must be worked on alike where no input is given",
            )
    return made


def refuse_hooks(records: Sequence[Record]) -> None:
    """Raise where a backward hook may make another derivative than the operators' own."""
    for own in records:
        if has_hooks(own, of_nodes=True):
            raise UnsupportedOperatorError(
                f"{own.stage.path}: a backward hook, of a module, a tensor or a node of autograd's graph, may change "
                "gradients, so that the Jacobian is not the operators'; remove it"
            )


#: Samples by which a module is looked at where no input is given: one would show nothing of how they are kept apart.
SAMPLES = 3


def samples_of(module: nn.Module, shape: tuple[int, ...], like: torch.Tensor | None = None) -> torch.Tensor:
    """Random samples of the module's dtype, on its device; where it has neither, as `like`."""
    own = (tensor for tensor in tensors_of(module) if tensor.is_floating_point())
    like = next(own, torch.empty(0) if like is None else like)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((SAMPLES, *shape), generator=generator)
    return drawn if like.device.type == "meta" else drawn.to(like)


def recorded(module: nn.Module, x: torch.Tensor, *, readable: bool = True) -> Recording:
    """A forward pass of a module, its errors told in the user's words.

    Raises
    ------
    ValueError
        Where the input does not fit, or a parameter is elsewhere.
    TypeError
        Where parameters are of another dtype than the input.
    """
    try:
        return record(module, x, readable=readable)
    except (UnsupportedOperatorError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _check_alike(module, name, tensor, x, error)
        where, shape, part = _failed(module, error, x)
        what = type(part).__name__ if part._modules else str(part)
        raise ValueError(
            f"{where}: an input of shape {shape} does not fit {what}{_source_of(error)}: {error}"
        ) from error


def _check_alike(module: nn.Module, name: str, tensor: torch.Tensor, x: torch.Tensor, error: Exception) -> None:
    """Raise where a parameter or buffer is not of the input's dtype, or elsewhere: why a forward pass has failed."""
    where = name if "." in name else f"{type(module).__name__}.{name}"
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where} is on {tensor.device}; this runs on CPUs and CUDA: move it with .cpu()") from error
    if tensor.device != x.device:
        raise ValueError(f"{where} is on {tensor.device}, its input on {x.device}; move one of them") from error
    if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != x.dtype:
        raise TypeError(f"{where} is {tensor.dtype}, its input {x.dtype}; convert one of them") from error


def _failed(module: nn.Module, error: BaseException, x: torch.Tensor) -> tuple[str, tuple[int, ...], nn.Module]:
    """The innermost module in which an error was raised: its path, the shape of its sample, and itself."""
    paths = {id(part): name for name, part in module.named_modules()}
    where, shape, found = type(module).__name__, tuple(x.shape[1:]), module
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is nn.Module._call_impl.__code__:
            part, args = frame.f_locals["self"], frame.f_locals["args"]
            if id(part) in paths and args and isinstance(args[0], torch.Tensor):
                where, shape, found = paths[id(part)] or type(part).__name__, tuple(args[0].shape[1:]), part
    return where, shape, found


def _source_of(error: BaseException) -> str:
    """The last line of the user's own code that an error came through, as in `` at net.py, line 7``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename) and Path(frame.filename).is_file():
            return f" at {frame.filename}, line {frame.lineno} ({(frame.line or '').strip()})"
    return ""


class Run(NamedTuple):
    """A forward pass: the whole, and what each stage of a chain did."""

    recording: Recording
    records: list[Record]


class Chains:
    """The chains of one module that earlier calls have made, found again by what runs.

    Parameters
    ----------
    module : Module
        It is run at each call: what it does then decides.
    pruned : bool
        As in `chain`.
    """

    #: How many are kept.
    most = 8

    def __init__(self, module: nn.Module, *, pruned: bool = True) -> None:
        self._module = weakref.ref(module)
        self.pruned = pruned
        self._chains: OrderedDict[Hashable, list[tuple[list[torch.Tensor], Chain]]] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def module(self) -> nn.Module | None:
        """The module, as long as it lives."""
        return self._module()

    def of(self, x: torch.Tensor) -> tuple[Chain, Run]:
        """The chain of what the module does with a batch, and what it did."""
        module = self._module()
        assert module is not None
        check_shape(x.shape[1:])
        recording = recorded(module, x)
        chain, records = self.matching(recording)
        return chain, Run(recording, records)

    def matching(self, recording: Recording) -> tuple[Chain, list[Record]]:
        """The chain of a run, one that was made before where the same has run; and what each of its stages did."""
        key, contents = key_of(recording), contents_of(recording)
        with self._lock, without_autocast(recording.input.device):
            return self._matching(recording, key, contents)

    def _matching(
        self, recording: Recording, key: Hashable, contents: list[torch.Tensor]
    ) -> tuple[Chain, list[Record]]:
        known = self._chains.setdefault(key, [])
        self._chains.move_to_end(key)
        while len(self._chains) > self.most:
            self._chains.popitem(last=False)
        for place, (own, chain) in enumerate(known):
            if all(torch.equal(one, other) for one, other in zip(own, contents, strict=True)):
                # Weights that were zero when the patterns were made may have moved since.
                adapted, records = chain.records(recording)
                known[place] = own, adapted
                return adapted, records
        made = made_of(recording, pruned=self.pruned)
        known.append(([tensor.detach().clone() for tensor in contents], made))
        del known[: -self.most]
        return made.records(recording)


#: Those of the modules that `jacobian` was called with last, by ``id``.
_RECENT: OrderedDict[int, tuple[weakref.ref[nn.Module], dict[bool, Chains]]] = OrderedDict()
_MOST = 8


def _forget(recent: OrderedDict[int, Any], number: int, _: object) -> None:
    recent.pop(number, None)


def recent_chains(module: nn.Module, *, pruned: bool) -> Chains:
    """The chains that earlier calls have made of a module."""
    number = id(module)
    known = _RECENT.get(number)
    if known is None or known[0]() is not module:
        known = _RECENT[number] = (weakref.ref(module, functools.partial(_forget, _RECENT, number)), {})
        while len(_RECENT) > _MOST:
            _RECENT.popitem(last=False)
    return known[1].setdefault(pruned, Chains(module, pruned=pruned))


def made_of(recording: Recording, *, pruned: bool = True) -> Chain:
    """The chain of a recording.

    Raises
    ------
    UnsupportedOperatorError, TypeError
        As `program_of` does, and where the output has no samples along its first axis.
    """
    module, x, y = recording.module, recording.input, recording.output
    name, in_shape = type(module).__name__, tuple(x.shape[1:])
    if recording.last is None:
        raise UnsupportedOperatorError(f"{name}: no operator that was seen leads from its input to its output")
    if not y.ndim or y.shape[0] != len(x):
        raise _without_samples(recording)
    out_shape = tuple(y.shape[1:])
    program = program_of(recording)
    if program.operations and program.layouts[program.output] != program.layouts[0]:
        raise _without_samples(recording)
    if recording.last.vertex and not program.operations:
        # No derivative passes.
        stage = Stage(name, in_shape, out_shape, (), 0, program.output, program)
        return Chain(module, [stage], in_shape, out_shape)
    return Chain(module, _stages(program, recording, pruned), in_shape, out_shape)


def _without_samples(recording: Recording) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{type(recording.module).__name__}: its output of shape {tuple(recording.output.shape)} for "
        f"{len(recording.input)} samples does not have them along its first axis; permute it"
    )


def _stages(program: Program, recording: Recording, pruned: bool) -> list[Stage]:
    stages: list[Stage] = []
    start, *cuts = program.cuts(program.layouts[0])
    for stop in cuts:
        operations = program.between(start, stop)
        edges = tuple(
            _edge(program, recording, operation, name, pruned)
            for operation in operations
            for name in operation.operands
        )
        # Paths that meet add up: two identities are no identity.
        meet = len({edge.target for edge in edges}) < len(edges)
        if not meet and all(isinstance(edge.pattern.structure, Identity) for edge in edges):
            if stop != cuts[-1]:
                # What only reshapes runs with the stage that follows.
                continue
            if stages:
                # Or with the one before.
                last = stages.pop()
                edges, start = (*last.edges, *edges), last.start
            elif not any(
                operation.hooked or recording.externals_of(recording.invocations[operation.place], operation.operands)
                for operation in operations
            ):
                return []
        out_shape = program.shapes[stop][1:]
        path = _path(edges, program, {stage.path for stage in stages})
        stages.append(Stage(path, program.shapes[start][1:], out_shape, edges, start, stop, program))
        start = stop
    return stages


def _path(edges: Sequence[Edge], program: Program, taken: set[str]) -> str:
    """Where a stage is in the model: what the paths of its operations have in common, and more where that is taken."""
    operations = [program.operations[edge.target] for edge in working(edges) or edges]
    paths = zip(*(operation.path.split(".") for operation in operations), strict=False)
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, paths)]
    path = ".".join(common) or operations[-1].path.rpartition(".")[0] or operations[-1].path
    name = operations[-1].name.partition(".")[2]
    candidates = [path, f"{path}:{name}", *(f"{path}:{name}:{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def _edge(program: Program, recording: Recording, operation: Operation, argument: str, pruned: bool) -> Edge:
    source = operation.operands[argument]
    call = Call(
        operation.name,
        {name: value for name, value in operation.arguments.items() if name != argument},
        program.shapes[source],
        program.shapes[operation.vertex],
        operation.path,
        operation.source,
        argument=argument,
        batched=frozenset(operation.layouts.keys() - {argument} - operation.alike),
        dependent=operation.dependent - {argument},
        sources=operation.sources.get(argument),
        function=operation.evaluate,
    )
    edge = Edge(source, operation.vertex, call)
    edge.rule.check(call)
    weights = [
        name
        for name in edge.rule.pruned_arguments(call)
        if name not in call.dependent | call.batched | operation.layouts.keys()
    ]
    invocation = recording.invocations[operation.place]
    arguments = invocation.arguments
    # What was drawn is no guaranteed zero, nor is what was written after it was used.
    sure = [name for name in weights if not recording.drawn(arguments[name]) and not invocation.is_stale(name)]
    if pruned and sure:
        edge = edge.keeping([Kept(name, arguments[name], mask_of(recording, arguments[name])) for name in sure])
    return edge


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
    if isinstance(shape, torch.Tensor):
        return f"a tensor: give x.shape[1:] of {tuple(shape.shape)}"
    return repr(tuple(shape) if isinstance(shape, torch.Size) else shape)


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
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
        raise TypeError(f"{name} is within a transform of torch.func, as grad or vmap; call the module itself there")
    if type(x) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise TypeError(f"{name} is a {type(x).__name__}; expected a plain tensor: {name}.as_subclass(torch.Tensor)")
    if x.dtype not in (torch.float32, torch.float64):
        remedy = "give real and imaginary parts" if x.is_complex() else f"convert it with {name}.float()"
        if not x.is_floating_point() and not x.is_complex():
            remedy += ", or give, in the place of indices, what their embedding makes of them"
        raise TypeError(f"{name} is {x.dtype}; expected float32 or float64: {remedy}")
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
