"""What a backward pass by a schedule does, as far as no batch changes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..schedule import Schedule, Step, run
from ..spgemm import ProductPlan
from ..stages import Chain


class WantedGradients(NamedTuple):
    """The gradients that a backward pass gives.

    Attributes
    ----------
    externals : tuple of tuple of int
        Of each stage, the places of the externals that it reads and whose gradients are wanted.
    stages : frozenset of int
        The numbers of the stages that autograd goes through whatever the schedule, for those, for hooks, or for the
        chain's input.
    for_input : bool
        Whether the gradient of the chain's input is wanted.
    """

    externals: tuple[tuple[int, ...], ...]
    stages: frozenset[int]
    for_input: bool


@dataclass(frozen=True)
class AutogradPass:
    """A pass of autograd through successive stages.

    Attributes
    ----------
    gradient : int
        The value of the schedule that is the gradient of the last stage's output.
    stages : tuple of int
        Numbers of the stages, the last one first.
    inputs : tuple of (int, int or None)
        The stages of whose input the gradient is computed, and the value of the schedule that it is; None for the
        gradient of the chain's input.
    externals : tuple of int
        The places of the externals of these stages whose gradients are wanted.
    strict : tuple of int
        Stages whose matrices are multiplied too: those know of no hooks, so that a hook that changes a gradient is an
        error there.
    """

    gradient: int
    stages: tuple[int, ...]
    inputs: tuple[tuple[int, int | None], ...]
    externals: tuple[int, ...]
    strict: tuple[int, ...]


@dataclass(frozen=True)
class Slices:
    """Products that are computed for some samples at a time, or for all.

    Attributes
    ----------
    steps : tuple of Step
        The products.
    plans : mapping of int to ProductPlan
        Those of products of two matrices, by value.
    formed : frozenset of int
        The matrices that products read, by value; the operators of other stages are gone through one by one, or say
        which elements they select.
    kept : dict of int to int
        The vectors that leave the slices, by value, and their numbers of elements.
    matrices : frozenset of int
        The products of matrices that later phases read, by value.
    entries : int
        Entries of all matrices of a sample.
    """

    steps: tuple[Step, ...]
    plans: Mapping[int, ProductPlan]
    formed: frozenset[int]
    kept: Mapping[int, int]
    matrices: frozenset[int]
    entries: int


class ExecutionPlan:
    """A backward pass: passes of autograd on the whole batch and products in slices of samples, in turn.

    Steps before all products of matrices, or after them, run on the whole batch: autograd goes through all their stages
    in one pass, which computes the gradients of weights as well. The other steps run in slices of samples, because only
    they need matrices. Stages that couple samples are steps on the whole batch, between such products.

    Where all matrices of the whole batch fit into memory, `at_once`, products are taken for all samples, and only those
    with matrices that are products themselves: autograd goes through every other stage.

    Parameters
    ----------
    chain : Chain
        The stages.
    schedule : Schedule
        The order of the products.
    products : callable
        Gives the plan of each product of two matrices, by the product's value, where matrices are multiplied.
    wanted : WantedGradients
        The gradients.
    at_once : bool
        Whether products are for the whole batch.

    Attributes
    ----------
    phases : tuple of (tuple of AutogradPass) or Slices
        What is done, in order.
    entries : int
        Entries of all matrices of a sample, of those slices that have the most.
    apart : frozenset of int
        Externals that several passes read: each pass leaves out the others' gradients.
    """

    def __init__(
        self,
        chain: Chain,
        schedule: Schedule,
        products: Callable[[], Mapping[int, ProductPlan]],
        wanted: WantedGradients,
        *,
        at_once: bool,
    ) -> None:
        self._chain, self._wanted = chain, wanted
        self._asked = {schedule.gradients[len(chain) - 1 - number] for number in wanted.stages}
        steps = schedule.live_steps(self._asked)
        parts = _layers(steps) if at_once else _parts(steps, {len(chain) - number for number in chain.coupling})
        self._matrices, self._multiplied = _operands(step for part in parts[1::2] for step in part), _operands(steps)
        plans = products() if len(parts) > 1 else {}
        phases = list[tuple[AutogradPass, ...] | Slices]()
        for place, part in enumerate(parts):
            # What later parts multiply, or what is asked for.
            used = self._asked.union(*map(_operands, parts[place + 1 :]))
            phases.append(self._slices(part, plans, used) if place % 2 else self._passes(part, used))
        entries = [phase.entries for phase in phases if isinstance(phase, Slices)]
        self.entries = sum(entries) if at_once else max(entries, default=0)
        passes = [each for phase in phases[::2] if isinstance(phase, tuple) for each in phase]
        remaining = sorted(wanted.stages - {number for each in passes for number in each.stages})
        alone = [self._pass(schedule.gradients[len(chain) - 1 - at], [at], {}, self._asked) for at in remaining]
        self.phases = (*phases, tuple(alone)) if alone else tuple(phases)
        readers = Counter(place for each in (*passes, *alone) for place in each.externals)
        self.apart = frozenset(place for place, count in readers.items() if count > 1)

    def _slices(self, steps: Sequence[Step], plans: Mapping[int, ProductPlan], used: set[int]) -> Slices:
        stages, products = self._chain.stages, [(step, plans[step.out]) for step in steps if step.kind == "mm"]
        multiplied, applied = _operands(step for step, _ in products), {s.left for s in steps if s.kind == "mv"}
        # Vectors go through the operators of a stage of several where nothing else needs its matrix.
        through = {at for at in applied - multiplied if at <= len(stages) and stages[-at].operator is None}
        lefts = {step.left for step, plan in products if not plan.selects_left}
        rights = {step.right for step, plan in products if not plan.selects_right}
        # The rows without the pattern of a stage, which may be slow to compute.
        kept = {
            step.out: plans[step.left].pattern.shape[0]
            if step.left in plans
            else math.prod(stages[-step.left].in_shape)
            for step in steps
            if step.kind == "mv" and step.out in used
        }
        patterns = [
            plans[value].pattern if value in plans else stages[-value].transposed_pattern
            for value in multiplied.union(applied, (step.out for step, _ in products)) - through
        ]
        formed = frozenset(lefts | rights | applied - through)
        matrices = frozenset(step.out for step, _ in products if step.out in used)
        return Slices(tuple(steps), plans, formed, kept, matrices, sum(pattern.nnz for pattern in patterns))

    def _passes(self, steps: Sequence[Step], used: set[int]) -> tuple[AutogradPass, ...]:
        """Products of a stage's matrix and a vector, as passes of autograd through successive stages."""
        passes: list[tuple[int, list[int], dict[int, int]]] = []
        ends: dict[int, tuple[list[int], dict[int, int]]] = {}
        count = len(self._chain)
        for step in steps:
            number = count - step.left
            if step.right in ends:
                stages, outs = ends.pop(step.right)
            else:
                stages, outs = [], {}
                passes.append((step.right, stages, outs))
            stages.append(number)
            outs[number] = step.out
            ends[step.out] = stages, outs
        for _, stages, _ in passes:
            # The stage before may be asked only for its externals, or for the input.
            before = stages[-1] - 1
            if before >= 0 and count - before not in self._multiplied and before in self._wanted.stages:
                stages.append(before)
        return tuple(self._pass(*each, used) for each in passes)

    def _pass(self, gradient: int, stages: Sequence[int], outs: Mapping[int, int], used: set[int]) -> AutogradPass:
        """A pass through stages; `outs` has, for each that is a step, the value that is the gradient of its input."""
        wanted, count = self._wanted, len(self._chain)
        inputs: list[tuple[int, int | None]] = [(at, outs[at]) for at in stages if outs.get(at) in used]
        if wanted.for_input and 0 in stages:
            inputs.append((0, None))
        externals = sorted({place for number in stages for place in wanted.externals[number]})
        strict = tuple(number for number in stages if count - number in self._matrices)
        return AutogradPass(gradient, tuple(stages), tuple(inputs), tuple(externals), strict)


