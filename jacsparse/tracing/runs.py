"""Runs of functions under a tracer."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence

import torch
from torch import nn

from ..patterns import requiring_gradient
from ..runtime import without_compiling
from .graph import Graph, tensors_in
from .operators import operator_name
from .reading import Unreadable
from .tracer import Tracer
from .traces import Trace, observing


def trace(
    module: nn.Module,
    x: torch.Tensor,
    graphs: Sequence[Graph] = (),
    *,
    readable: bool = True,
    hidden: Sequence[torch.Tensor] = (),
    connected: bool = False,
) -> Trace:
    """Run a function of a batch, and return its trace.

    Parameters
    ----------
    module : Module
        Its forward pass runs once, with all that it changes and draws.
    x : Tensor, (batch, *input_shape)
        The module gets a copy, which it may overwrite.
    graphs : sequence of Graph
        Graphs that the run may have, the most probable first. The trace has one of them where it makes the same calls.
    readable : bool
        Whether Python may read the elements of a tensor, as a branch does: the graph then holds for this input alone.
    hidden : sequence of Tensor
        Tensors from elsewhere that Python may not read either, unless it may all.
    connected : bool
        Whether autograd's graph of the run goes on to what `x` was computed from.

    Raises
    ------
    UnsupportedOperatorError
        Where a derivative is not that of the operators, or where elements are read although `readable` is False.
    """
    with torch.enable_grad():
        # No leaf, so that the module may write to it.
        copy = requiring_gradient(x if connected else x.detach()).clone()
        tracer = Tracer(Trace(module, copy), graphs, readable)
        with observing(), contextlib.ExitStack() as contexts:
            contexts.enter_context(tracer)
            if "torch._dynamo" in sys.modules:
                # Functions given to torch.compile run as they are written, operator by operator.
                contexts.enter_context(without_compiling())
            if not readable:
                contexts.enter_context(Unreadable(tracer, hidden))
            output = module(copy)
        return tracer.finished(output)


def failed_call(error: BaseException) -> tuple[str, list[torch.Tensor]]:
    """The operator at which a traced run ended with an error, and the tensors that it got; none without an operator."""
    operator, tensors = "", list[torch.Tensor]()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is Tracer.__torch_dispatch__.__code__:
            given = frame.f_locals
            operator = operator_name(given["overload"])
            tensors = tensors_in([*given["args"], *(given["kwargs"] or {}).values()])
    return operator, tensors
