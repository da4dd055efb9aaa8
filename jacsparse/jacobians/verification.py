"""Comparison of a function's sparse Jacobians with autograd, operator by operator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..patterns import Call, gradient_of
from ..spgemm import SparseJacobian, check_limit
from ..stages import Chain, Edge, Record, Run, chain_of_trace, pull_back_all, refuse_hooks, trace_of_call
from ..tracing import check_module, name_of, undisturbed, without_autocast, without_saving_hooks
from .arguments import Arguments
from .edge_matrices import EdgeMatrix, times
from .flat_function import module_and_batch, run_once
from .products import ChainProducts
from .traced_function import TracedFunction

if TYPE_CHECKING:
    from torch import nn

#: The most rows of a Jacobian that are each compared on their own.
EXACT_ROWS = 256
#: The number of random vectors for a Jacobian with more rows.
PROBES = 3
#: The most entries that a check names.
NAMED = 5
#: The most elements of the whole Jacobian, and entries of all operators' patterns, of all samples together, for a
#: comparison with their product.
SMALL = 2**20
#: The tolerance in units in the last place, for numbers coarser than the input's.
ROUNDINGS = 16
#: The most roundings of a sum, each relative to all of its absolute terms.
MOST_ROUNDINGS = 100
#: The largest difference from autograd that is no error, as a share of the largest element, by the input's dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


class VerificationError(RuntimeError):
    """A sparse Jacobian differs from autograd's."""


