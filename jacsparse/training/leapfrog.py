"""Leapfrogging: threads that all go back through a network, each with the gradients of every k-th layer (Saraiya)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import index

import torch
from torch import nn

from ..scan import backward_by
from ..stages import Record, pull_back_by_nodes, pull_back_input, refuse_hooks


def check_threads(threads: int) -> int:
    """Return a number of threads; raise ValueError where it is no integer of at least 1."""
    try:
        number = index(threads)
    except TypeError:
        number = 0
    if number < 1 or isinstance(threads, bool):
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1, such as the number of cores")
    return number


def layers_of_worker(layers: int, threads: int, worker: int) -> range:
    """The layers, numbered from the output, whose gradients a worker computes.

    The printed Algorithm 1 misses layer L, and leaves the network where k is L or more; here each layer is one worker's.

    Examples
    --------
    >>> [list(layers_of_worker(8, 3, worker)) for worker in range(3)]
    [[0, 3, 6], [1, 4, 7], [2, 5]]
    """
    return range(worker, layers, threads)


def leapfrog_backward(module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, *, threads: int) -> torch.Tensor:
    """Run a module forward and, by leapfrogging, back: return the gradient of `x`, and add the parameters' to ``.grad``.

    Each thread repeats the recursion of errors (equation 5) over all layers, and computes the gradients of weights and
    biases (equations 6 and 7) of every k-th layer. They are autograd's.

    Parameters
    ----------
    module : Module
        A module that works on each sample by itself, draws no random numbers, as this function runs it once more, and
        has no backward hooks, which each thread would call.
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
        Where a backward hook may change gradients, an operator has no rule, or mixes samples.

    Notes
    -----
    Y. Saraiya, *Leapfrogging for parallelism in deep neural networks*, Algorithm 1, without its prologue: each thread
    starts from the output's gradient, so that none waits for a parent. PyTorch's own back-propagation already uses all
    cores within an operator. Leapfrogging saves time where these are too small for that, and only of the gradients of
    weights: `jacsparse.training.simulate` tells how much.

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

    def __init__(self, threads: int, in_shape: tuple[int, ...]) -> None:
        self.threads, self.in_shape = check_threads(threads), in_shape

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of externals, for a gradient of its output."""
        refuse_hooks(records)
        if not records:
            return (gradient.reshape(len(gradient), *self.in_shape) if for_input else None), {}
        tasks = self._tasks(records, gradient, set(externals), for_input)
        _run(tasks, gradient.device)
        gradients: dict[int, torch.Tensor] = {}
        terms_of_stages = {number: terms for task in tasks for number, terms in task.terms.items()}
        # Sums in the order of the stages, whichever worker was first.
        for number in sorted(terms_of_stages, reverse=True):
            for place, term in terms_of_stages[number].items():
                gradients[place] = gradients[place] + term if place in gradients else term
        return (next(task.gradient for task in tasks if not task.first) if for_input else None), gradients

    def _tasks(
        self, records: Sequence[Record], gradient: torch.Tensor, places: set[int], for_input: bool
    ) -> list[_Task]:
        # The stages with parameters, from the output, are the layers of the paper.
        layers = [number for number in reversed(range(len(records))) if records[number].externals & places]
        workers = range(min(self.threads, len(layers)) or int(for_input))
        shares = [
            [layers[layer] for layer in layers_of_worker(len(layers), self.threads, worker)] for worker in workers
        ]
        # The worker of the last layer goes on to the input.
        firsts = [0 if for_input and share[-1:] == layers[-1:] else share[-1] for share in shares]
        return [_Task(records, gradient, places, *each) for each in zip(shares, firsts, strict=True)]


class _Task:
    """What one worker does: the gradients of some stages' externals, and the recursion of errors down to the first."""

    def __init__(
        self, records: Sequence[Record], gradient: torch.Tensor, places: set[int], stages: Sequence[int], first: int
    ) -> None:
        self.records, self.gradient, self.places, self.stages, self.first = records, gradient, places, stages, first
        #: Gradients of externals, by stage and by place.
        self.terms: dict[int, dict[int, torch.Tensor]] = {}

    def run(self) -> None:
        for number in reversed(range(self.first, len(self.records))):
            record = self.records[number]
            if number in self.stages:
                asked = sorted(record.externals & self.places)
                self.gradient, self.terms[number] = pull_back_by_nodes(record, self.gradient, asked)
            else:
                self.gradient = pull_back_input(record, self.gradient)

    @property
    def results(self) -> Iterator[torch.Tensor]:
        yield self.gradient
        for terms in self.terms.values():
            yield from terms.values()


def _run(tasks: Sequence[_Task], device: torch.device) -> None:
    """Run each task on a thread of its own; an exception of one is raised when all have ended."""
    if not tasks:
        return
    threads, single = torch.get_num_threads(), threading.Semaphore(0)

    def run(task: _Task) -> None:
        # PyTorch first sets a new thread's count to the process's, and that only where the count is asked for.
        torch.get_num_threads()
        torch.set_num_threads(1)
        single.release()
        with _own_stream(task, device, caller):
            task.run()

    caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(len(tasks), "leapfrog") as pool:
        futures = [pool.submit(run, task) for task in tasks]
        for _ in tasks:
            single.acquire()
        # `set_num_threads` also sets the count of the process's next threads.
        torch.set_num_threads(threads)
    for future in futures:
        future.result()


@contextlib.contextmanager
def _own_stream(task: _Task, device: torch.device, caller: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the body on a new stream of a CUDA device, after the caller's work before and before the caller's work after."""
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
