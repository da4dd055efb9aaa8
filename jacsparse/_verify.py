"""A module's sparse Jacobians against autograd, operator by operator."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ._chain import Chain, Record, Run, check_input, recent_chains, refuse_hooks
from ._modules import check_module, undisturbed, without_autocast
from ._scan import check_limit
from ._stages import Edge
from .patterns import Blocks, Call, Diagonal, Full, Pattern
from .patterns._structure import row_starts
from .spgemm import matvec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Check", "Verification", "VerificationError", "verify"]

#: Rows of a Jacobian up to which each is compared by itself.
EXACT_ROWS = 256
#: Random vectors otherwise.
PROBES = 3
#: Entries that are named.
NAMED = 5
#: Bytes of an operator's values and indices beyond which they are made in parts.
MEMORY_LIMIT = 2**29
#: Vectors up to which a matrix is multiplied by one at a time; and how many its kernel takes at once beyond.
FEW, LANES = 4, 8
#: Elements of the whole Jacobian, and entries of all operators', up to which it is made by `jacobian` as well.
SMALL = 2**20

#: Bytes of a part: of larger ones the time goes into fresh pages.
AT_ONCE = 2**25

#: Units in the last place by which coarser numbers than the input's may differ.
ROUNDINGS = 16

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


class VerificationError(RuntimeError):
    """A sparse Jacobian is not autograd's."""


