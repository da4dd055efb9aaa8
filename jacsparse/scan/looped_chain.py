"""Chains with loops: the gradient goes through each loop by a scan, and by the schedule through the stages between."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..recurrence import Dense, Report, linear_recurrence
from ..schedule import parse
from ..stages import Loop, LoopRegion, Record, add_gradients, has_hooks
from ..tracing import Node, Scalar, Trace
from .loop_gradients import pull_back_through_loops

if TYPE_CHECKING:
    from .scanner import Scanner


def obstacle_in(region: LoopRegion, records: Sequence[Record], memory_limit: int) -> str:
    """Why no scan goes through the loops of some stages in a run; empty where one does."""
    trace, path = records[0].trace, records[0].stage.path
    if any(has_hooks(record, of_nodes=True) for record in records):
        return f"{path}: a backward hook sees gradients within a loop"
    ends = (value for loop in region.loops for value in loop.ends if value not in trace.graph.captures)
    if any(trace.gradient_edge(value) is None for value in ends):
        return f"{path}: a tensor of a loop was written to after it was read"
    for loop in region.loops:
        problem = _number_in_the_way(loop, trace)
        if problem:
            return problem
    largest = max(region.loops, key=lambda loop: loop.size)
    if largest.matrix_bytes(trace.input) <= memory_limit:
        return ""
    return (
        f"{path}: a loop with a state of {largest.size:,} elements: the matrices of a step for {len(trace.input)} "
        f"samples take more than {memory_limit:,} bytes"
    )


def _number_in_the_way(loop: Loop, trace: Trace) -> str:
    """Why a loop's numbers do not let its steps run at once: one differs between them, and can be no tensor."""
    for node in loop.calls:
        for name, argument in node.arguments.items():
            if type(argument) is not Scalar or _may_be_tensor(node, name):
                continue
            if len({trace.scalars[place] for place in loop.numbers[argument.place]}) > 1:
                return (
                    f"{loop.path}: a loop of {loop.count} steps{node.source}: {node.name} takes another number as "
                    f"{name} in each step"
                )
    return ""


def _may_be_tensor(node: Node, name: str) -> bool:
    """Whether a call takes a tensor in the place of a number: a factor or a term, or what its schema has as one."""
    if node.facts.of_numbers and name == "other":
        return True
    return any(
        each.name == name and isinstance(each.type, torch.TensorType) for each in node.overload._schema.arguments
    )


class LoopedChain:
    """The parts of a scanner's chain that are loops, and a scanner for each part between."""

    def __init__(self, scanner: Scanner, regions: Sequence[LoopRegion]) -> None:
        self._schedule, self._memory_limit = scanner.asked, scanner.memory_limit
        loops = {each.first: each.loops for each in regions}
        between = functools.partial(type(scanner), schedule=scanner.asked, memory_limit=scanner.memory_limit)
        ends = [0, *(end for each in regions for end in (each.first, each.stop)), len(scanner.chain)]
        self._parts = [
            (slice(first, stop), loops.get(first) or between(scanner.chain.part(first, stop)))
            for first, stop in itertools.pairwise(ends)
            if first < stop
        ]

    def pull_back(
        self,
        records: Sequence[Record],
        gradient: torch.Tensor,
        externals: Sequence[Sequence[int]],
        *,
        for_input: bool,
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor], list[Report]]:
        """As `Scanner.pull_back`, with the externals of each stage; returns the reports of this pass, too."""
        # Of this pass alone: other threads may go back through the same chain.
        reports: list[Report] = []
        solve = functools.partial(self._solve, reports)
        of_externals: dict[int, torch.Tensor] = {}
        places = [sorted(set().union(*externals[part])) for part, _ in self._parts]
        readers = Counter(itertools.chain(*places))
        apart = {place for place, count in readers.items() if count > 1}
        of_input: torch.Tensor | None = gradient
        for number in reversed(range(len(self._parts))):
            part, way = self._parts[number]
            assert of_input is not None
            if isinstance(way, list):
                of_input, terms = pull_back_through_loops(
                    way, records[part], of_input, places[number], solve, self._memory_limit
                )
            else:
                wanted = for_input or number > 0
                of_input, terms = way.pull_back(records[part], of_input, places[number], for_input=wanted, apart=apart)
                reports += way.reports
            add_gradients(of_externals, terms)
        return of_input if for_input else None, of_externals, reports[::-1]

    def _solve(
        self, reports: list[Report], loop: Loop, A: torch.Tensor, b: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """The gradients of a loop's states; adds its report."""
        name, number = parse(self._schedule)
        schedule = self._schedule
        if name == "balanced" and number is not None:
            # All steps cost the same.
            schedule = f"chunked:{-(-len(b) // number)}"
        states = linear_recurrence(Dense(A), b, last, reverse=True, schedule=schedule, reports=reports)
        reports[-1].recurrence, reports[-1].layer = "backward", loop.path
        return states
