"""The elementwise part of a cell, printed as C++: a step, and what pulls gradients back through it.

Gates are products with weights; what a step makes of them stays at one place of the state. `Cell.step` tells it once,
in PyTorch's operations. Its calls and those of its backward pass, at a single place, are a small graph of arithmetic.
What the backward pass reads of the step, and cannot compute anew from the states, is saved.

For the gated recurrent unit that is r, z, the candidate and ``m = W_n h + b``, and its gradients are four: those of
what enters r, z and the candidate from the input and, since r multiplies m, another one of m (thesis, equation 4.4).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...codegen import CallResult, CallsOfElements, ElementGraph, Printer, UnreadableWriteError, constant
from ...tracing import calls_of

if TYPE_CHECKING:
    from .cell import Cell, FrozenCell


class NotElementwiseError(Exception):
    """A step cannot be printed; the message says what it does, as after "which"."""


@dataclass(frozen=True)
class ElementwiseStep:
    """A cell's elementwise part.

    Attributes
    ----------
    gates, states : int
        As of the cell.
    saved : int
        Vectors of a step that are saved for the backward pass, beside the states.
    parts : int
        Vectors of gradients: first those of the gates' parts from the input.
    recurrent : tuple of int
        Which of these is that of each gate's part from the state: its own number where the two parts are added.
    source : str
        ``template <typename T> struct Cell`` in C++.
    """

    gates: int
    states: int
    saved: int
    parts: int
    recurrent: tuple[int, ...]
    source: str

    @classmethod
    def of(cls, cell: Cell) -> ElementwiseStep:
        """The elementwise part of a cell.

        Raises
        ------
        NotElementwiseError
            Where elements of different places meet, or an operation has no printed form.
        """
        return _derived(cell.frozen)


#: Functions of `runs.cuh`, which have fewer instructions than CUDA's.
_FUNCTIONS = {"sigmoid": "sigmoid", "tanh": "squash"}
#: Elements of a vector while a step is recorded: two show what elements of different places have to do with each other,
#: and another number of them what a step makes of how many there are.
_PLACES, _OTHER_PLACES = 2, 5


@functools.lru_cache(maxsize=32)
def _derived(frozen: FrozenCell) -> ElementwiseStep:
    # In a thread of its own, where nothing is in force that may be so in the caller's: hooks of saved tensors, modes,
    # transforms, inference mode.
    with ThreadPoolExecutor(1) as thread:
        step, other = thread.map(lambda places: _Derivation(frozen.cell, places).result(), (_PLACES, _OTHER_PLACES))
        # Tensors without elements fail where a step asks for one, as to decide what it computes.
        thread.submit(lambda: _step_and_gradients(frozen.cell, *_inputs(frozen.cell, _PLACES, "meta"))).result()
    if step != other:
        raise NotElementwiseError("depends on how many elements a state has")
    return step


class _Derivation:
    """The graph of a step and its backward pass at each place, and what is printed of it."""

    def __init__(self, cell: Cell, places: int) -> None:
        self.gates, self.states, self.places = cell.gates, cell.states, places
        counts = {"entered": cell.gates, "product": cell.gates, "before": cell.states, "grad": cell.states}
        #: The names of the inputs, vector by vector.
        self.inputs = [f"{name}[{number}]" for name, count in counts.items() for number in range(count)]
        vectors = _inputs(cell, places, "cpu")
        self.elements = ElementGraph()
        try:
            calls = calls_of(functools.partial(_step_and_gradients, cell), vectors)
            if any(each.target is None and each.constant is not None for each in calls.read):
                raise NotElementwiseError("reads a tensor that is none of its arguments")
            for call in calls.steps:
                _check_call(call)
            sources = {place: place for place in range(len(vectors))}
            elements = CallsOfElements(self.elements, calls, vectors, sources, leaves=False)
        except UnreadableWriteError as error:
            raise NotElementwiseError("writes to a tensor") from error
        except RuntimeError as error:
            raise NotElementwiseError(f"fails for vectors of {places} elements: {error}") from error
        #: The numbers of the results: the states after the step, and the gradients of all inputs but those of states.
        self.results = [result[0].tolist() for result in elements.results]
        if elements.left:
            raise NotElementwiseError(f"calls {elements.left[0].target}")

    def result(self) -> ElementwiseStep:
        first, *others = (self._at(place) for place in range(self.places))
        if any(other != first for other in others):
            raise NotElementwiseError("treats elements of different places differently")
        return first

    def _at(self, place: int) -> ElementwiseStep:
        """What there is at one place, whose inputs alone may be read."""
        names = self._names(place)
        results = [numbers[place] for numbers in self.results]
        after, gradients = results[: self.states], results[self.states :]
        entering, recurrent, of_states = _split(gradients, (self.gates, self.gates, self.states))
        numbers = {name: number for number, name in names.items()}
        parts, places = [*entering], list[int]()
        for gate, each in enumerate(recurrent):
            two_parts = numbers[f"entered[{gate}]"], numbers[f"product[{gate}]"]
            if each == entering[gate] and self._are_only_added(*two_parts, results):
                places.append(gate)
                continue
            # Another place says that they are apart.
            others = [place for place, part in enumerate(parts) if part == each and place != gate]
            places.append(others[0] if others else len(parts))
            parts += [] if others else [each]
        saved = self._saved([*parts, *of_states], names, after)
        forward = _StepBody(self, {number: name for number, name in names.items() if not name.startswith("grad")})
        forward.assign("after", after)
        forward.assign("saved", saved)
        known = {number: name for number, name in names.items() if name.startswith(("before", "grad"))}
        known |= {number: f"after[{at}]" for at, number in enumerate(after)}
        backward = _StepBody(self, known | {number: f"saved[{at}]" for at, number in enumerate(saved)})
        backward.assign("parts", parts)
        backward.assign("direct", of_states)
        counts = {"gates": self.gates, "states": self.states, "saved": len(saved), "parts": len(parts)}
        texts = {"forward": forward.text(), "backward": backward.text()}
        carried = [str(not self._is_zero(each)).lower() for each in of_states]
        lists = {"recurrent": ", ".join(map(str, places)), "carried": ", ".join(carried)}
        source = _STRUCT.format(**counts, **texts, **lists)
        return ElementwiseStep(**counts, recurrent=tuple(places), source=source)

    def _names(self, place: int) -> dict[int, str]:
        """The inputs' names at a place, by their elements' numbers."""
        tensors = [node for number, node in enumerate(self.elements.nodes) if number in self.elements.tensors]
        sources = [self.elements.tensors[number] for number in sorted(self.elements.tensors)]
        return {node.first + place: self.inputs[at] for node, at in zip(tensors, sources, strict=True)}

    def _saved(self, wanted: Sequence[int], names: dict[int, str], after: Sequence[int]) -> list[int]:
        """What the gradients read of the step, and cannot compute of states and of what else is saved."""
        of_gradients, read, saved = dict[int, bool](), dict[int, None](), list[int]()

        def visit(number: int) -> bool:
            """Whether an element depends on gradients; what these read beside is noted."""
            if number not in of_gradients:
                operands = self.operands(number)
                ahead = [(operand, visit(operand)) for operand in operands]
                of_gradients[number] = any(depends for _, depends in ahead) or names.get(number, "").startswith("grad")
                if any(depends for _, depends in ahead):
                    read.update(dict.fromkeys(operand for operand, depends in ahead if not depends))
            return of_gradients[number]

        for number in wanted:
            if not visit(number):
                read[number] = None

        computable = dict[int, bool]()

        def can_be_had(number: int) -> bool:
            if number not in computable:
                node = self.node(number)
                if number in after or names.get(number, "").startswith("before"):
                    computable[number] = True
                elif node.operation is None:
                    computable[number] = node.constant is not None
                else:
                    computable[number] = all(map(can_be_had, self.operands(number)))
            return computable[number]

        # In the order in which the step computes them: nothing looked at before is computed of what comes later.
        for number in sorted(read):
            if not can_be_had(number):
                saved.append(number)
                computable[number] = True
        return saved

    def _are_only_added(self, one: int, other: int, results: Sequence[int]) -> bool:
        """Whether results are computed of two elements by their sum alone."""
        waiting, seen = [*results], set[int]()
        while waiting:
            number = waiting.pop()
            if number in (one, other):
                return False
            operands = self.operands(number) if number not in seen else []
            seen.add(number)
            if sorted(operands) != sorted((one, other)) or self.node(number).operation.name != "add":
                waiting += operands
        return True

    def _is_zero(self, number: int) -> bool:
        return self.node(number).constant == 0

    def node(self, number: int) -> Any:
        """The node that an element belongs to."""
        return self.elements.nodes[self.elements.places_of_nodes[number]]

    def operands(self, number: int) -> list[int]:
        """The numbers of the elements that one is computed of."""
        node = self.node(number)
        if node.operation is None:
            return []
        return [int(operand[number - node.first if len(operand) > 1 else 0]) for operand in node.operands]


class _StepBody:
    """The statements of a function: variables, each assigned once, and what is written to arrays."""

    def __init__(self, derivation: _Derivation, names: dict[int, str]) -> None:
        self.derivation, self.names, self.lines = derivation, dict(names), list[str]()
        self.printer = Printer(functions=_FUNCTIONS)

    def assign(self, array: str, numbers: Iterable[int]) -> None:
        """Write elements to an array."""
        values = [self.name(number) for number in numbers]
        self.lines += [f"{array}[{place}] = {value};" for place, value in enumerate(values)]

    def name(self, number: int) -> str:
        """The variable that holds an element, or a constant."""
        if number in self.names:
            return self.names[number]
        node = self.derivation.node(number)
        if node.operation is None:
            if node.constant is None:
                raise NotElementwiseError("reads elements of other places")
            return constant(node.constant)
        operands = [self.name(each) for each in self.derivation.operands(number)]
        name = self.names[number] = f"v{len(self.lines)}"
        kind = "bool" if node.dtype == torch.bool else "T"
        self.lines.append(f"const {kind} {name} = {self.printer.expression(node.operation, operands)};")
        return name

    def text(self) -> str:
        return "\n".join(f"    {line}" for line in self.lines)


def _check_call(call: CallResult) -> None:
    """Raise where a call is no arithmetic of the step's arguments in their type."""
    if torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ()):
        raise NotElementwiseError("draws random numbers")
    value = call.form
    if isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point() and value.dtype != torch.float32:
        raise NotElementwiseError(f"computes in {value.dtype}, whatever its arguments are")


