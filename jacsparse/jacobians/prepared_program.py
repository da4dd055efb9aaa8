"""What was decided for a prepared Jacobian, and one evaluation of it at other arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree

from ..patterns import Pattern, requiring_gradient
from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..stages import Edge, chain_of
from ..tracing import (
    Comparisons,
    Form,
    PrunedWeight,
    Trace,
    Value,
    check_outside_transforms,
    form_of,
    name_of,
    without_autocast,
)
from .arguments import Arguments
from .differentiable import connected_to, with_gradients
from .evaluator import Evaluator
from .fused_values import FusedValues
from .options import Options
from .tracing_for_replays import TracedProgram, contents_of

#: The values of a call, the result of the function where it is asked for, and what that returned beside it.
Evaluated = tuple[torch.Tensor, Any, Any]


_LOGGER = logging.getLogger("jacsparse")


def tell_of_programs(name: str, count: int) -> None:
    """Log that constants among the arguments of a prepared Jacobian, or samples, make so many programs and more."""
    _LOGGER.warning(
        "%s: %d values of constants among the arguments, or numbers of samples, have made programs of their own, and "
        "each other one does, in a call that takes long: pass numbers that are not in static_argnums, objects that "
        "equal those of before, and as many samples",
        name,
        count,
    )


@dataclass(frozen=True, eq=False)
class PreparedProgram:
    """What was decided for arguments of one form, and for some of the numbers among them."""

    traced: TracedProgram
    evaluator: Evaluator
    #: The pruned weights that may differ between calls, without truth values that select: their elements are compared.
    watched: Sequence[tuple[Edge, PrunedWeight]]
    #: All entries, those of pruned weights too, where values are to have gradients.
    unpruned_pattern: Pattern | None
    #: Those of indices and masks on a GPU, by values.
    comparisons: Comparisons = field(default_factory=Comparisons)

    @classmethod
    def of(cls, traced: TracedProgram, evaluator: Evaluator, create_graph: bool) -> PreparedProgram:
        """Decide the rest, and let go of the elements of the run."""
        function = traced.function
        every = None
        if create_graph:
            every = function.pattern
            if function.chain.pruned_weights:
                every = chain_of(function.trace, pruned=False).pattern
        infos = function.graph.infos
        # Masks that select are compared with the other contents.
        watched = dict[Any, tuple[Edge, PrunedWeight]]()
        for edge in function.chain.edges:
            for weight in edge.omissions:
                value = edge.number_of(weight.name)
                if weight.floating and not infos[value].fixed:
                    # Looked at once, where several operators read it.
                    key = value, type(edge.rule), weight.mask.shape, weight.mask.numpy(force=True).tobytes()
                    watched.setdefault(key, (edge, weight))
        function.forget()
        return cls(traced, evaluator, list(watched.values()), every)

    def __call__(self, leaves: list[Any], returns: bool) -> Evaluated:
        """The values at the leaves of arguments of the same form, and what the function returned where asked for.

        Raises
        ------
        ValueError
            Where an index or a mask has other elements, or a parameter another form.
        RuntimeError
            Where a weight that the pattern leaves out is not zero.
        """
        captures = self._captures(leaves) if self.traced.captures else {}
        arguments, every = self.traced.arguments, self.unpruned_pattern
        connected = every is not None and self._have_gradients(leaves, captures)
        computed: torch.Tensor | None = None
        if (
            self._without_trace is not None
            and not returns
            and not connected
            and (not self.watched or self._hold(captures))
        ):
            computed, are_finite = self._without_trace({**captures, 0: arguments.memory_of(leaves)})
            if are_finite:
                return computed, None, None
        function, x = self.traced.function, arguments.with_leaves(leaves).flat(connected=connected)
        x = requiring_gradient(x) if connected else x
        before, traced_input = function.trace, x
        if connected:
            copy = x.detach().requires_grad_()
            traced_input = copy.view_as(copy)
        trace = Trace.replayed(function.graph, before.module, traced_input, captures, before.scalars)
        with torch.set_grad_enabled(connected), without_autocast(x.device):
            if connected:
                trace.gradient_edges[0] = get_gradient_edge(trace.input)
                known = {value: trace.elements(value) for value in function.inputs}
                trace.output, connected_values = function.connected_output(trace, known)
            with torch.no_grad():
                self._check_weights(trace)
                evaluator = self.evaluator
                values = evaluator.values(trace) if computed is None else evaluator.mended(computed, trace)
            if connected and every is not None:
                # In the place of those without gradients that the evaluator leaves.
                trace.copies |= connected_values
                values = with_gradients(SparseJacobian(self.evaluator.pattern, values), trace, x, every).values
                if returns:
                    trace.output, *kept = connected_to(x, trace, [trace.output, *connected_values.values()])
                    trace.copies |= zip(connected_values, kept, strict=True)
            return self._returned(trace, values, connected) if returns else (values, None, None)

    def described(self, arguments: Arguments, options: Options) -> str:
        """What was decided, in lines."""
        evaluator, count = self.evaluator, len(self.traced.contents)
        others = sum(not isinstance(source, int) for source in self.traced.captures.values())
        moved = evaluator.pattern.nnz * arguments.batch * arguments.tensors[0].element_size()
        samples = ", of any number of samples" if arguments.batched else ""
        switches = [name for name in ("create_graph", "value", "has_aux") if getattr(options, name)]
        return "\n".join(
            [
                f"  method {evaluator.name}{evaluator.details}: about {evaluator.flop:,} flop, "
                f"{evaluator.nbytes + moved:,} bytes" + "".join(f", {name}" for name in switches),
                *([f"  compiled: {evaluator.compiled}"] if options.compile else []),
                f"  arguments: {arguments}{samples}; other tensors: {others}",
                f"  baked in: shapes, branches, numbers that the function reads; indices, masks and integers: {count}",
            ]
        )

    def _have_gradients(self, leaves: Sequence[Any], captures: dict[int, torch.Tensor]) -> bool:
        """Whether the values of a call may have gradients."""
        read = (*(leaves[place] for place in self.traced.arguments.places), *captures.values())
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)

    def _captures(self, leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
        graph = self.traced.function.graph
        captures: dict[int, torch.Tensor] = {}
        for value, source in self.traced.captures.items():
            if isinstance(source, int):
                source = leaves[source]
            tensor = source if isinstance(source, torch.Tensor) else _found(source)
            form, has_gradient = graph.captures[value]
            if form_of(tensor) != form:
                tensor = _in_form(tensor, form, source)
            if (
                self.unpruned_pattern is not None
                and tensor.requires_grad
                and not has_gradient
                and torch.is_grad_enabled()
            ):
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} that the function reads requires a gradient, and did not "
                    "when this Jacobian was prepared: prepare it again"
                )
            captures[value] = tensor
        for value, contents in self.traced.contents.items():
            tensor = captures[value]
            compare = partial(_has_contents, tensor, contents)
            if not self.comparisons.outcome(value, tensor, compare):
                what = _name_of_source(self.traced.captures[value], "an index, a mask or other tensor")
                raise ValueError(
                    f"{what} of {tensor.dtype} {tuple(tensor.shape)} holds other elements than when "
                    "this Jacobian was prepared, which took them for constants, since patterns may depend on them: "
                    "prepare one for these"
                )
        check_outside_transforms(self.traced.function.trace.module, captures.values())
        return captures

    def _returned(self, trace: Trace, values: torch.Tensor, connected: bool) -> Evaluated:
        """The values with what the function returned, whose tensors may have gradients where values may."""
        output = self.traced.function.graph.last
        y = trace.output if connected else trace.elements(output.value)

        def of_this_call(leaf: Any) -> Any:
            leaf = trace.elements(leaf.number) if isinstance(leaf, Value) else leaf
            # It may share memory with an argument.
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

        returned = self.traced.returned
        return values, returned.result(y), _pytree.tree_map(of_this_call, returned.aux)

    def _hold(self, captures: dict[int, torch.Tensor]) -> bool:
        """Whether weights that are captures themselves are zero where the pattern leaves them out."""
        return all(
            weight.holds(edge.as_weight(weight.name, captures[edge.number_of(weight.name)]))
            for edge, weight in self.watched
        )

    def _check_weights(self, trace: Trace) -> None:
        """Raise where an element that the pattern leaves out is not zero in a call."""
        for edge, weight in self.watched:
            if edge.omits_zeros(weight, trace):
                continue
            # The parameters and buffers that the weight is computed from, or the shapes of other tensors.
            module, graph, value = trace.module, trace.graph, edge.number_of(weight.name)
            of_module = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
            tensors = [trace.tensor(each) for each in graph.captures if graph.made_of(value, {each})]
            names = [of_module.get(id(t), f"a tensor of shape {tuple(t.shape)}") for t in tensors]
            raise RuntimeError(
                f"{name_of(module)}: {' and '.join(names) or 'a weight'} was zero where the pattern leaves it out, and "
                "is not any more: prepare it again, keep the weight zero by a mask (torch.nn.utils.prune), or pass "
                "pruned=False"
            )

    @cached_property
    def _without_trace(self) -> FusedValues | None:
        """What computes the values without a trace; None where something has to be looked at in one."""
        fused, function = self.evaluator.fused, self.traced.function
        watched = {edge.number_of(weight.name) for edge, weight in self.watched}
        looks = watched - self.traced.captures.keys() or function.chain.registered_values
        return None if fused is None or looks or fused.reads - {0, *self.traced.captures} else fused


def _has_contents(tensor: torch.Tensor, contents: torch.Tensor) -> bool:
    return torch.equal(contents_of(tensor), contents)


def _name_of_source(source: Any, otherwise: str = "a tensor that the function reads") -> str:
    """The name of the parameter or buffer that a capture is, if it is one."""
    if isinstance(source, partial) and isinstance(source.func, attrgetter):
        return f"{name_of(source.args[0])}.{source.func.__reduce__()[1][0]}"
    return otherwise


def _found(source: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A parameter or buffer by its name; ValueError where there is none of this name by now."""
    try:
        tensor, problem = source(), ""
    except AttributeError as error:
        tensor, problem = torch.empty(0, device="cpu"), f"gone: {error}"
    if problem or not isinstance(tensor, torch.Tensor):
        problem = problem or f"{a_type(tensor)} by now"
        raise ValueError(f"a parameter or buffer that the function reads is {problem}; prepare one for this")
    return tensor


def _in_form(tensor: torch.Tensor, form: Form, source: Any) -> torch.Tensor:
    """A tensor as one that lies in memory as another one did; ValueError where that is no matter of layout."""
    shape, stride, layout, dtype, device = form
    if not tensor.ndim and form == form_of(tensor.to(device)):
        # PyTorch takes a tensor without axes from any device.
        return tensor.to(device)
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or layout != tensor.layout:
        raise ValueError(
            f"{_name_of_source(source)} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; this Jacobian is "
            f"prepared for {dtype} {tuple(shape)} on {device}: prepare one for these"
        )
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(tensor)
