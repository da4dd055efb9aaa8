"""A module's sparse Jacobians against autograd, operator by operator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ._chain import Record, Run, check_input, recent_chains, refuse_hooks
from ._modules import check_module, undisturbed
from ._stages import Edge
from .patterns import Call, Pattern
from .patterns._values import batch_last
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
        The largest, as a share of the largest element.
    entries : tuple of str
        Those that differ, as far as they are named.
    """

    path: str
    operator: str
    shape: tuple[int, int]
    exact: bool
    difference: float
    entries: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows, columns = self.shape
        how = "all entries" if self.exact else f"{PROBES} random vectors"
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
    module: nn.Module, x: torch.Tensor, *, tolerance: float | None = None, raise_exception: bool = True
) -> Verification:
    """Compare a module's sparse Jacobians with autograd.

    Each operator's, at each sample: all of it where it is small, else by products with random vectors. Then the whole
    module's output and gradient, by the sparse Jacobians of all its operators, with its own.

    Parameters
    ----------
    module : Module
        Of operators that have a rule.
    x : Tensor, (batch, *input_shape)
        float32 or float64; float64 sees more.
    tolerance : float, optional
        As a share of the largest element: 1e-10 for float64 and 1e-4 for float32 where left out.
    raise_exception : bool
        Whether what differs is an error; as in ``torch.autograd.gradcheck``.

    Returns
    -------
    Verification
        Its ``str`` is a line for each operator.

    Raises
    ------
    VerificationError
        Where entries differ; it names them.
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.

    Examples
    --------
    >>> import torch
    >>> print(verify(torch.nn.Tanh(), torch.zeros(1, 2)))
    Tanh (aten.tanh), 2 × 2: all entries, difference 0.0e+00
    Tanh (Tanh), 2 × 2: all entries, difference 0.0e+00
    """
    check_input("x", x)
    if not len(x):
        raise ValueError("x is an empty batch; pass at least one sample")
    limit = _TOLERANCE[x.dtype] if tolerance is None else tolerance
    check_module(module)
    with _alike(x), undisturbed(module):
        run = recent_chains(module, pruned=True).of(x)[1]
        refuse_hooks(run.records)
        checks = [_of_edge(record, edge, limit) for record in run.records for edge in record.stage.edges]
    found = Verification((*checks, _of_whole(module, x, run, limit)))
    if found.failed and raise_exception:
        lines = "\n".join(map(str, found.failed))
        raise VerificationError(
            f"{len(found.failed)} of {len(found.checks)} comparisons with autograd failed:\n{lines}"
        )
    return found


def _of_edge(record: Record, edge: Edge, limit: float) -> Check:
    call = record._call(edge, slice(None))
    assert call.vjp is not None and call.input is not None
    pattern, values = edge.pattern, record.values(edge)
    exact = call.out_size <= EXACT_ROWS
    largest, worst, rounding = 0.0, 0.0, _rounding(call.input, call.output)
    entries: list[str] = []
    suspects: list[tuple[int, int, int, float]] = []
    for number, seed in enumerate(_seeds(call.input, call.out_size)):
        expected = _flat(call.vjp(seed.reshape(-1, *call.out_shape)))
        difference = _difference(_flat(_product(pattern, values, seed)), expected)
        largest = max(largest, _largest(expected))
        worst = max(worst, _largest(difference))
        # By the largest so far, which may not be the largest of all.
        over = _over(difference, max(limit * largest, rounding))[:NAMED].tolist()
        suspects += [(number, *place, _size(difference[tuple(place)])) for place in over]
    for number, sample, column, size in suspects:
        if size > max(limit * largest, rounding) and len(entries) < NAMED:
            row = number if exact else _row(pattern, values, call, sample, column, limit)
            entries.append(_entry(pattern, values, call, sample, row, column))
    share = 0.0 if worst <= rounding else worst / max(largest, 1e-300)
    return Check(call.path, call.operator, (call.out_size, call.in_size), exact, share, tuple(entries))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten(1)


