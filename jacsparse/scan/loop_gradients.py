"""Gradients through loops: the Jacobians of all steps at once, a linear recurrence, one pass for what steps read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..patterns import Layout
from ..stages import GRADIENT_BYTES, Loop, Record, add_gradients, walk
from ..tracing import Node, Rewrite, Trace, Value, gradient_edge_of, referred

#: Solves ``g[t] = A[t] g[t + 1] + b[t]`` for the gradients of a loop's states, from A, b and the one after the last.
Solve = Callable[[Loop, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pull_back_through_loops(
    loops: Sequence[Loop],
    records: Sequence[Record],
    gradient: torch.Tensor,
    externals: Iterable[int],
    solve: Solve,
    memory_limit: int,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Gradients of the first record's input and of externals, for a gradient of the last record's output.

    Parameters
    ----------
    loops : sequence of Loop
        The loops in these stages, in order.
    records : sequence of Record
        Records of stages that follow each other, without hooks.
    gradient : Tensor, (batch, *out_shape)
        Gradient of the last stage's output.
    externals : iterable of int
        The externals whose gradients are returned, by their places in the trace.
    solve : callable
        ``solve(loop, A, b, last)``: the gradients of states, ``(steps, batch, n)``.
    memory_limit : int
        Bytes of the matrices that are held at once.
    """
    trace, start = records[0].trace, records[0].stage.start
    places = {trace.graph.externals[place]: place for place in externals}
    exits = [{value for column in loop.outputs.values() for value in column if value is not None} for loop in loops]
    sums: dict[int, torch.Tensor] = {}

    def go_back(gradients: Mapping[int, torch.Tensor], remaining: int) -> None:
        """Take gradients of values on, to the outputs of the first loops, or past all to the start and to externals."""
        ends = {value: trace.gradient_edge(value) for value in {start}.union(*exits[:remaining])}
        ends |= {value: gradient_edge_of(trace.tensor(value)) for value in places}
        edges = {value: edge for value, edge in ends.items() if edge is not None}
        starts = []
        for value, of_value in gradients.items():
            edge, like = edges.get(value) or trace.gradient_edge(value), trace.tensor(value)
            if edge is not None:
                starts.append((edge, of_value.reshape(like.shape).to(like.dtype)))
        walked = walk(starts, [(edge, trace.tensor(value)) for value, edge in edges.items()])
        terms = zip(edges, walked, strict=True)
        add_gradients(sums, {value: of_end for value, of_end in terms if of_end is not None})

    go_back({records[-1].stage.stop: gradient}, len(loops))
    for number, loop in reversed([*enumerate(loops)]):
        go_back(_pulled_back(loop, trace, sums, solve, memory_limit), number)
    of_start = sums[start] if start in sums else torch.zeros_like(records[0].input)
    return of_start, {place: sums[value] for value, place in places.items() if value in sums}


