"""What autograd's graph of a traced run says: where derivatives pass, and whether they are those of the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn.modules._functions import BackwardHookFunction

from ..patterns import UnsupportedOperatorError
from .autograd_nodes import leads_to
from .callers import caller
from .graph import Node
from .modules import name_of
from .operators import OVERWRITES
from .traces import Trace

next_node = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


class SeenDerivatives:
    """Looks at autograd's nodes of tensors that a traced run uses.

    Autograd's graph tells which operator made a tensor, and whether a derivative passes at all. So a
    ``torch.autograd.Function``, whose derivative replaces those of its operators, is seen as such.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        #: The first error; the run goes on, since what it raises itself comes first.
        self.problem: Exception | None = None
        #: Autograd's nodes of this run have this number or a higher one.
        self.begin = next_node()
        #: Nodes that do not lead to the input.
        self._unrelated = set[Any]()
        #: By id, tensors within decomposed operators, for which autograd has no nodes, and those operators' results.
        self.parts: set[int] = set()

    def is_active(self, tensor: torch.Tensor, value: int, *, in_parts: bool = False) -> bool:
        """Whether a derivative passes through a tensor that is used; the place of its gradient is noted."""
        trace = self.trace
        if in_parts and not tensor.requires_grad:
            return id(tensor) in self.parts and (tensor.is_floating_point() or tensor.is_complex())
        node = tensor.grad_fn
        if node is None:
            # A leaf that the module made begins a graph of its own.
            maker = trace.graph.infos[value].maker
            # An operator copies a lazy negative, without autograd.
            if (
                maker is not None
                and maker.name == "aten.clone"
                and any(operand.active and trace.tensor(operand.value).is_neg() for operand in maker.operands)
            ):
                what = "a negative is not computed before an operator works on it, as a conjugate's imaginary part"
                self.refuse(maker, what, "take real and imaginary parts before the conjugate")
            return False
        # A write in place may have made it the result of a torch.autograd.Function since.
        if value not in trace.gradient_edges or isinstance(node, BackwardCFunction):
            self.examine(node, trace.graph.infos[value].maker)
            trace.gradient_edges.setdefault(value, GradientEdge(node, tensor.output_nr))
        return True

    def examine(self, node: Any, maker: Node | None) -> None:
        """Set the error where autograd's node of a tensor is not that of the operator that made it."""
        if maker is None:
            return
        if not isinstance(node, BackwardCFunction):
            if maker.changes_unseen:
                return
            number = node._sequence_nr()
            begun = None if maker.shift is None else self.trace.sequences[maker.place] + maker.shift
            if begun == number + 1 and maker.writes:
                # Autograd made this node first, and then that of a copy of the overwritten tensor.
                maker.shift, begun = -1, number
            elif begun is not None and number < begun and self._is_of_operand(begun, maker):
                maker.shift, begun = number - self.trace.sequences[maker.place], number
            if not any(operand.active for operand in maker.operands) and not any(maker.kinds):
                # No operator was seen that made its operand, as where that is a lazy conjugate.
                self.leaves_behind(node, maker)
            if begun not in (None, number):
                is_view = node.name() == "AsStridedBackward0"
                remedy = "take the view after the write" if is_view else "write it with operators"
                if number in self.trace.sequences:
                    # Of an earlier call, whose result was computed again for a derivative.
                    remedy = "leave out the checkpoint, or the hooks of saved tensors"
                self.refuse(maker, f"autograd's {node.name()} is not the derivative of {maker.name}", remedy)
            return
        function = type(node)._forward_cls  # type: ignore[attr-defined]
        if issubclass(function, BackwardHookFunction):
            maker.hooked = True
        elif function.__module__ != "torch._library.autograd":
            remedy = "write it with operators, as x + (f(x) - x).detach(), or make it a custom operator with a rule"
            if function.__module__ == "torch.utils.checkpoint":
                remedy = "pass use_reentrant=False to checkpoint"
            what = f"{function.__name__} is a torch.autograd.Function, whose derivative is its own"
            if function.__module__.startswith("jacsparse.jacobians"):
                what = "values of a Jacobian are not differentiated by rules"
                remedy = "take jacsparse.hessian of a scalar function, or torch.autograd's Jacobian of the values"
            self.refuse(maker, what, remedy)

    def _is_of_operand(self, number: int, maker: Node) -> bool:
        """Whether an operand has the node of this number: that of a view is made anew at its use after a write."""
        tensors = (self.trace.tensors[operand.value] for operand in maker.operands if operand.active)
        nodes = (tensor.grad_fn for tensor in tensors if tensor is not None and tensor._is_view())
        return any(node is not None and node._sequence_nr() == number for node in nodes)

    def leaves_behind(self, node: Any, reader: Node) -> list[torch.Tensor]:
        """The parameters that a node of this run leads to; the error is set where it leads to the input as well."""
        start = self.trace.gradient_edges[0]
        leaves: list[torch.Tensor] = []
        waiting, seen = [node], set()
        while waiting:
            reached = waiting.pop()
            if reached is None or reached in seen:
                continue
            seen.add(reached)
            if hasattr(reached, "variable"):
                leaves.append(reached.variable)
            elif reached is start.node or reached._sequence_nr() < self.begin:
                is_function = isinstance(node, BackwardCFunction)
                name = type(node)._forward_cls.__name__ if is_function else node.name()  # type: ignore[attr-defined]
                what = "what depends on the input"
                if reached is not start.node:
                    what = "what was made of parameters before the call"
                remedy = "write it with operators, or make it a custom operator with a rule"
                if name == "AliasBackward0":
                    remedy = "take as_subclass(torch.Tensor) of a tensor of another class"
                elif "DifferentiableGraph" in name:
                    remedy = "call the function that torch.jit has compiled"
                self.refuse(reader, f"{name} works on {what} by no operator of PyTorch's", remedy)
            else:
                waiting.extend(behind for behind, _ in reached.next_functions)
        return leaves

    def is_unseen(self, tensor: torch.Tensor, known: bool) -> bool:
        """Whether this run made a tensor from parameters by no call that was seen, as a Function does."""
        node = tensor.grad_fn
        if node is None or (known and not isinstance(node, BackwardCFunction)):
            return False
        return bool(self.begin <= node._sequence_nr() < next_node())

    def check_thread(self, tensor: torch.Tensor) -> None:
        """Set the error where another thread has computed a tensor, which no call has made, of the input."""
        if tensor.grad_fn is not None and self.leads_to_input(tensor.grad_fn):
            what = "what another thread computes of the input is no call of this run"
            self.refuse(untraced(), what, "compute it in the thread that calls")

    def leads_to_input(self, node: Any) -> bool:
        """Whether a node that this thread has not made in the run has a gradient of the input: threads number anew."""
        start = self.trace.gradient_edges[0].node
        return node is start or leads_to(node, {start}, self._unrelated)

    def refuse(self, node: Node, what: str, remedy: str) -> None:
        """Set the error that the trace ends with, unless one is set."""
        self.problem = self.problem or self.unsupported(node, what, remedy)

    def unsupported(self, node: Node, what: str, remedy: str) -> UnsupportedOperatorError:
        """An error that names the calling module or function; the path of a module is not looked up during the run."""
        name = node.path or name_of(node.module or self.trace.module)
        return UnsupportedOperatorError(f"{name}: {what}{node.source}; {remedy}")

    def read_error(self, overload: Any, *, as_text: bool = False) -> UnsupportedOperatorError:
        """The error where elements are read that may not be, as for a text."""
        if as_text:
            what, remedy = "its code makes a text of a tensor, as to print it", "call jacsparse.jacobian, which runs it"
            return self.unsupported(untraced(), what, f"leave that out, for no replay repeats it, or {remedy}")
        if overload is not None and torch.Tag.dynamic_output_shape in overload.tags:
            remedy = "take elements by their numbers, or keep the shape, with torch.where"
            return self.unsupported(untraced(), "a size depends on what a tensor holds", remedy)
        remedy = (
            "no pattern holds for all inputs: use PyTorch's functions, as torch.sin for math.sin or NumPy's, and "
            "torch.where for a branch; or call jacsparse.jacobian, which runs the function each time"
        )
        return self.unsupported(untraced(), "its code asks what a tensor holds", remedy)


def untraced() -> Node:
    """A call that runs and is in no graph, for messages."""
    node = Node(None, OVERWRITES, (), {}, {}, (), (), seen=True)
    node.module, node.file, node.line = caller()
    return node