@dataclass(frozen=True)
class Check:
    """One operator's Jacobian beside autograd's.

    Attributes
    ----------
    path, operator : str
        In the model, and as ATen names it; for the whole, the module's class.
    shape : tuple of int
        Of the Jacobian.
    exact : bool
        Whether all of it was compared, or its products with random vectors.
    difference : float
        The largest, as a share of the largest element; of a derivative that is zero but for rounding, as a share of
        what may be rounded.
    entries : tuple of str
        Those that differ, as far as they are named.
    parts : int
        Parts in which the matrix was made, one after the other; more than one where it is larger than the memory limit.
        All of them were compared.
    jacobian : bool
        For the whole, whether what `jacobian` returns was compared too.
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
    """What `verify` found.

    Attributes
    ----------
    checks : tuple of Check
        Of each operator, and last of the whole module.
    """

    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks in which entries differ."""
        return tuple(check for check in self.checks if check.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def verify(
    module: nn.Module,
    x: torch.Tensor,
    *,
    tolerance: float | None = None,
    raise_exception: bool = True,
    memory_limit: int | None = None,
) -> Verification:
    """Compare a module's sparse Jacobians with autograd.

    Each operator's, at each sample: all of it where it is small, else by products with random vectors. Then the whole
    module's output and gradient, by the sparse Jacobians of all its operators, and where that is small what `jacobian`
    returns, with its own.

    Parameters
    ----------
    module : Module
        Of operators that have a rule.
    x : Tensor, (batch, *input_shape)
        float32 or float64; float64 sees more.
    tolerance : float, optional
        As a share of the largest element: 1e-10 for float64 and 1e-4 for float32 where left out; 16 units in the last
        place of the coarsest dtype that the module works in, where that is coarser, as under ``torch.autocast``.
    raise_exception : bool
        Whether what differs is an error; as in ``torch.autograd.gradcheck``.
    memory_limit : int, optional
        Bytes of an operator's values and indices to hold at once: a larger matrix is made and compared part by part,
        by samples or by rows. 512 MiB where left out.

    Returns
    -------
    Verification
        Its ``str`` is a line for each operator.

    Raises
    ------
    VerificationError
        Where entries differ; it names them.
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule; or where one is beyond the memory limit whose rule
        makes no part of its matrix by itself.

    Notes
    -----
    It takes about as long as it takes to make all operators' matrices: some nanoseconds for each multiply-add of the
    forward pass.

    Examples
    --------
    >>> import torch
    >>> print(verify(torch.nn.Tanh(), torch.zeros(1, 2)))
    Tanh (aten.tanh), 2 × 2: all entries, difference 0.0e+00
    Tanh (Tanh), 2 × 2: all entries, by jacobian too, difference 0.0e+00
    """
    check_input("x", x)
    if not len(x):
        raise ValueError("x is an empty batch; pass at least one sample")
    memory = MEMORY_LIMIT if memory_limit is None else check_limit(memory_limit)
    check_module(module)
    with _alike(x), undisturbed(module):
        chain, run = recent_chains(module, pruned=True).of(x)
        refuse_hooks(run.records)
        limit = _tolerance(run) if tolerance is None else tolerance
        with without_autocast(x.device):
            checks, whole = _of_edges(run, limit, memory)
            jacobian = _by_jacobian(chain, run, x, whole.seeds)
    found = Verification((*checks, _of_whole(module, x, run, whole, jacobian, limit)))
    if found.failed and raise_exception:
        lines = "\n".join(map(str, found.failed))
        raise VerificationError(
            f"{len(found.failed)} of {len(found.checks)} comparisons with autograd failed:\n{lines}"
        )
    return found


def _tolerance(run: Run) -> float:
    """The input's; where operators work in coarser numbers, as under autocast, some units of theirs."""
    invocations = (record.invocation(edge.target) for record in run.records for edge in record.stage.edges)
    results = (result for invocation in invocations for result in invocation.results if result.is_floating_point())
    coarsest = max((torch.finfo(result.dtype).eps for result in results), default=0.0)
    own = run.recording.input.dtype
    return _TOLERANCE[own] if coarsest <= torch.finfo(own).eps else ROUNDINGS * coarsest


@dataclass
class _PulledBack:
    """Gradients of a module's input, by the sparse Jacobians of all its operators.

    Attributes
    ----------
    seeds : Tensor, (outputs, many, batch)
        Of the output.
    gradients : Tensor, (inputs, many, batch)
        Of the input.
    exact : bool
        Whether each output has its own.
    """

    seeds: torch.Tensor
    gradients: torch.Tensor
    exact: bool


def _of_edges(run: Run, limit: float, memory: int) -> tuple[list[Check], _PulledBack]:
    """Each operator's check; and gradients that go back through all of them, so that each matrix is made once."""
    y = run.recording.output.detach().to(run.recording.input.dtype)
    outputs, batch = y[:1].numel(), len(y)
    edges = [edge for record in run.records for edge in record.stage.edges]
    largest = max((max(edge.pattern.shape) for edge in edges), default=outputs)
    exact = outputs <= EXACT_ROWS and outputs * largest * batch * y.element_size() <= memory
    seeds = torch.stack([seed.T for seed in _seeds(y, outputs, exact)], 1) if outputs else y.new_zeros((0, 0, batch))
    checks: list[Check] = []
    passed = seeds
    for record in reversed(run.records):
        stage = record.stage
        gradients = {stage.stop: passed}
        left = Counter(edge.target for edge in stage.edges)
        for edge in reversed(stage.edges):
            check, own = _of_edge(record, edge, limit, memory, gradients.get(edge.target))
            checks.append(check)
            left[edge.target] -= 1
            if not left[edge.target]:
                gradients.pop(edge.target, None)
            if own is not None:
                known = gradients.get(edge.source)
                gradients[edge.source] = own if known is None else known.add_(own)
        zeros = (math.prod(stage.in_shape), *seeds.shape[1:])
        passed = gradients[stage.start] if stage.start in gradients else seeds.new_zeros(zeros)
    return checks[::-1], _PulledBack(seeds, passed, exact)


class _Matrix:
    """An operator's transposed Jacobian at the numbers of a run, as a whole or in parts that are made anew each time.

    Parameters
    ----------
    record : Record
        Of the run.
    edge : Edge
        The operator, and which operand.
    memory : int
        Bytes of values and indices.

    Raises
    ------
    ValueError
        Where one sample's matrix takes more, and the rule cannot make a part of it.
    """

    def __init__(self, record: Record, edge: Edge, memory: int) -> None:
        self.record, self.edge = record, edge
        # Of its own: the indices that a pattern has made live as long as it does.
        self.pattern = Pattern.of(replace(edge.pattern.structure))  # type: ignore[type-var]
        self.samples = [slice(0, record.batch)]
        self.bounds: Sequence[int] = (0, self.pattern.shape[0])
        self._whole: torch.Tensor | None = None
        closed = isinstance(self.pattern.structure, (Diagonal, Full))
        indices = 0 if closed else self.pattern.index_nbytes
        each = self.pattern.nnz * record.recording.input.element_size()
        if indices + each * (1 if edge.shared else record.batch) <= memory:
            return
        at_once = 1 if edge.shared else max(1, (memory - indices) // max(1, each))
        if not edge.shared:
            starts = range(0, record.batch, at_once)
            self.samples = [slice(start, min(start + at_once, record.batch)) for start in starts]
        if indices + each > memory:
            self.bounds = self._split(memory, indices + each)

    def _split(self, memory: int, needed: int) -> Sequence[int]:
        """Rows at which parts begin that each take about half of the memory and no more than AT_ONCE, or one row."""
        parts = max(2, -(-2 * needed // max(1, min(memory, 2 * AT_ONCE))))
        running = row_starts(self.pattern.structure.row_counts(), np.int64)
        targets = int(running[-1]) * np.arange(1, parts, dtype=object) // parts
        inner = np.searchsorted(running, targets.astype(np.int64), side="left")
        bounds = sorted({0, self.pattern.shape[0], *inner.tolist()})
        if self._values_of(bounds, self.samples[0]) is None:
            call, (columns, rows) = self.edge.call, self.pattern.shape
            raise ValueError(
                f"{call.path}: the Jacobian of {call.operator}, {rows:,} × {columns:,}, takes {needed / 2**20:,.0f} "
                f"MiB of values and indices, more than the memory limit of {memory / 2**20:,.0f} MiB, and its rule "
                "makes no part of it by itself; pass a smaller input or a larger memory_limit"
            )
        return bounds

    @property
    def parts(self) -> int:
        """How many there are."""
        return len(self.samples) * (len(self.bounds) - 1)

    def _values_of(self, bounds: Sequence[int], samples: slice) -> Iterator[torch.Tensor] | None:
        return self.edge.rule.transposed_parts(self.record._call(self.edge, samples), self.pattern, bounds)

    def _all_values(self, samples: slice) -> torch.Tensor:
        if len(self.samples) > 1:
            return self._made(samples)
        if self._whole is None:
            self._whole = self._made(slice(None))
        return self._whole

    def _made(self, samples: slice) -> torch.Tensor:
        return self.edge.rule.transposed_values(self.record._call(self.edge, samples), self.pattern)

    def times(self, vectors: torch.Tensor) -> torch.Tensor:
        """The products with many vectors for each sample, ``(outputs, many, batch)`` to ``(inputs, many, batch)``."""
        found = vectors.new_empty((self.pattern.shape[0], *vectors.shape[1:]))
        for samples in self.samples:
            own = vectors[:, :, samples]
            if len(self.bounds) == 2:
                found[:, :, samples] = _times(self.pattern, self._all_values(samples), own)
                continue
            parts = self._values_of(self.bounds, samples)
            assert parts is not None
            structure, bounds = self.pattern.structure, pairwise(self.bounds)
            if isinstance(structure, Blocks) and structure.inner == 1:
                for (first, last), values in zip(bounds, parts, strict=True):
                    _times_blocks(structure, first, values, own, found[first:last, :, samples])
            else:
                for (first, last), part, values in zip(bounds, structure.parts(self.bounds), parts, strict=True):
                    found[first:last, :, samples] = _times(Pattern.of(part), values, own)
        return found

    def row(self, number: int, sample: int) -> tuple[np.ndarray, torch.Tensor]:
        """Columns and values of one row of one sample's matrix."""
        (structure,) = self.pattern.structure.parts((number, number + 1))
        samples = next(each for each in self.samples if each.start <= sample < each.stop)
        if len(self.bounds) > 2:
            values = self._values_of((number, number + 1), samples)
            assert values is not None
            (own,) = values
        else:
            start = int(self.pattern.structure.row_counts()[:number].sum())
            own = self._all_values(samples)[start : start + structure.nnz]
        return structure.csr()[1], own[:, min(sample - samples.start, own.shape[1] - 1)]


def _times(pattern: Pattern, values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    rows, (count, batch) = pattern.shape[0], vectors.shape[1:]
    if not count * batch:
        return vectors.new_zeros((rows, count, batch))
    if values.shape[1] > 1:
        return torch.stack([matvec(pattern, values, each.contiguous()) for each in vectors.unbind(1)], 1)
    columns = vectors.flatten(1)
    if count * batch <= FEW:
        found = torch.cat([matvec(pattern, values, each.contiguous()) for each in columns.split(1, 1)], 1)
    else:
        # As many as the kernel takes at once.
        found = matvec(pattern, values, torch.nn.functional.pad(columns, (0, -count * batch % LANES)))
    return found[:, : count * batch].reshape(rows, count, batch)


def _times_blocks(
    structure: Blocks, first: int, values: torch.Tensor, vectors: torch.Tensor, out: torch.Tensor
) -> None:
    """As `_times`, into `out`, of the rows from `first` on that it has: no index is needed where blocks are full."""
    values = values.reshape(len(out), structure.columns, -1)
    while len(out):
        block = first // structure.rows
        count = min(first + len(out), (block + 1) * structure.rows) - first
        own = vectors[block * structure.columns : (block + 1) * structure.columns]
        # Of each sample a product of two dense matrices.
        out[:count] = torch.matmul(values[:count].movedim(2, 0), own.movedim(2, 0)).movedim(0, 2)
        values, out, first = values[count:], out[count:], first + count


def _of_edge(
    record: Record, edge: Edge, limit: float, memory: int, gradients: torch.Tensor | None
) -> tuple[Check, torch.Tensor | None]:
    """An operator's check; and gradients of its result, where there are some, taken back to its operand."""
    call = record._call(edge, slice(None))
    assert call.vjp is not None and call.input is not None
    matrix = _Matrix(record, edge, memory)
    exact = call.out_size <= EXACT_ROWS and matrix.parts == 1
    largest, worst, rounding = 0.0, 0.0, _rounding(call.input, call.output)
    entries: list[str] = []
    suspects: list[tuple[int, int, int, float]] = []
    products = _products(matrix, _seeds(call.input, call.out_size, exact), gradients)
    pulled = next(products)
    for number, (seed, product) in enumerate(products):
        expected = _flat(call.vjp(seed.reshape(-1, *call.out_shape)))
        difference = _difference(product, expected)
        largest = max(largest, _largest(expected))
        worst = max(worst, _size(difference))
        # By the largest so far, which may not be the largest of all.
        over = _over(difference, max(limit * largest, rounding))[:NAMED].tolist()
        suspects += [(number, *place, _size(difference[tuple(place)])) for place in over]
    for number, sample, column, size in suspects:
        if size > max(limit * largest, rounding) and len(entries) < NAMED:
            row = number if exact else _row(matrix, call, sample, column, limit)
            entries.append(_entry(matrix, call, sample, row, column))
    share = _share(worst, largest, rounding, limit)
    shape = (call.out_size, call.in_size)
    return Check(call.path, call.operator, shape, exact, share, tuple(entries), matrix.parts), pulled


def _products(matrix: _Matrix, seeds: Iterator[torch.Tensor], gradients: torch.Tensor | None) -> Iterator[Any]:
    """Gradients taken back, or None; then each seed, ``(batch, outputs)``, with its product, ``(batch, inputs)``."""
    if matrix.parts == 1:
        yield None if gradients is None else matrix.times(gradients)
        for seed in seeds:
            yield seed, matrix.times(seed.T[:, None])[:, 0].T
        return
    # All at once, as each part is made anew for each time.
    own = list(seeds)
    vectors = torch.stack([seed.T for seed in own], 1)
    found = matrix.times(vectors if gradients is None else torch.cat([vectors, gradients], 1))
    yield None if gradients is None else found[:, len(own) :].contiguous()
    yield from ((seed, found[:, number].T) for number, seed in enumerate(own))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(len(tensor), -1)


def _largest(tensor: torch.Tensor) -> float:
    """The largest element that is a number; 0 where there is none."""
    return tensor.nan_to_num(0, 0, 0).abs().max().item() if tensor.numel() else 0.0


def _size(difference: torch.Tensor) -> float:
    """The largest element, infinite where one is no number."""
    return difference.abs().nan_to_num(math.inf, math.inf).max().item() if difference.numel() else 0.0


def _difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Zero where autograd itself has no number, or the two are one infinity."""
    return torch.where(expected.isnan() | (found == expected), 0.0, found - expected)


def _rounding(x: torch.Tensor, y: torch.Tensor | None) -> float:
    """What a derivative that is zero may be rounded to: some units in the last place of output over input."""
    scale = 0.0 if y is None else _largest(y) / max(_largest(x), 1e-300)
    return 100 * torch.finfo(x.dtype).eps * scale


def _share(difference: float, largest: float, rounding: float, limit: float) -> float:
    """A difference beside the largest element; where that is no more than rounding, beside what it is rounded by."""
    return difference / max(largest, rounding / limit if limit else 0.0, 1e-300)


def _over(difference: torch.Tensor, limit: float) -> torch.Tensor:
    """Samples and columns where a difference is beyond a limit, or no number."""
    return (~(difference.abs() <= limit)).nonzero()


def _row(matrix: _Matrix, call: Call, sample: int, column: int, limit: float) -> int:
    """A row in whose entry at a column and sample the two differ: found by halving the outputs."""
    assert call.vjp is not None and call.input is not None
    low, high = 0, call.out_size
    while high - low > 1:
        middle = (low + high) // 2
        seed = call.input.new_zeros((len(call.input), call.out_size))
        seed[:, low:middle] = torch.rand(middle - low, generator=torch.Generator().manual_seed(1)).to(seed) + 0.5
        expected = _flat(call.vjp(seed.reshape(-1, *call.out_shape)))[sample, column]
        places, values = matrix.row(column, sample)
        found = (values * seed[sample, torch.from_numpy(places.astype(np.int64)).to(seed.device)]).sum()
        scale = max(1e-300, expected.abs().item(), found.abs().item())
        differs = not (found - expected).abs().item() <= limit * scale
        low, high = (low, middle) if differs else (middle, high)
    return low


def _entry(matrix: _Matrix, call: Call, sample: int, row: int, column: int) -> str:
    """One entry: where it is, what it is and what autograd says."""
    assert call.vjp is not None and call.input is not None
    seed = call.input.new_zeros((len(call.input), call.out_size))
    seed[:, row] = 1
    expected = _flat(call.vjp(seed.reshape(-1, *call.out_shape)))[sample, column].item()
    places, values = matrix.row(column, sample)
    at = np.flatnonzero(places == row)
    found = values[int(at[0])].item() if len(at) else 0.0
    missing = "" if len(at) else ", which the pattern leaves out"
    return f"sample {sample}: ∂y[{row}]/∂x[{column}] is {found:.6g}, autograd {expected:.6g}{missing}"


def _by_jacobian(chain: Chain, run: Run, x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor | None:
    """The same gradients of the input by what `jacobian` returns, where that is small; else None."""
    edges = sum(edge.pattern.nnz for stage in chain.stages for edge in stage.edges)
    size = math.prod(chain.in_shape) * math.prod(chain.out_shape)
    if max(edges, size) * len(x) > SMALL:
        return None
    transposed = chain.jacobian(run.records, x).T
    return _times(transposed.pattern, transposed.values, seeds)


def _of_whole(
    module: nn.Module, x: torch.Tensor, run: Run, whole: _PulledBack, jacobian: torch.Tensor | None, limit: float
) -> Check:
    """The module's own output and gradients beside those of all the sparse Jacobians."""
    given = x.detach().clone().requires_grad_()
    with torch.enable_grad(), _alike(x), undisturbed(module):
        y = module(given * 1)
    name = type(module).__name__
    outputs = y[:1].numel()
    ours = run.recording.output
    entries = []
    rounding = _rounding(x, y)
    fits = ours.shape == y.shape
    if not fits or _over(_difference(_flat(ours), _flat(y)), limit * _largest(y)).numel():
        entries.append("the output is another than the module's own")
    worst = 0.0
    for number, seed in enumerate(whole.seeds.unbind(1) if fits else ()):
        expected = _flat(_gradient(y, given, seed.T.reshape(y.shape).to(y.dtype)))
        for how, gradients in (("the gradient", whole.gradients), ("by jacobian, the gradient", jacobian)):
            if gradients is None:
                continue
            difference, largest = _difference(gradients[:, number].T, expected), _largest(expected)
            worst = max(worst, _share(_size(difference), largest, rounding, limit))
            over = _over(difference, max(limit * largest, rounding))
            for sample, column in over[: max(0, NAMED - len(entries))].tolist():
                entries.append(f"sample {sample}: {how} of x[{column}] is another than autograd's")
    shape, exact = (outputs, x[:1].numel()), whole.exact
    return Check(name, name, shape, exact, worst, tuple(entries), jacobian=jacobian is not None)


@contextlib.contextmanager
def _alike(x: torch.Tensor) -> Iterator[None]:
    """Where what is drawn at random, as by active dropout, is the same each time, and nobody else's draws change."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(0)
        yield


def _seeds(like: torch.Tensor, outputs: int, exact: bool) -> Iterator[torch.Tensor]:
    """Gradients of the outputs, ``(batch, outputs)``: each unit vector where all entries are asked for, else random."""
    generator = torch.Generator().manual_seed(0)
    for number in range(outputs if exact else PROBES):
        shape = (len(like), outputs)
        seed = torch.zeros(shape) if exact else torch.randn(shape, generator=generator)
        if exact:
            seed[:, number] = 1
        yield seed.to(like.device, like.dtype)


def _gradient(y: torch.Tensor, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(y, x, seed, retain_graph=True, materialize_grads=True)
    return found