def _inputs(cell: Cell, places: int, device: str) -> list[torch.Tensor]:
    """Zeros for what `_step_and_gradients` takes, vectors of so many elements."""
    count = 2 * (cell.gates + cell.states)
    return [torch.zeros(1, places, dtype=torch.float32, device=device) for _ in range(count)]


def _step_and_gradients(cell: Cell, *vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The states after a step and, of gradients that come to them, those of its inputs.

    NotElementwiseError is raised where it fails.
    """
    *inputs, grads = _split(vectors, (cell.gates, cell.gates, cell.states, cell.states))
    leaves = [[vector.detach().requires_grad_() for vector in part] for part in inputs]
    each = [vector for part in leaves for vector in part]
    of_states = torch.cat([*grads], dim=1)
    try:
        with torch.enable_grad():
            after = cell.step(*(torch.cat([*part], dim=1) for part in leaves))
        gradients = torch.autograd.grad(after, each, of_states, allow_unused=True, materialize_grads=True)
        return (*after.chunk(cell.states, dim=1), *gradients)
    except Exception as error:
        # The step is the user's, and may raise anything.
        of_what = "tensors without" if of_states.is_meta else f"vectors of {vectors[0].shape[1]}"
        raise NotElementwiseError(f"fails for {of_what} elements: {error}") from error


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    rest = iter(values)
    return [[next(rest) for _ in range(count)] for count in counts]


_STRUCT = """\
template <typename T>
struct Cell {{
  static constexpr int GATES = {gates}, STATES = {states}, SAVED = {saved}, PARTS = {parts};
  // Which of the parts is the gradient of a gate's part from the state; those from the input come first.
  __device__ static constexpr int recurrent(int gate) {{
    constexpr int part[] = {{{recurrent}}};
    return part[gate];
  }}
  // Whether a state enters the states after otherwise than by the gates.
  __device__ static constexpr bool carried(int state) {{
    constexpr bool is_carried[] = {{{carried}}};
    return is_carried[state];
  }}
  // The states after a step, from its gates' parts and from the states before, and what is saved of it.
  __device__ __forceinline__ static void step(const T* entered, const T* product, const T* before, T* after,
                                              T* saved) {{
{forward}
  }}
  // From gradients of the states after: those of the gates' parts, and what is carried to the states before.
  __device__ __forceinline__ static void back(const T* saved, const T* before, const T* after, const T* grad, T* parts,
                                              T* direct) {{
{backward}
  }}
}};
"""