def _pulled_back(
    loop: Loop, trace: Trace, of_outputs: Mapping[int, torch.Tensor], solve: Solve, memory_limit: int
) -> dict[int, torch.Tensor]:
    """The gradients of what a loop reads, by value, for those of its side outputs."""
    gradients: dict[int, torch.Tensor] = {}
    x = trace.input
    length = max(1, memory_limit // max(1, loop.matrix_bytes(x)))
    last = x.new_zeros(len(x), loop.size)
    for stop in range(loop.count, 0, -length):
        steps = _StepsAgain(loop, trace, range(max(0, stop - length), stop))
        sides = steps.of_outputs(of_outputs)
        states = solve(loop, steps.matrices(), steps.added(sides), last)
        sides = steps.with_states(sides, torch.cat([states[1:], last[None]]))
        add_gradients(gradients, steps.of_inputs(sides))
        last = states[0]
    for slot, part in zip(loop.state, last.split(loop.sizes, 1), strict=True):
        first = loop.inputs[slot.before][0]
        add_gradients(gradients, {first: _joined(slot.layout, part[None], trace.tensor(first).shape)[0]})
    return gradients


class _StepsAgain:
    """Steps of a loop, run again all at once, with a graph."""

    def __init__(self, loop: Loop, trace: Trace, numbers: range) -> None:
        """Run the steps of these numbers again."""
        self._loop, self._numbers, self._like = loop, numbers, trace.input.detach()
        along = {
            value: torch.stack([trace.elements(column[number]).detach() for number in numbers])
            for value, column in loop.inputs.items()
            if value not in loop.shared
        }
        shared = {value: trace.elements(value).detach() for value in loop.shared}
        self._inputs = {value: each for value, each in {**along, **shared}.items() if value in loop.differentiable}
        for leaf in self._inputs.values():
            leaf.requires_grad_()
        of_steps = {place: [trace.scalars[column[n]] for n in numbers] for place, column in loop.numbers.items()}
        constant = {place: each[0] for place, each in of_steps.items() if len(set(each)) == 1}
        # Numbers that differ from step to step are tensors without axes.
        varying = {place: self._like.new_tensor(each) for place, each in of_steps.items() if place not in constant}
        values = [*dict.fromkeys([*(slot.after for slot in loop.state), *loop.outputs])]

        # What a call writes to is to be of each step, as what is written.
        zeros = self._like.new_zeros(len(numbers))

        def step(
            tensors: Sequence[torch.Tensor], floats: Sequence[torch.Tensor], zero: torch.Tensor
        ) -> list[torch.Tensor]:
            known = {**shared, **dict(zip(along, tensors, strict=True))}
            scalars = {**constant, **dict(zip(varying, floats, strict=True))}
            for node in loop.calls:
                known |= node.by_value(_results(node, _arguments(node, known, scalars), zero))
            return [known[value] for value in values]

        with torch.enable_grad():
            results = torch.vmap(step)([*along.values()], [*varying.values()], zeros)
        self._outputs = {value: result for value, result in zip(values, results, strict=True) if result.requires_grad}

    def _pull_back(
        self, gradients: Mapping[int, torch.Tensor], inputs: Sequence[int], *, batched: bool = False
    ) -> list[torch.Tensor | None]:
        """Gradients of inputs from those of outputs, or from many of each."""
        if not gradients or not inputs:
            return [None] * len(inputs)
        outputs, leaves = [self._outputs[value] for value in gradients], [self._inputs[value] for value in inputs]
        return list(
            torch.autograd.grad(
                outputs, leaves, [*gradients.values()], retain_graph=True, is_grads_batched=batched, allow_unused=True
            )
        )

    @property
    def _before(self) -> list[int]:
        return [slot.before for slot in self._loop.state]

    def of_outputs(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The gradients of side outputs along the steps, from those of the values that later calls read."""
        along: dict[int, torch.Tensor] = {}
        for value, column in self._loop.outputs.items():
            parts = [gradients.get(column[number]) for number in self._numbers]  # type: ignore[arg-type]
            if value in self._outputs and any(part is not None for part in parts):
                zero = torch.zeros_like(self._outputs[value][0])
                along[value] = torch.stack([zero if part is None else part for part in parts])
        return along

    def added(self, sides: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What the gradients of side outputs add to those of the states before, ``(steps, batch, n)``."""
        return self._states(self._pull_back(sides, self._before), ())

    def matrices(self) -> torch.Tensor:
        """The transposed Jacobians of the steps' states, ``(steps, batch, n, n)``."""
        rows, count = [], len(self._numbers)
        for slot in self._loop.state:
            output, size = self._outputs.get(slot.after), slot.size
            if output is None:
                rows.append(self._like.new_zeros(size, count, len(self._like), self._loop.size))
                continue
            shape = slot.layout.split(output[0]).shape
            element = torch.arange(size, device=output.device).expand(shape[0], -1).reshape(shape)
            element = slot.layout.join(element).expand_as(output)
            at_once = max(1, GRADIENT_BYTES // output.nbytes)
            for part in torch.arange(size, device=output.device).split(at_once):
                seeds = (element == part.view(-1, *[1] * element.ndim)).to(output.dtype)
                pulled = self._pull_back({slot.after: seeds}, self._before, batched=True)
                rows.append(self._states(pulled, (len(part),)))
        return torch.cat(rows).permute(1, 2, 3, 0)

    def with_states(self, sides: Mapping[int, torch.Tensor], states: torch.Tensor) -> dict[int, torch.Tensor]:
        """The gradients of side outputs, and those of the states after the steps, ``(steps, batch, n)``."""
        gradients = dict(sides)
        for slot, part in zip(self._loop.state, states.split(self._loop.sizes, 2), strict=True):
            if slot.after in self._outputs:
                like = self._outputs[slot.after]
                add_gradients(gradients, {slot.after: _joined(slot.layout, part, like.shape[1:]).to(like.dtype)})
        return gradients

    def of_inputs(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The gradients of what steps read besides their states, by value, for those of their outputs."""
        loop, of_values = self._loop, dict[int, torch.Tensor]()
        sides = [value for value in self._inputs if value not in self._before]
        for value, pulled in zip(sides, self._pull_back(gradients, sides), strict=True):
            if pulled is None:
                continue
            if value in loop.shared:
                add_gradients(of_values, {value: pulled})
                continue
            for number, term in zip(self._numbers, pulled.unbind(), strict=True):
                add_gradients(of_values, {loop.inputs[value][number]: term})
        return of_values

    def _states(self, parts: Sequence[torch.Tensor | None], many: tuple[int, ...]) -> torch.Tensor:
        """Gradients of the parts of states as one tensor, ``(*many, steps, batch, n)``."""
        shape = (*many, len(self._numbers), len(self._like))
        return torch.cat(
            [
                self._like.new_zeros(*shape, slot.size)
                if part is None
                else _split(slot.layout, part, len(shape) - 1).to(self._like.dtype)
                for slot, part in zip(self._loop.state, parts, strict=True)
            ],
            -1,
        )


def _arguments(node: Node, values: Mapping[int, torch.Tensor], numbers: Mapping[int, Any]) -> dict[str, Any]:
    """The arguments of a call; those by which autograd took no derivative are constants."""
    passes = iter(node.differentiable)
    return {
        name: each if type(argument) is not Value or next(passes) else each.detach()
        for name, argument in node.arguments.items()
        for each in (referred(argument, values.__getitem__, numbers),)
    }


def _results(node: Node, arguments: dict[str, Any], zero: torch.Tensor) -> list[torch.Tensor]:
    """The results of a call within ``vmap``, where no tensor says whether it has a gradient."""
    for name, each in arguments.items():
        if isinstance(each, torch.Tensor) and node.writes_to(name):
            arguments[name] = each + zero.to(each.dtype)
    if isinstance(node.overload, Rewrite):
        elements, derivative = arguments.values()
        return [elements + (derivative - derivative.detach())]
    return node.computed(arguments)


def _along(layout: Layout, leading: int) -> Layout:
    """The layout of tensors behind leading axes."""
    return layout if layout.axis < 0 else replace(layout, axis=layout.axis + leading)


def _split(layout: Layout, tensor: torch.Tensor, leading: int) -> torch.Tensor:
    """Tensors behind leading axes as ``(*leading, batch, elements)``."""
    return _along(layout, leading).split(tensor).unsqueeze(-1).flatten(leading + 1).movedim(0, leading)


def _joined(layout: Layout, samples: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Tensors of a shape along the first axis, from ``(many, batch, elements)``."""
    many, batch = samples.shape[:2]
    split = samples.movedim(1, 0).reshape(batch, many, *layout.shape_of_sample(shape))
    return _along(layout, 1).join(split)