@dataclass(frozen=True)
class Check:
    """The comparison of one operator's Jacobian, or the whole function's, with autograd's.

    Attributes
    ----------
    path, operator : str
        The operator's path in the model, and its name in ATen; for the whole function, its name, a module's class.
    shape : tuple of int
        Shape of the Jacobian.
    exact : bool
        Whether all entries were compared; if not, products with random vectors were.
    difference : float
        The largest difference, as a share of the largest element, or of the rounding error where that is larger.
    entries : tuple of str
        Descriptions of the first entries that differ.
    parts : int
        The number of parts of the samples whose matrices were compared at once; more than one where these exceed the
        memory limit.
    jacobian : bool
        For the whole function, whether the product of all operators' matrices was compared too.
    """

    path: str
    operator: str
    shape: tuple[int, int]
    exact: bool
    difference: float
    entries: tuple[str, ...] = ()
    parts: int = 1
    jacobian: bool = False

    def __str__(self) -> str:
        rows, columns = self.shape
        how = "all entries" if self.exact else f"{PROBES} random vectors"
        how += f" in {self.parts} parts" if self.parts > 1 else ""
        how += ", by jacobian too" if self.jacobian else ""
        line = f"{self.path} ({self.operator}), {rows} × {columns}: {how}, difference {self.difference:.1e}"
        return "\n".join([line, *(f"    {entry}" for entry in self.entries)])


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes
    ----------
    checks : tuple of Check
        A check of each operator, and a last one of the whole function.
    """

    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks in which entries differ."""
        return tuple(check for check in self.checks if check.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def verify(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    pruned: bool = True,
    tolerance: float | None = None,
    raise_exception: bool = True,
    memory_limit: int | None = None,
) -> Verification:
    """Compare the sparse Jacobians of a function or a module with autograd.

    First each operator's Jacobian is compared at each sample: all entries of a small one, products with random vectors
    of a large one. Then the whole function's output is compared, and its gradients, as the backward passes of these
    operators give them along all paths; for a small function, also as the product of their matrices gives them.

    Parameters
    ----------
    f : callable
        A function or a module of operators that have a rule.
    *args, argnums, batched, pruned
        As in `jacobian`, with at least one sample; float64 shows smaller errors.
    tolerance : float, optional
        The largest difference that is no error, as a share of the largest element. By default 1e-9 for float64 and
        1e-4 for float32; or 16 units in the last place of the coarsest dtype that the module works in, where that is
        coarser than the input's, as under ``torch.autocast``.
    raise_exception : bool
        Whether a difference is an error, as in ``torch.autograd.gradcheck``.
    memory_limit : int, optional
        Bytes of an operator's values and indices to hold at once: a larger matrix is computed and compared of some
        samples at a time. 1 GiB by default.

    Returns
    -------
    Verification
        The checks; its ``str`` has a line for each operator.

    Raises
    ------
    VerificationError
        Where entries differ; the message names them.
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, an operator has no rule, or the matrix of one sample is beyond the memory limit.

    Notes
    -----
    The comparison takes about as long as the computation of all operators' matrices: some nanoseconds for each
    multiply-add of the forward pass.

    Examples
    --------
    >>> import torch
    >>> print(verify(torch.nn.Tanh(), torch.zeros(1, 2)))
    Tanh (aten.tanh), 2 × 2: all entries, difference 0.0e+00
    Tanh (Tanh), 2 × 2: all entries, by jacobian too, difference 0.0e+00
    """
    arguments = Arguments.of_call(f, args, argnums, batched)
    if not arguments.batch:
        raise ValueError(f"the arguments are {arguments}, an empty batch; pass at least one sample")
    module, x = module_and_batch(f, arguments)
    memory = check_limit(memory_limit)
    check_module(module)
    with without_saving_hooks(), _seeded(x), undisturbed(module):
        trace = trace_of_call(module, x)
        chain = chain_of_trace(trace, f, pruned=pruned)
        run = Run(trace, chain.records(trace))
        refuse_hooks(run.records)
        if tolerance is None:
            tolerance = tolerance_for(x.dtype, (trace.tensor(edge.target) for edge in chain.edges))
        with without_autocast(x.device):
            edges = [(record, edge) for record in run.records for edge in record.stage.edges]
            checks = [_check_edge(record, edge, tolerance, memory) for record, edge in edges]
            outputs = math.prod(chain.out_shape)
            largest = max((max(edge.transposed_pattern.shape) for edge in chain.edges), default=outputs)
            exact = outputs <= EXACT_ROWS and outputs * largest * len(x) * x.element_size() <= memory
            seeds = _seeds(x, outputs, exact)
            with torch.no_grad():
                # One by one: not every backward pass of a user's operator takes several at once.
                pulled = [pull_back_all(run.records, seed) if len(chain) else seed for seed in seeds.split(1, 1)]
                gradients = {"the gradient": torch.cat(pulled, 1) if pulled else seeds}
                gradients |= _by_jacobian(chain, run, x, seeds)
    verification = Verification((*checks, _check_whole(module, x, run, exact, seeds, gradients, tolerance)))
    failed = verification.failed
    if failed and raise_exception:
        lines = "\n".join(map(str, failed))
        raise VerificationError(
            f"{len(failed)} of {len(verification.checks)} comparisons with autograd failed:\n{lines}"
        )
    return verification


#: Gradients of a function's input, ``(inputs, many, batch)``, by how they were computed.
_Gradients = dict[str, torch.Tensor]


def _check_edge(record: Record, edge: Edge, limit: float, memory: int) -> Check:
    """Check an operator."""
    call, matrix = record.call(edge), EdgeMatrix(record, edge, memory)
    products = call.out_size * call.in_size * record.batch * call.input.element_size()
    # The products, the expected ones and their difference are held at once.
    exact = call.out_size <= EXACT_ROWS and len(matrix.samples) == 1 and 4 * products <= memory
    seeds = _seeds(call.input, call.out_size, exact)
    actual = matrix.times(seeds)
    expected = torch.empty_like(actual)
    for number, seed in enumerate(seeds.unbind(1)):
        expected[:, number] = _vjp(call, seed.T).T
    share, places = _compared(actual, expected, rounding_of(call.input, call.output), limit)
    entries = [
        _entry(matrix, call, sample, column, range(number, number + 1) if exact else range(call.out_size), limit)
        for column, number, sample in places
    ]
    shape = (call.out_size, call.in_size)
    return Check(call.path, call.operator, shape, exact, share, tuple(entries), len(matrix.samples))


def _compared(
    actual: torch.Tensor, expected: torch.Tensor, rounding: float, limit: float
) -> tuple[float, list[list[int]]]:
    """The largest difference as a share of the largest element, and the places of the first that are errors."""
    difference, largest = difference_of(actual, expected), largest_finite(expected)
    over = places_over(difference, max(limit * largest, rounding))
    # Where rounding errors are larger, they are the measure.
    share = magnitude(difference) / max(largest, rounding / limit if limit else 0.0, 1e-300)
    return share, over[:NAMED].tolist()


def _vjp(call: Call, seed: torch.Tensor) -> torch.Tensor:
    """Autograd's gradient of the operand for one of the result, ``(batch, outputs)`` to ``(batch, inputs)``."""
    assert call.vjp is not None
    return _flat(call.vjp(seed.reshape(-1, *call.out_shape)))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(len(tensor), -1)


def _entry(matrix: EdgeMatrix, call: Call, sample: int, column: int, rows: range, limit: float) -> str:
    """Describe an entry in a column and among some rows that differs; the search for its row halves these."""
    assert call.input is not None
    places, values = matrix.row(column, sample)
    x, columns = call.input, torch.from_numpy(places.astype(np.int64)).to(call.input.device)

    def products(first: int, last: int, weights: torch.Tensor) -> tuple[float, float]:
        """The weighted sum of the column's entries in some rows, and autograd's."""
        seed = x.new_zeros((len(x), call.out_size))
        seed[:, first:last] = weights[first:last]
        return (values * seed[sample, columns]).sum().item(), _vjp(call, seed)[sample, column].item()

    low, high = rows.start, rows.stop
    drawn = (torch.rand(call.out_size, generator=torch.Generator().manual_seed(1), device="cpu") + 0.5).to(x)
    while high - low > 1:
        middle = (low + high) // 2
        actual, expected = products(low, middle, drawn)
        differs = not abs(actual - expected) <= limit * max(1e-300, abs(expected), abs(actual))
        low, high = (low, middle) if differs else (middle, high)
    actual, expected = products(low, high, torch.ones_like(drawn))
    missing = "" if low in places else ", which the pattern leaves out"
    return f"sample {sample}: ∂y[{low}]/∂x[{column}] is {actual:.6g}, autograd {expected:.6g}{missing}"


def _by_jacobian(chain: Chain, run: Run, x: torch.Tensor, seeds: torch.Tensor) -> _Gradients:
    """The gradients of the input for these seeds by the product of all Jacobians; none where that is large."""
    edges = sum(edge.transposed_pattern.nnz for edge in chain.edges)
    size = math.prod(chain.in_shape) * math.prod(chain.out_shape)
    if max(edges, size) * len(x) > SMALL:
        return {}
    way = ChainProducts(TracedFunction(run.trace, chain))
    transposed = SparseJacobian(way.pattern, way.values(run.trace)).T
    return {"by products, the gradient": times(transposed.pattern, transposed.values, seeds)}


def _check_whole(
    module: nn.Module,
    x: torch.Tensor,
    run: Run,
    exact: bool,
    seeds: torch.Tensor,
    gradients: _Gradients,
    limit: float,
) -> Check:
    """Compare the output and the gradients with the function's own."""
    leaf, output = x.detach().clone().requires_grad_(), run.trace.output
    with _seeded(x):
        y = run_once(module, leaf)
    entries, worst, rounding, fits = list[str](), 0.0, rounding_of(x, y), output.shape == y.shape
    if not fits or places_over(difference_of(_flat(output), _flat(y)), limit * largest_finite(y)).numel():
        entries.append("the output is another than the function's own")
    for number, seed in enumerate(seeds.unbind(1) if fits else ()):
        expected = _flat(gradient_of(y, leaf, seed.T, retain_graph=True)).T
        for how, every in gradients.items():
            share, places = _compared(every[:, number], expected, rounding, limit)
            worst = max(worst, share)
            entries += [
                f"sample {sample}: {how} of x[{column}] is another than autograd's" for column, sample in places
            ]
    name, shape = name_of(module), (y[:1].numel(), x[:1].numel())
    return Check(name, name, shape, exact, worst, tuple(entries[:NAMED]), jacobian=len(gradients) > 1)


@contextlib.contextmanager
def _seeded(x: torch.Tensor) -> Iterator[None]:
    """A context with the same random numbers each time, as for active dropout; later draws outside do not change."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(0)
        yield


def _seeds(like: torch.Tensor, outputs: int, exact: bool) -> torch.Tensor:
    """Gradients of the outputs, ``(outputs, many, batch)``: all unit vectors for an exact comparison, or random."""
    if exact:
        return torch.eye(outputs, device="cpu").to(like)[:, :, None].repeat(1, 1, len(like))
    generator = torch.Generator().manual_seed(0)
    return torch.randn((outputs, PROBES, len(like)), generator=generator, device="cpu").to(like)


def error_of_product(
    jacobian: SparseJacobian,
    g: torch.Tensor,
    expected: torch.Tensor,
    limit: float,
    rounding: Callable[[], float] = lambda: 0.0,
) -> float:
    """The largest difference of ``gᵀ J`` from what is expected, as a share of the largest sum of absolute terms.

    Where all elements are zero but for rounding, as those of a sum of a softmax, that share would be no measure: beyond
    the limit, it is of what takes the rounding error to the limit.
    """
    scale = largest_finite(SparseJacobian(jacobian.pattern, jacobian.values.abs()).vjp(g.abs()))
    product = jacobian.vjp(g)
    difference = magnitude(difference_of(product, expected.reshape(product.shape)))
    if limit and not difference <= limit * scale:
        scale = max(scale, rounding() / limit)
    return difference / (scale or 1.0)


def tolerance_for(dtype: torch.dtype, tensors: Iterable[torch.Tensor | None]) -> float:
    """The default tolerance for an input of a dtype, or for coarser numbers among the tensors of a run."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    return max([_TOLERANCE[dtype], *(ROUNDINGS * torch.finfo(each).eps for each in dtypes)])


def largest_finite(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0 where there is none."""
    return tensor.nan_to_num(0, 0, 0).abs().max().item() if tensor.numel() else 0.0


def magnitude(difference: torch.Tensor) -> float:
    """The largest absolute value, infinite where an element is NaN."""
    return difference.abs().nan_to_num(math.inf, math.inf).max().item() if difference.numel() else 0.0


def difference_of(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The difference; zero where autograd's element is NaN, or both are the same infinity."""
    return torch.where(expected.isnan() | (actual == expected), 0.0, actual - expected)


def rounding_of(x: torch.Tensor, y: torch.Tensor | None) -> float:
    """The rounding error of a derivative that is zero: some units in the last place of output over input."""
    scale = 0.0 if y is None else largest_finite(y.detach()) / (largest_finite(x.detach()) or 1.0)
    return MOST_ROUNDINGS * torch.finfo(x.dtype).eps * scale


def places_over(difference: torch.Tensor, limit: float) -> torch.Tensor:
    """The samples and columns at which a difference is beyond a limit, or NaN."""
    return (~(difference.abs() <= limit)).nonzero()
