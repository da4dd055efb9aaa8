"""What autograd's graph of a run says: whether its derivatives are those of the operators that were seen."""

from __future__ import annotations

from typing import Any

from torch.autograd.function import BackwardCFunction

from ..patterns import UnsupportedOperatorError
from .autograd_nodes import is_of_hooks
from .graph import Node
from .traces import Trace


def check_derivatives(trace: Trace) -> None:
    """Look at autograd's nodes of the values that calls used; nodes that stand for hooks mark their calls.

    Raises
    ------
    UnsupportedOperatorError
        Where one is not that of the operator which made the value.
    """
    infos = trace.graph.infos
    for value, edge in trace.gradient_edges.items():
        maker = infos[value].maker
        if maker is None or not infos[value].dependent:
            continue
        if is_of_hooks(edge[0]):
            maker.hooked = True
        elif not isinstance(edge[0], BackwardCFunction):
            _examine(trace, edge[0], maker, infos[value].whole or maker)


def _examine(trace: Trace, node: Any, maker: Node, call: Node) -> None:
    """Raise where autograd's node of a value is not that of the call that made it; note how its number is shifted.

    The maker may be a part of the call.
    """
    number = node._sequence_nr()
    begun = None if maker.shift is None else trace.sequences[maker.place] + maker.shift
    if begun == number + 1 and maker.writes:
        # Autograd made this node first, and then that of a copy of the overwritten tensor.
        maker.shift, begun = -1, number
    # A part may have none through which a derivative passes: that of a step function's gradient is zero.
    if not any(operand.active for operand in call.operands) and not any(call.differentiable):
        # No operator was seen that made its operand, as where that is a lazy conjugate.
        what, remedy = "what depends on the input", "write it with operators, or make it a custom operator with a rule"
        if "DifferentiableGraph" in node.name():
            remedy = "call the function that torch.jit has compiled"
        elif node.name() == "AliasBackward0":
            remedy = "take as_subclass(torch.Tensor) of a tensor of another class"
        raise _unsupported(maker, f"{node.name()} works on {what} by no operator of PyTorch's", remedy)
    if begun not in (None, number):
        is_view = node.name() == "AsStridedBackward0"
        remedy = "take the view after the write" if is_view else "write it with operators"
        if number in trace.sequences:
            # Of an earlier call, whose result was computed again for a derivative.
            remedy = "leave out the checkpoint, or the hooks of saved tensors"
        raise _unsupported(maker, f"autograd's {node.name()} is not the derivative of {maker.name}", remedy)


def _unsupported(node: Node, what: str, remedy: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(f"{node.path}: {what}{node.source}; {remedy}")