def _operands(steps: Iterable[Step]) -> set[int]:
    """The values that steps multiply."""
    return {value for step in steps for value in (step.left, step.right)}


def _layers(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps by stages' own passes, steps with matrices that are products, and so on, each as early as may be."""
    products = {step.out for step in steps if step.kind == "mm"}

    def layer(step: Step, left: int, right: int) -> int:
        after = max(left, right)
        return after + (after % 2 != (step.kind == "mm" or step.left in products))

    layers = run(steps, layer, element=lambda _: 0)
    parts: list[list[Step]] = [[] for _ in range(1 + max(layers.values(), default=0))]
    for step in steps:
        parts[layers[step.out]].append(step)
    return parts


def _parts(steps: Sequence[Step], coupling: Collection[int]) -> list[list[Step]]:
    """Steps on the whole batch, steps in slices, and so on; `coupling` are the values of stages that couple samples."""
    stretches: list[list[Step]] = [[]]
    for step in steps:
        if step.left in coupling:
            stretches.append([])
        stretches[-1].append(step)
    parts: list[list[Step]] = [[]]
    for stretch in stretches:
        before, sliced, after = _split(stretch)
        parts[-1] += before
        parts += [sliced, after] if sliced else []
    return parts


def _split(steps: Sequence[Step]) -> tuple[list[Step], list[Step], list[Step]]:
    """The steps before all products of matrices, those in or between such products, and the steps after them."""
    products = {step.out for step in steps if step.kind == "mm"}
    touches = {step.out for step in steps if step.kind == "mm" or step.left in products}
    depends = run(steps, lambda step, left, right: step.out in touches or left or right, element=lambda _: False)
    leads: set[int] = set()
    for step in reversed(steps):
        if step.out in touches or step.out in leads:
            leads.update((step.left, step.right))
    between = {step.out for step in steps if step.out in touches or (depends[step.out] and step.out in leads)}
    before = [step for step in steps if step.out not in between and not depends[step.out]]
    after = [step for step in steps if step.out not in between and depends[step.out]]
    return before, [step for step in steps if step.out in between], after
