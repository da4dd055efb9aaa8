"""Leapfrogging: threads that all go back through a network, each with the gradients of every k-th layer (Saraiya)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import index
from typing import ClassVar

import torch
from torch import nn

from ..scan import backward_by
from ..stages import Record, add_gradients, pull_back, refuse_hooks
from .node_gradients import pull_back_by_nodes, pull_back_input


def check_threads(threads: int | None) -> int:
    """Return a number of threads; raise ValueError where it is no integer of at least 1."""
    try:
        number = index(threads)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or isinstance(threads, bool):
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1, such as the number of cores")
    return number


def shares(weighted: Sequence[int], depth: int, threads: int) -> list[tuple[Sequence[int], int]]:
    """The layers whose gradients each worker computes, and the number of layers that it goes back through.

    The printed Algorithm 1 misses layer L, and leaves the network where k is L or more; here each layer has one worker.

    Parameters
    ----------
    weighted : sequence of int
        The layers with parameters, numbered from the output.
    depth : int
        The number of layers that the worker of the last one goes back through.
    threads : int
        The largest number of workers.

    Examples
    --------
    >>> shares(range(8), 8, threads=3)
    [(range(0, 8, 3), 7), (range(1, 8, 3), 8), (range(2, 8, 3), 6)]
    """
    parts = [weighted[worker::threads] for worker in range(min(threads, len(weighted)))] or [weighted]
    return [(part, depth if part[-1:] == weighted[-1:] else part[-1] + 1) for part in parts]


def leapfrog_backward(module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, *, threads: int) -> torch.Tensor:
    """Run a module forward and leapfrog back: return the gradient of `x`, and add those of the parameters to ``.grad``.

    Each thread repeats the recursion of errors (equation 5) over all layers, and computes the gradients of weights and
    biases (equations 6 and 7) of every k-th layer. They are autograd's.

    Parameters
    ----------
    module : Module
        A module, as of `jacsparse.nn.Scan`, that draws no random numbers, as this function runs it once more, and has
        no backward hooks, which each thread would call.
    x : Tensor, (batch, *input_shape)
        The input, float32 or float64.
    grad_output : Tensor, (batch, *output_shape)
        Gradient of the module's output.
    threads : int
        The number k of threads, each with one thread of PyTorch's, and on CUDA with a stream of its own. More threads
        than cores, or than layers with parameters, save nothing.

    Returns
    -------
    Tensor, (batch, *input_shape)
        Gradient of `x`.

    Raises
    ------
    ValueError
        Where `threads` is no integer of at least 1, the module draws random numbers, or a shape does not fit.
    UnsupportedOperatorError
        Where a backward hook may change gradients, or an operator has no rule.

    Notes
    -----
    Y. Saraiya, *Leapfrogging for parallelism in deep neural networks*, Algorithm 1, without its prologue: each thread
    starts from the output's gradient, so that none waits for a parent. The baseline is back-propagation on one thread:
    on several, PyTorch's operators use all cores by themselves. The threads' Python runs one at a time, so that narrow
    layers gain nothing.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> leapfrog_backward(model, torch.randn(5, 4), torch.ones(5, 2), threads=2).shape
    torch.Size([5, 4])
    >>> model[0].weight.grad.shape
    torch.Size([3, 4])
    """
    check_threads(threads)
    return backward_by(lambda chain: Leapfrogger(threads, chain.in_shape), module, x, grad_output)


class Leapfrogger:
    """Pulls gradients back through a chain by leapfrogging, as `jacsparse.scan.Scanner` does by a schedule."""

    module: ClassVar[str] = "nn.Leapfrog"

    def __init__(self, threads: int, in_shape: tuple[int, ...]) -> None:
        self.threads, self.in_shape = check_threads(threads), in_shape

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of externals, for a gradient of its output."""
        refuse_hooks(records)
        if not records:
            return (gradient.reshape(len(gradient), *self.in_shape) if for_input else None), {}
        backwards, places = records[::-1], set(externals)
        weighted = [layer for layer, record in enumerate(backwards) if record.externals & places]
        depth = len(records) if for_input else max(weighted, default=-1) + 1
        if depth and records[0].trace.run.saved_by_hooks:
            return _in_one_pass(backwards[:depth], gradient, places, for_input)
        tasks = [
            _Task(backwards[:end], gradient, places, layers) for layers, end in shares(weighted, depth, self.threads)
        ]
        _run(tasks, gradient.device)
        terms_of_layers = {layer: terms for task in tasks for layer, terms in task.terms.items()}
        gradients: dict[int, torch.Tensor] = {}
        # Sums in the order of the layers, whichever worker was first.
        for layer in weighted:
            add_gradients(gradients, terms_of_layers[layer])
        if not for_input:
            return None, gradients
        return next(task.gradient for task in tasks if len(task.records) == len(records)), gradients


def _in_one_pass(
    backwards: Sequence[Record], gradient: torch.Tensor, places: set[int], for_input: bool
) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
    """What `Leapfrogger.pull_back` returns, by one pass of autograd on this thread, the last record first.

    Hooks of saved tensors may be called once for each, and by one thread: those of a checkpoint run its part anew, with
    the random numbers of the process's generator.
    """
    asked = sorted(places & set[int]().union(*(record.externals for record in backwards)))
    of_inputs, of_externals = pull_back(backwards, gradient, backwards[-1:] if for_input else [], asked, ())
    return (of_inputs[0] if for_input else None), of_externals


class _Task:
    """What one worker does: the recursion of errors through some records, and the gradients of some layers."""

    def __init__(
        self, records: Sequence[Record], gradient: torch.Tensor, places: set[int], layers: Sequence[int]
    ) -> None:
        self.records, self.gradient, self.places, self.layers = records, gradient, places, layers
        #: Gradients of externals, by layer and by place.
        self.terms: dict[int, dict[int, torch.Tensor]] = {}

    def run(self) -> None:
        for layer, record in enumerate(self.records):
            if layer in self.layers:
                asked = sorted(record.externals & self.places)
                self.gradient, self.terms[layer] = pull_back_by_nodes(record, self.gradient, asked)
            else:
                self.gradient = pull_back_input(record, self.gradient)

    @property
    def results(self) -> Iterator[torch.Tensor]:
        yield self.gradient
        for terms in self.terms.values():
            yield from terms.values()


def _run(tasks: Sequence[_Task], device: torch.device) -> None:
    """Run each task on a thread of its own; an exception of one is raised when all have ended."""
    threads, single = torch.get_num_threads(), threading.Semaphore(0)

    def run(task: _Task) -> None:
        # PyTorch first sets a new thread's count to the process's, and that only where the count is asked for.
        torch.get_num_threads()
        torch.set_num_threads(1)
        single.release()
        with _new_stream(task, device, caller):
            task.run()

    caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(len(tasks), "leapfrog") as pool:
        futures = [pool.submit(run, task) for task in tasks]
        for _ in tasks:
            single.acquire()
        # A worker's call has also set the count of the process's next threads.
        torch.set_num_threads(threads)
    for future in futures:
        future.result()


@contextlib.contextmanager
def _new_stream(task: _Task, device: torch.device, caller: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the body on a new stream of a CUDA device, between the caller's work before and after."""
    if caller is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        caller.wait_stream(stream)
    for tensor in task.results:
        # Memory of this stream that the caller's stream goes on with.
        tensor.record_stream(caller)