def _product(pattern: Pattern, values: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """``Jᵀ g`` for each sample, by the sparse matrix."""
    return matvec(pattern, values, batch_last(seed)).T  # type: ignore[no-any-return]


def _largest(tensor: torch.Tensor) -> float:
    """The largest element that is a number; 0 where there is none."""
    return tensor.nan_to_num(0, 0, 0).abs().max().item() if tensor.numel() else 0.0


def _size(number: torch.Tensor) -> float:
    """Infinite where it is no number."""
    return number.abs().nan_to_num(math.inf, math.inf).item()


def _difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Zero where autograd itself has no number, or the two are one infinity."""
    return torch.where(expected.isnan() | (found == expected), 0.0, found - expected)


def _rounding(x: torch.Tensor, y: torch.Tensor | None) -> float:
    """What a derivative that is zero may be rounded to: some units in the last place of output over input."""
    scale = 0.0 if y is None else _largest(y) / max(_largest(x), 1e-300)
    return 100 * torch.finfo(x.dtype).eps * scale


def _over(difference: torch.Tensor, limit: float) -> torch.Tensor:
    """Samples and columns where a difference is beyond a limit, or no number."""
    return (~(difference.abs() <= limit)).nonzero()


def _row(pattern: Pattern, values: torch.Tensor, call: Call, sample: int, column: int, limit: float) -> int:
    """A row in whose entry at a column and sample the two differ: found by halving the outputs."""
    assert call.vjp is not None and call.input is not None
    low, high = 0, call.out_size
    while high - low > 1:
        middle = (low + high) // 2
        seed = call.input.new_zeros((len(call.input), call.out_size))
        seed[:, low:middle] = torch.rand(middle - low, generator=torch.Generator().manual_seed(1)).to(seed) + 0.5
        expected = _flat(call.vjp(seed.reshape(-1, *call.out_shape)))[sample, column]
        found = _flat(_product(pattern, values, seed))[sample, column]
        scale = max(1e-300, expected.abs().item(), found.abs().item())
        differs = not (found - expected).abs().item() <= limit * scale
        low, high = (low, middle) if differs else (middle, high)
    return low


def _entry(pattern: Pattern, values: torch.Tensor, call: Call, sample: int, row: int, column: int) -> str:
    """One entry: where it is, what it is and what autograd says."""
    assert call.vjp is not None and call.input is not None
    seed = call.input.new_zeros((len(call.input), call.out_size))
    seed[:, row] = 1
    expected = _flat(call.vjp(seed.reshape(-1, *call.out_shape)))[sample, column].item()
    found = _flat(_product(pattern, values, seed))[sample, column].item()
    inside = row in pattern.indices[pattern.indptr[column] : pattern.indptr[column + 1]]
    missing = "" if inside else ", which the pattern leaves out"
    return f"sample {sample}: ∂y[{row}]/∂x[{column}] is {found:.6g}, autograd {expected:.6g}{missing}"


def _of_whole(module: nn.Module, x: torch.Tensor, run: Run, limit: float) -> Check:
    """The module's own output and gradients beside those of all the sparse Jacobians."""
    given = x.detach().clone().requires_grad_()
    with torch.enable_grad(), _alike(x), undisturbed(module):
        y = module(given * 1)
    name = type(module).__name__
    outputs = y[:1].numel()
    ours = run.recording.output
    entries = []
    rounding = _rounding(x, y)
    if ours.shape != y.shape or _over(_difference(_flat(ours), _flat(y)), limit * _largest(y)).numel():
        entries.append("the output is another than the module's own")
    worst = 0.0
    for seed in _seeds(y, outputs):
        expected = _gradient(y, given, seed.reshape(y.shape))
        found = batch_last(seed)
        for record in reversed(run.records):
            found = record.pull_back_sparse(found)
        difference, largest = _difference(found.T.reshape(expected.shape), expected), _largest(expected)
        off = _largest(difference)
        worst = max(worst, 0.0 if off <= rounding else off / max(largest, 1e-300))
        over = _over(_flat(difference), max(limit * largest, rounding))
        for sample, column in over[: max(0, NAMED - len(entries))].tolist():
            entries.append(f"sample {sample}: the gradient of x[{column}] is another than autograd's")
    return Check(name, name, (outputs, x[:1].numel()), outputs <= EXACT_ROWS, worst, tuple(entries))


@contextlib.contextmanager
def _alike(x: torch.Tensor) -> Iterator[None]:
    """Where what is drawn at random, as by active dropout, is the same each time, and nobody else's draws change."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(0)
        yield


def _seeds(like: torch.Tensor, outputs: int) -> Iterator[torch.Tensor]:
    """Gradients of the outputs, ``(batch, outputs)``: each unit vector where there are few, else random ones."""
    generator = torch.Generator().manual_seed(0)
    exact = outputs <= EXACT_ROWS
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
