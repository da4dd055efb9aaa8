"""Convolution; a pruned linear layer is one over no axis at all.

A convolution slides its kernel over the input; for tap ``k`` of the kernel let ``S_k`` be the matrix over positions
with a one where output position ``o`` meets input position ``i`` under that tap. Then, with positions flattened and
the channel outermost, the Jacobian is a sum of Kronecker products (shapes ``C_out × C_in`` and ``P_out × P_in``)::

    J = Σ_k  W[:, :, k] ⊗ S_k            y[c, o] = Σ_{d, i}  J[(c, o), (d, i)] · x[d, i]

``S_k`` holds at most one entry in each row and column, so each entry of `J` is exactly one weight: values are a gather.
In row ``(c, o)`` the entries sort by channel ``d`` and then by tap; in row ``(d, i)`` of the transpose by channel ``c``
and then by *falling* tap. Both follow from ``i = o·stride - padding + k·dilation``. No sorting is ever needed.

Places where the same taps meet a position are of one *kind*: inside the image there is one for each remainder of the
stride, and a few more along its edges. All rows of a channel whose places are of one kind hold the same weights, and
their columns differ by a shift. So each row is a copy of its kind's, which is what makes values as fast as memory.

Thesis, section 3.4 and Algorithms 2 to 4, which give the 3×3, padding 1 case and keep positions that wrap around.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional, grad

from ._layout import Labels
from ._pattern import Pattern
from ._rules import Call, Rule, Use, add_rule
from ._runtime import SIMD, kernel, run_rows
from ._structure import Arrays, Csr, Structure, check_size, flag, frozen, index_dtype, natural, row_starts
from ._values import repeat_rows, repeated, take

__all__ = ["Convolution", "Sliding", "packed"]

#: Positions times taps along one axis: beyond, a file describes what no memory holds.
LARGEST_TABLE = 2**28


@dataclass(frozen=True)
class Sliding:
    """One axis along which a kernel slides.

    Attributes
    ----------
    size : int
        Input positions.
    kernel, stride, dilation : int
        As in ``torch.nn.Conv2d``.
    before, after : int
        Padding on either side; less than nothing behind where no window begins at the end.
    ceil_mode : bool
        Round the number of windows up, as pooling may.
    """

    size: int
    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil_mode: bool = False

    @functools.cached_property
    def windows(self) -> int:
        """Output positions."""
        room = self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if not self.ceil_mode:
            return max(0, room // self.stride + 1)
        windows = -(-room // self.stride) + 1
        # A last window that would begin in the padding on the right is dropped, as PyTorch does.
        return max(0, windows - ((windows - 1) * self.stride >= self.size + self.before))

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """Input position under each output position and tap, -1 outside; shape ``(windows, kernel)``."""
        positions = (
            np.arange(self.windows)[:, None] * self.stride - self.before + np.arange(self.kernel) * self.dilation
        )
        return np.where((positions >= 0) & (positions < self.size), positions, -1)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """Output position that meets each input position under each tap, -1 for none; shape ``(size, kernel)``."""
        reach = np.arange(self.size)[:, None] + self.before - np.arange(self.kernel) * self.dilation
        inside = (reach >= 0) & (reach % self.stride == 0) & (reach // self.stride < self.windows)
        return np.where(inside, reach // self.stride, -1)


def joined(tables: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    """Tables of single axes as one table over flattened positions and flattened taps, -1 where any axis has -1.

    Examples
    --------
    >>> joined([np.array([[0, 1]]), np.array([[-1, 2]])], [2, 3])
    array([[-1,  2, -1,  5]], dtype=int32)
    """
    table = np.zeros((1, 1), dtype=np.int64)
    for axis, size in zip(tables, sizes, strict=True):
        outer, inner = table[:, None, :, None], axis[None, :, None, :]
        table = np.where((outer < 0) | (inner < 0), -1, outer * size + inner)
        table = table.reshape(outer.shape[0] * axis.shape[0], outer.shape[2] * axis.shape[1])
    return table.astype(index_dtype(0, 0, math.prod(sizes)))


@kernel
def _cells_met(first, last, indptr, cell_start, cell_tap, cell_base, step, positions, out):
    """Write ``base + step · position`` for each cell of each row whose tap meets a position."""
    places = positions.shape[0]
    for row in range(first, last):
        channel = row // places
        place = row - channel * places
        entry = indptr[row]
        for cell in range(cell_start[channel], cell_start[channel + 1]):
            position = positions[place, cell_tap[cell]]
            if position >= 0:
                out[entry] = cell_base[cell] + step * position
                entry += 1


@dataclass(frozen=True)
class Convolution(Structure):
    """The Jacobian of a convolution, or its transpose.

    Attributes
    ----------
    out_channels, in_channels, groups : int
        As in ``torch.nn.Conv2d``.
    axes : tuple of Sliding
        One per spatial axis; none for a linear layer.
    kept : bytes or None
        Which weights are kept, ``numpy.packbits`` of a mask over ``(out_channels, in_channels // groups, taps)``;
        None keeps all.
    transposed : bool
        Whether this is the structure of the transposed Jacobian.
    """

    out_channels: int
    in_channels: int
    groups: int
    axes: tuple[Sliding, ...]
    kept: bytes | None = None
    transposed: bool = False

    @property
    def name(self) -> str:
        """A linear layer is a convolution without axes."""
        return "Convolution" if self.axes else "Linear"

    @property
    def taps(self) -> int:
        return math.prod(axis.kernel for axis in self.axes)

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Output channels, input channels of a group, taps."""
        return (self.out_channels, self.in_channels // self.groups, self.taps)

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """Which weights are kept, shape `weight_shape`."""
        shape = self.weight_shape
        if self.kept is None:
            return np.ones(shape, dtype=np.bool_)
        bits = np.frombuffer(self.kept, dtype=np.uint8)
        return np.unpackbits(bits, count=math.prod(shape)).view(np.bool_).reshape(shape)

    @property
    def shape(self) -> tuple[int, int]:
        out = self.out_channels * math.prod(axis.windows for axis in self.axes)
        into = self.in_channels * math.prod(axis.size for axis in self.axes)
        return (into, out) if self.transposed else (out, into)

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        """Places of the kept weights in the flattened weight, ascending."""
        return np.arange(math.prod(self.weight_shape)) if self.kept is None else np.flatnonzero(self.mask)

    @functools.cached_property
    def nnz(self) -> int:
        # Python's integers: a file may ask for more than any other holds.
        met = np.ones(1, dtype=object)
        for axis in self.axes:
            met = np.outer(met, (axis.sources >= 0).sum(axis=0).astype(object)).ravel()
        if self.kept is None:
            out_channels, inner, _ = self.weight_shape
            return int(out_channels * inner * met.sum())
        return int(np.bincount(self._weights % self.taps, minlength=self.taps).astype(object) @ met)

    @functools.cached_property
    def T(self) -> Convolution:
        transpose = replace(self, transposed=not self.transposed)
        # As far as it is known: these arrays are several times as large as the weight.
        for name in ("_weights", "_places", "nnz"):
            if name in self.__dict__:
                transpose.__dict__[name] = self.__dict__[name]
        transpose.__dict__["T"] = self
        return transpose

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """Column position for each row position and tap, -1 for none."""
        if self.transposed:
            return joined([axis.targets for axis in self.axes], [axis.windows for axis in self.axes])
        return joined([axis.sources for axis in self.axes], [axis.size for axis in self.axes])

    @functools.cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Each row channel's kept weights in the order of their columns: starts, column channels, taps, weights."""
        if self.kept is None:
            return self._all_cells()
        out_channels, inner, taps = self.weight_shape
        out_channel, in_channel, tap = self._places
        if not self.transposed:
            row, column, weight = out_channel, in_channel, self._weights
        else:
            # Sorted by row channel, column channel and falling tap: one number says all three.
            order = np.sort((in_channel * out_channels + out_channel) * taps + (taps - 1 - tap))
            row, column, falling = np.unravel_index(order, (self.in_channels, out_channels, taps))
            tap = taps - 1 - falling
            weight = (column * inner + row % max(1, inner)) * taps + tap
        channels = self.in_channels if self.transposed else self.out_channels
        return row_starts(np.bincount(row, minlength=channels), np.int64), column, tap.astype(np.int32), weight

    def _all_cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`_cells` where all weights are kept."""
        out_channels, inner, taps = self.weight_shape
        outer = out_channels // self.groups
        if self.transposed:
            row, tap = np.arange(self.in_channels)[:, None, None], np.arange(taps)[::-1]
            column = row // max(1, inner) * outer + np.arange(outer)[:, None]
            weight = (column * inner + row % max(1, inner)) * taps + tap
        else:
            row, tap, within = np.arange(out_channels)[:, None, None], np.arange(taps), np.arange(inner)[:, None]
            column = row // max(1, outer) * inner + within
            weight = (row * inner + within) * taps + tap
        rows, partners, _ = weight.shape
        columns, taps_of = (np.broadcast_to(part, weight.shape).ravel() for part in (column, tap.astype(np.int32)))
        return np.arange(rows + 1) * (partners * taps), columns, taps_of, weight.ravel()

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each kept weight: output channel, input channel (all groups counted through) and tap."""
        out_channels, inner, _ = self.weight_shape
        out_channel, within, tap = np.unravel_index(self._weights, self.weight_shape)
        return out_channel, out_channel // max(1, out_channels // self.groups) * inner + within, tap

    @functools.cached_property
    def _kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first place of each kind, and the kind of each place; as many kinds as places where all differ."""
        firsts, kinds = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        for axis in self.axes:
            met = (axis.targets if self.transposed else axis.sources) >= 0
            _, first, kind = np.unique(met, axis=0, return_index=True, return_inverse=True)
            # Numbered as they appear.
            order = np.argsort(first)
            firsts = (firsts[:, None] * len(met) + first[order]).ravel()
            kinds = (kinds[:, None] * len(order) + np.argsort(order)[kind.reshape(-1)]).ravel()
        return firsts, kinds

    def _counts(self, positions: np.ndarray) -> np.ndarray:
        """Entries of each channel's row at each of some places, which are rows of `positions`."""
        if self.kept is None:
            out_channels, inner, _ = self.weight_shape
            channels, partners = self.in_channels, out_channels // self.groups
            if not self.transposed:
                channels, partners = out_channels, inner
            return np.tile(np.count_nonzero(positions >= 0, axis=1) * partners, channels)
        out_channel, in_channel, tap = self._places
        channels, row = (self.in_channels, in_channel) if self.transposed else (self.out_channels, out_channel)
        kept = np.bincount(row * self.taps + tap, minlength=channels * self.taps).reshape(channels, self.taps)
        # As floats, for BLAS; exact far beyond any number of weights.
        return np.asarray(kept.astype(np.float64) @ (positions >= 0).T).astype(np.int64).ravel()

    def row_counts(self) -> np.ndarray:
        firsts, kinds = self._kinds
        return self._counts(self.positions[firsts]).reshape(-1, len(firsts))[:, kinds].ravel()

    @functools.cached_property
    def _indptr(self) -> np.ndarray:
        return frozen(row_starts(self.row_counts(), index_dtype(self.nnz, *self.shape)))

    @functools.cached_property
    def _templates(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the row of each channel and kind starts among all of them; and where each row finds its own."""
        firsts, kinds = self._kinds
        starts = row_starts(self._counts(self.positions[firsts]), np.int64)
        channels = np.arange(self.in_channels if self.transposed else self.out_channels)[:, None]
        return starts, frozen(starts[:-1][(channels * len(firsts) + kinds).ravel()])

    def _of_templates(self, base: np.ndarray, step: int, dtype: Any) -> np.ndarray:
        """``base + step · position`` for each entry of each channel's row at the first place of each kind."""
        starts, _ = self._templates
        firsts, _ = self._kinds
        cells, _, tap, _ = self._cells
        out = np.empty(int(starts[-1]), dtype=dtype)
        run_rows(_cells_met, starts, starts, cells, tap, base, step, self.positions[firsts], out)
        return frozen(out)

    def csr(self) -> Arrays:
        return self._indptr, frozen(self._filled(0, self.shape[0], *self._shifted_templates))

    def parts(self, bounds: Sequence[int]) -> Iterator[Structure]:
        template, shift = self._shifted_templates
        for first, last in itertools.pairwise(bounds):
            indices = self._filled(first, last, template, shift)
            indptr = self._starts(first, last).astype(index_dtype(len(indices), *self.shape))
            yield Csr(last - first, self.shape[1], frozen(indptr), frozen(indices.astype(indptr.dtype, copy=False)))

    @property
    def _shifted_templates(self) -> Arrays:
        """The columns of each channel's row at the first place of each kind; and how far each row's lie behind."""
        _, column, _, _ = self._cells
        positions, dtype = self.positions, self._indptr.dtype
        columns = self.shape[1] // max(1, self.out_channels if self.transposed else self.in_channels)
        firsts, kinds = self._kinds
        # By how much the columns at a place lie behind those at the first place of its kind: the same for each tap.
        tap = (positions >= 0).argmax(axis=1)
        shift = positions[np.arange(len(tap)), tap] - positions[firsts[kinds], tap]
        channels = self.in_channels if self.transposed else self.out_channels
        return self._of_templates(column * columns, 1, dtype), np.tile(shift.astype(dtype), channels)

    def _starts(self, first: int, last: int) -> np.ndarray:
        """Where each of some rows starts among their entries."""
        return frozen(self._indptr[first : last + 1] - self._indptr[first])

    def _filled(self, first: int, last: int, template: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """The columns of the entries of some rows."""
        starts = self._starts(first, last)
        _, start = self._templates
        out = np.empty(int(starts[-1]), dtype=template.dtype)
        repeat_rows(template, start[first:last], starts, _copying(starts), out, shift[first:last])
        return out

    @functools.cached_property
    def _gather(self) -> np.ndarray:
        """The place in the flattened weight of each entry of each channel's row of each kind, as narrow as can be."""
        _, _, _, weight = self._cells
        return self._of_templates(weight, 0, np.min_scalar_type(max(0, math.prod(self.weight_shape) - 1)))

    def values(self, weight: torch.Tensor) -> torch.Tensor:
        """The entries' values, ``(nnz, 1)``, from a weight of `weight_shape` in C order."""
        (values,) = self.values_of_parts(weight, (0, self.shape[0]))
        return values

    def values_of_parts(self, weight: torch.Tensor, bounds: Sequence[int]) -> Iterator[torch.Tensor]:
        """The same for the rows from each bound to the next one."""
        template = take(weight, self._gather)
        _, start = self._templates
        for first, last in itertools.pairwise(bounds):
            if len(template) == self.nnz:
                # No two rows are alike: the templates are the rows.
                yield template[self._indptr[first] : self._indptr[last]]
                continue
            whole = last - first == self.shape[0]
            starts = self._indptr if whole else self._starts(first, last)
            yield repeated(template, start if whole else frozen(start[first:last]), starts, _copying(starts))

    def describe(self) -> Mapping[str, Any]:
        return {
            "out_channels": self.out_channels,
            "in_channels": self.in_channels,
            "groups": self.groups,
            "axes": described_axes(self.axes),
            "pruned": self.kept is not None,
            "kept": np.frombuffer(self.kept or b"", dtype=np.uint8),
            "transposed": self.transposed,
        }

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Convolution:
        out_channels, in_channels, groups = (natural(description, n) for n in ("out_channels", "in_channels", "groups"))
        if not groups or out_channels % groups or in_channels % groups:
            raise ValueError(f"groups is {groups}; it must divide {out_channels} and {in_channels} channels")
        axes = restored_axes(description)
        kept = description.get("kept")
        if not isinstance(kept, np.ndarray) or kept.dtype != np.uint8 or kept.ndim != 1:
            raise ValueError("kept is not an array of bytes")
        structure = cls(
            out_channels,
            in_channels,
            groups,
            axes,
            kept.tobytes() if flag(description, "pruned") else None,
            flag(description, "transposed"),
        )
        check_size(structure, math.prod(structure.weight_shape))
        expected = -(-math.prod(structure.weight_shape) // 8)
        if structure.kept is not None and len(structure.kept) != expected:
            raise ValueError(
                f"kept has {len(structure.kept)} bytes; a mask over {structure.weight_shape} needs {expected}"
            )
        return structure


def _copying(starts: np.ndarray) -> np.ndarray:
    """What `repeat_rows` takes: runs of consecutive elements are four times as fast as elements looked up."""
    return starts // (4 * SIMD)


def described_axes(axes: tuple[Sliding, ...]) -> np.ndarray:
    """A row of numbers for each axis, in the order of `Sliding`."""
    rows = [(a.size, a.kernel, a.stride, a.before, a.after, a.dilation, a.ceil_mode) for a in axes]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 7)


def restored_axes(description: Mapping[str, Any]) -> tuple[Sliding, ...]:
    """What `described_axes` described, checked."""
    axes = description.get("axes")
    if not isinstance(axes, np.ndarray) or axes.dtype != np.int64 or axes.ndim != 2 or axes.shape[1] != 7:
        raise ValueError("axes is not an int64 array with 7 columns")
    size, taps, stride, before, after, dilation, ceil_mode = axes.T
    fine = (size >= 0) & (taps >= 1) & (stride >= 1) & (before >= 0) & (after > -(2**31)) & (dilation >= 1)
    fine &= (axes < 2**31).all(axis=1) & (ceil_mode >= 0) & (ceil_mode <= 1)
    if not fine.all():
        raise ValueError(f"axes holds {axes[np.argmin(fine)].tolist()}, which describes no sliding window")
    columns = (size, taps, stride, before, after, dilation, ceil_mode != 0)
    restored = tuple(Sliding(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
    tables = [max(axis.size, axis.windows) * axis.kernel for axis in restored]
    if max(tables, default=0) > LARGEST_TABLE:
        raise ValueError(f"axes holds {axes[np.argmax(tables)].tolist()}, which is too large for any tensor")
    return restored


def pairs(values: Any, count: int) -> tuple[int, ...]:
    """An argument of PyTorch that may be one number for all of `count` axes, or a sequence of one or of `count`."""
    values = tuple(values) if isinstance(values, (list, tuple)) else (values,)
    return tuple(itertools.islice(itertools.cycle(values), count))


_CONVOLUTIONS: dict[int, Any] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
#: Of the input, by the number of axes; no input is asked for.
_GRADIENTS: dict[int, Any] = {1: grad.conv1d_input, 2: grad.conv2d_input, 3: grad.conv3d_input}
_TRANSPOSED: dict[int, Any] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


class _Windows(Rule):
    """A weight slid over the input, shared by all samples.

    A sample that is a batch of `k` to the operator has `k` times as many groups, each with the weight of its own.
    """

    weights = ("weight",)
    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank = use.rank("input")
        return {"input": tuple(range(rank))}, (0, *(("slid", axis) for axis in range(1, use.output.ndim)))

    def check(self, call: Call) -> None:
        super().check(call)
        if len(call.in_shape) < call["weight"].ndim:
            raise call.unsupported(
                f"{call.operator} takes the samples of shape {call.in_shape[1:]} for the channels of one image",
                "give it samples of shape (channels, *sizes), as x.unsqueeze(1) makes them",
            )

    def shared(self, call: Call) -> bool:
        return True

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert isinstance(pattern.structure, Convolution)
        return pattern.structure.values(self._weight(call))

    # The structure knows its orientation, and so the order of its weights.
    transposed_values = values

    def transposed_parts(self, call: Call, pattern: Pattern, bounds: Sequence[int]) -> Iterator[torch.Tensor]:
        assert isinstance(pattern.structure, Convolution)
        return pattern.structure.values_of_parts(self._weight(call), bounds)

    def _weight(self, call: Call) -> torch.Tensor:
        weight, copies = call["weight"], call.in_shape[0]
        return weight if copies == 1 else weight.repeat(copies, *[1] * (weight.ndim - 1))

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        images = gradients.flatten(0, 1).flatten(0, 1)
        found = self.pulled(call, images, [len(images), *call.in_shape[1:]])
        return found.reshape(*gradients.shape[:2], *call.in_shape)

    @abstractmethod
    def pulled(self, call: Call, gradients: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """The gradients of an input of that shape, for those of a batch of outputs."""


class _ForwardRule(_Windows):
    """A convolution: weights gathered along the pattern."""

    def multiply_adds(self, call: Call) -> int:
        return call.out_size * math.prod(call["weight"].shape[1:])

    def pattern(self, call: Call) -> Pattern:
        weight = call["weight"]
        copies, channels, *sizes = call.in_shape
        taps = tuple(weight.shape[2:])
        count = len(taps)
        stride, dilation = pairs(call["stride"], count), pairs(call["dilation"], count)
        padding = pairs(call["padding"], count)
        axes = tuple(
            Sliding(size, kernel, step, beside, beside, spread)
            for size, kernel, step, beside, spread in zip(sizes, taps, stride, padding, dilation, strict=True)
        )
        groups, kept = copies * call["groups"], _packed(call, copies)
        return Pattern.of(Convolution(copies * weight.shape[0], copies * channels, groups, axes, kept))

    def pulled(self, call: Call, gradients: torch.Tensor, shape: list[int]) -> torch.Tensor:
        weight, count = call["weight"].detach(), len(shape) - 2
        stride, padding, dilation = (pairs(call[name], count) for name in ("stride", "padding", "dilation"))
        if weight.dtype != torch.float32:
            into = _GRADIENTS[count]
            return into(shape, weight, gradients, stride, padding, dilation, call["groups"])  # type: ignore[no-any-return]
        out_channels, channels, *taps = weight.shape
        if weight.is_cpu and count == 2 and call["groups"] == 1:
            # oneDNN's kernels work on 16 channels at once, however few there are.
            if channels <= 4 and out_channels >= 16:
                return _folded(weight, gradients, shape, stride, padding, dilation)
            within = all(beside <= spread * (n - 1) for beside, spread, n in zip(padding, dilation, taps, strict=True))
            if out_channels < 16 and within and max(stride) == 1:
                beside = [spread * (n - 1) - own for own, spread, n in zip(padding, dilation, taps, strict=True)]
                flipped = weight.flip(2, 3).transpose(0, 1)
                return functional.conv2d(gradients, flipped, None, 1, beside, dilation)
        # On CPUs up to twice as fast as what autograd calls, but in float32 alone.
        windows = zip(shape[2:], gradients.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        rest = [
            size - ((made - 1) * step - 2 * beside + spread * (taps - 1) + 1)
            for size, made, taps, step, beside, spread in windows
        ]
        convolve = _TRANSPOSED[count]
        return convolve(gradients, weight, None, stride, padding, rest, call["groups"], dilation)  # type: ignore[no-any-return]


def _folded(
    weight: torch.Tensor,
    gradients: torch.Tensor,
    shape: list[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> torch.Tensor:
    """The gradients of an input of that shape: of each window's elements by one product, and then added up."""
    windows = torch.matmul(weight.flatten(1).T, gradients.flatten(2))
    return functional.fold(windows, shape[2:], weight.shape[2:], dilation, padding, stride)  # type: ignore[arg-type]


class _TransposedRule(_Windows):
    """A transposed convolution: the transposed Jacobian of the convolution from output to input."""

    def multiply_adds(self, call: Call) -> int:
        return call.in_size * math.prod(call["weight"].shape[1:])

    def pattern(self, call: Call) -> Pattern:
        weight = call["weight"]
        copies, channels, *sizes = call.in_shape
        _, out_channels, *out_sizes = call.out_shape
        taps = tuple(weight.shape[2:])
        arguments = (pairs(call[name], len(taps)) for name in ("stride", "padding", "dilation"))
        # What is left over at the end is no window's start.
        axes = tuple(
            Sliding(out, kernel, step, before, (size - 1) * step + spread * (kernel - 1) + 1 - out - before, spread)
            for size, out, kernel, step, before, spread in zip(sizes, out_sizes, taps, *arguments, strict=True)
        )
        groups, kept = copies * call["groups"], _packed(call, copies)
        return Pattern.of(Convolution(copies * channels, copies * out_channels, groups, axes, kept, transposed=True))

    def pulled(self, call: Call, gradients: torch.Tensor, shape: list[int]) -> torch.Tensor:
        convolve = _CONVOLUTIONS[len(shape) - 2]
        arguments = (call[name] for name in ("stride", "padding", "dilation", "groups"))
        found = convolve(gradients, call["weight"].detach(), None, *arguments)
        # Padding of the output may have room for windows that no input position has.
        return found[(..., *(slice(size) for size in shape[2:]))]  # type: ignore[no-any-return]


@add_rule("aten.convolution")
class _ConvolutionRule(_Windows):
    """``aten.convolution``: either of the two."""

    def pattern(self, call: Call) -> Pattern:
        return _direction(call).pattern(call)

    def multiply_adds(self, call: Call) -> int:
        return _direction(call).multiply_adds(call)

    def pulled(self, call: Call, gradients: torch.Tensor, shape: list[int]) -> torch.Tensor:
        return _direction(call).pulled(call, gradients, shape)


def _direction(call: Call) -> _Windows:
    return _TransposedRule() if call["transposed"] else _ForwardRule()


def _packed(call: Call, copies: int) -> bytes | None:
    """The mask of the weights that are kept, as `Convolution` takes it."""
    kept = call.kept.get("weight")
    return None if kept is None else packed(kept, copies)


def packed(mask: torch.Tensor, copies: int) -> bytes:
    """A mask of weights, so many times over, as `Convolution` takes it."""
    return np.packbits(np.tile(mask.cpu().numpy().reshape(-1), copies)).tobytes()
