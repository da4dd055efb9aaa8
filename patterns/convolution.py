"""Convolution; a pruned linear layer is a convolution over no axis at all.

A convolution slides its kernel over the input; for tap ``k`` of the kernel let ``S_k`` be the matrix over positions
with a one where output position ``o`` meets input position ``i`` under that tap. Then, with positions flattened and
the channel outermost, the Jacobian is a sum of Kronecker products (shapes ``C_out × C_in`` and ``P_out × P_in``)::

    J = Σ_k  W[:, :, k] ⊗ S_k            y[c, o] = Σ_{d, i}  J[(c, o), (d, i)] · x[d, i]

``S_k`` holds at most one entry in each row and column, so each entry of `J` is exactly one weight: values are a gather.
In row ``(c, o)`` the entries sort by channel ``d`` and then by tap; in row ``(d, i)`` of the transpose by channel ``c``
and then by *falling* tap. Both follow from ``i = o·stride - padding + k·dilation``. No sorting is ever needed.

Places where the same taps meet a position are of one *kind*: inside the image there is one kind for each remainder of
the stride, and a few more along its edges. All rows of a channel whose places are of one kind have the same weights,
and their columns differ by a shift. So each row is a copy of the *template* of its kind, and values are filled at the
speed of memory.

Source: thesis, section 3.4 and Algorithms 2 to 4, for 3×3 kernels with padding 1; there, positions that wrap around
have entries too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional, grad

from ..runtime import frozen, index_dtype, kernel, row_starts, run_rows
from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .sliding import Sliding, described_axes, joined, pairs, restored_axes
from .structure import Arrays, Structure, byte_array, check_size, flag, natural
from .value_kernels import repeated, repeated_shifted, take


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


@kernel
def _meet_shifted(first, last, source, start, indptr, shift, occupied, pairs):
    for row in range(first, last):
        template, offset = source[start[row] : start[row] + indptr[row + 1] - indptr[row]], shift[row]
        total = 0
        for place in range(len(template)):
            total += occupied[template[place] + offset]
        pairs[row] = total


@dataclass(frozen=True)
class Convolution(Structure):
    """The Jacobian of a convolution, or its transpose.

    Attributes
    ----------
    out_channels, in_channels, groups : int
        As in ``torch.nn.Conv2d``.
    axes : tuple of Sliding
        The spatial axes; none for a linear layer.
    mask_bits : bytes or None
        ``numpy.packbits`` of the mask of weights that are not pruned, of shape ``(out_channels, in_channels // groups,
        taps)``; None where none is pruned.
    transposed : bool
        Whether this is the structure of the transposed Jacobian.
    """

    out_channels: int
    in_channels: int
    groups: int
    axes: tuple[Sliding, ...]
    mask_bits: bytes | None = None
    transposed: bool = False

    @property
    def name(self) -> str:
        """A linear layer is a convolution without axes."""
        return "Convolution" if self.axes else "Linear"

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Output channels, input channels of a group, taps."""
        return (self.out_channels, self.in_channels // self.groups, math.prod(axis.kernel for axis in self.axes))

    @property
    def _row_channels(self) -> int:
        return self.in_channels if self.transposed else self.out_channels

    @property
    def shape(self) -> tuple[int, int]:
        out = self.out_channels * math.prod(axis.windows for axis in self.axes)
        into = self.in_channels * math.prod(axis.size for axis in self.axes)
        return (into, out) if self.transposed else (out, into)

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        """Places of the unpruned weights in the flattened weight, ascending."""
        count = math.prod(self.weight_shape)
        if self.mask_bits is None:
            return np.arange(count)
        bits = np.unpackbits(np.frombuffer(self.mask_bits, dtype=np.uint8), count=count)
        # NumPy finds booleans several times as fast.
        return np.flatnonzero(bits.view(np.bool_))

    @functools.cached_property
    def nnz(self) -> int:
        # Python's integers: the numbers in a file may exceed all others.
        met = np.ones(1, dtype=object)
        for axis in self.axes:
            met = np.outer(met, (axis.sources >= 0).sum(axis=0).astype(object)).ravel()
        out_channels, inner, taps = self.weight_shape
        if self.mask_bits is None:
            return int(out_channels * inner * met.sum())
        return int(np.bincount(self._weights % taps, minlength=taps).astype(object) @ met)

    @functools.cached_property
    def T(self) -> Convolution:
        transpose = replace(self, transposed=not self.transposed)
        # Both directions share what has been computed: these arrays are several times as large as the weight.
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
        """Each row channel's unpruned weights in the order of columns: starts, column channels, taps and places."""
        if self.mask_bits is None:
            return self._all_cells()
        out_channels, inner, taps = self.weight_shape
        out_channel, in_channel, tap = self._places
        if not self.transposed:
            row, column, weight = out_channel, in_channel, self._weights
        else:
            # Sorted by row channel, column channel and falling tap, all three in one number.
            order = np.sort((in_channel * out_channels + out_channel) * taps + (taps - 1 - tap))
            row, column, falling = np.unravel_index(order, (self.in_channels, out_channels, taps))
            tap = taps - 1 - falling
            weight = (column * inner + row % max(1, inner)) * taps + tap
        starts = row_starts(np.bincount(row, minlength=self._row_channels), np.int64)
        return starts, column, tap.astype(np.int32), weight

    def _all_cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`_cells` where no weight is pruned."""
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
        column, tap = (np.broadcast_to(part, weight.shape).ravel() for part in (column, tap.astype(np.int32)))
        return np.arange(rows + 1) * (partners * taps), column, tap, weight.ravel()

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output channel, input channel (numbered through all groups) and tap of each unpruned weight."""
        out_channels, inner, _ = self.weight_shape
        out_channel, within, tap = np.unravel_index(self._weights, self.weight_shape)
        return out_channel, out_channel // max(1, out_channels // self.groups) * inner + within, tap

    @functools.cached_property
    def _kinds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first place of each kind, the kind of each place, and which taps a kind meets."""
        firsts, kinds, taps = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=np.bool_)
        for axis in self.axes:
            met = (axis.targets if self.transposed else axis.sources) >= 0
            of_kind, first, kind = np.unique(met, axis=0, return_index=True, return_inverse=True)
            # Kinds are numbered in the order of their first places.
            order = np.argsort(first)
            taps = np.kron(taps, of_kind[order])
            firsts = (firsts[:, None] * len(met) + first[order]).ravel()
            kinds = (kinds[:, None] * len(order) + np.argsort(order)[kind.reshape(-1)]).ravel()
        return firsts, kinds, taps

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        """Entries of each channel's row, ``(channels, kinds)``."""
        _, _, taps = self._kinds
        channels, (out_channels, inner, _) = self._row_channels, self.weight_shape
        if self.mask_bits is None:
            partners = out_channels // self.groups if self.transposed else inner
            return np.tile(np.count_nonzero(taps, axis=1) * partners, (channels, 1))
        return np.asarray(self._weights_by_tap @ taps.T).astype(np.int64)

    @functools.cached_property
    def _weights_by_tap(self) -> np.ndarray:
        """How many weights of each row channel are unpruned, by tap; BLAS multiplies floats, which are exact here."""
        taps, (out_channel, in_channel, tap) = self.weight_shape[2], self._places
        row = in_channel if self.transposed else out_channel
        count = self._row_channels * taps
        return np.bincount(row * taps + tap, minlength=count).reshape(-1, taps).astype(np.float64)

    def row_counts(self) -> np.ndarray:
        return self._counts[:, self._kinds[1]].ravel()

    @functools.cached_property
    def _indptr(self) -> np.ndarray:
        return frozen(row_starts(self.row_counts(), index_dtype(self.nnz, *self.shape)))

    @functools.cached_property
    def _templates(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts of all templates, those of each channel by kind; and the start of each row's template."""
        firsts, kinds, _ = self._kinds
        starts = row_starts(self._counts.ravel(), np.int64)
        channels = np.arange(self._row_channels)[:, None]
        return starts, frozen(starts[:-1][(channels * len(firsts) + kinds).ravel()])

    def _of_templates(self, base: np.ndarray, step: int, dtype: Any) -> np.ndarray:
        """``base + step · position`` for each entry of all templates, at the first places of their kinds."""
        starts, _ = self._templates
        firsts, _, _ = self._kinds
        cells, _, tap, _ = self._cells
        out = np.empty(int(starts[-1]), dtype=dtype)
        run_rows(_cells_met, starts, starts, cells, tap, base, step, self.positions[firsts], out)
        return frozen(out)

    def csr(self) -> Arrays:
        template, shift = self._column_templates
        return self._indptr, frozen(repeated_shifted(template, self._templates[1], self._indptr, shift))

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        if occupied.all():
            return self.row_counts()
        pairs = np.zeros(self.shape[0], dtype=np.int64)
        if not occupied.any():
            return pairs
        template, shift = self._column_templates
        _, start = self._templates
        run_rows(_meet_shifted, self._indptr, template, start, self._indptr, shift, occupied, pairs)
        return pairs

    @property
    def _column_templates(self) -> Arrays:
        """The columns of all templates; and by how much the columns of each row exceed those of its template."""
        _, column, _, _ = self._cells
        positions, dtype = self.positions, self._indptr.dtype
        columns = self.shape[1] // max(1, self.out_channels if self.transposed else self.in_channels)
        firsts, kinds, _ = self._kinds
        # The shift from the first place of the kind is the same for each tap that meets a position.
        tap = (positions >= 0).argmax(axis=1)
        shift = positions[np.arange(len(tap)), tap] - positions[firsts[kinds], tap]
        return self._of_templates(column * columns, 1, dtype), np.tile(shift.astype(dtype), self._row_channels)

    @functools.cached_property
    def _gather(self) -> np.ndarray:
        """The place in the flattened weight of each entry of all templates, in the narrowest dtype."""
        _, _, _, weight = self._cells
        return self._of_templates(weight, 0, np.min_scalar_type(max(0, math.prod(self.weight_shape) - 1)))

    def values(self, weight: torch.Tensor) -> torch.Tensor:
        """The entries' values, ``(nnz, 1)``, from a weight of `weight_shape` in C order."""
        template = take(weight, self._gather)
        # Where no two rows are alike, the templates are the rows.
        return template if len(template) == self.nnz else repeated(template, self._templates[1], self._indptr)

    def describe(self) -> Mapping[str, Any]:
        return {
            "out_channels": self.out_channels,
            "in_channels": self.in_channels,
            "groups": self.groups,
            "axes": described_axes(self.axes),
            "pruned": self.mask_bits is not None,
            "mask_bits": np.frombuffer(self.mask_bits or b"", dtype=np.uint8),
            "transposed": self.transposed,
        }

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Convolution:
        out_channels, in_channels, groups = (natural(description, n) for n in ("out_channels", "in_channels", "groups"))
        if not groups or out_channels % groups or in_channels % groups:
            raise ValueError(f"groups is {groups}; it must divide {out_channels} and {in_channels} channels")
        axes = restored_axes(description)
        bits = byte_array(description, "mask_bits").tobytes()
        mask_bits = bits if flag(description, "pruned") else None
        structure = cls(out_channels, in_channels, groups, axes, mask_bits, flag(description, "transposed"))
        check_size(structure, math.prod(structure.weight_shape))
        expected = -(-math.prod(structure.weight_shape) // 8)
        if structure.mask_bits is not None and len(structure.mask_bits) != expected:
            raise ValueError(
                f"mask_bits has {len(structure.mask_bits)} bytes; a mask over {structure.weight_shape} needs {expected}"
            )
        return structure


def packed(mask: torch.Tensor | None, copies: int) -> bytes | None:
    """A mask of weights, repeated `copies` times, as `Convolution` takes it."""
    return None if mask is None else np.packbits(np.tile(mask.cpu().numpy().reshape(-1), copies)).tobytes()


@add_rule("aten.convolution")
class _ConvolutionRule(Rule):
    """A weight slid over the input, shared by all samples.

    A transposed convolution has the transposed Jacobian of the convolution from its output to its input. A sample that
    is a batch of `k` to the operator has `k` times as many groups, and the weight `k` times over.
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

    def multiply_adds(self, call: Call) -> int:
        return (call.in_size if call["transposed"] else call.out_size) * math.prod(call["weight"].shape[1:])

    def pattern(self, call: Call) -> Pattern:
        weight, transposed = call["weight"], call["transposed"]
        image, windows = (call.out_shape, call.in_shape) if transposed else (call.in_shape, call.out_shape)
        copies, channels, *sizes = image
        arguments = (pairs(call[name], len(sizes)) for name in ("stride", "padding", "dilation"))
        axes = []
        lengths = zip(sizes, windows[2:], weight.shape[2:], *arguments, strict=True)
        for size, count, taps, stride, before, dilation in lengths:
            # The output of a transposed convolution may have positions at its end that no window reaches.
            after = (count - 1) * stride + dilation * (taps - 1) + 1 - size - before if transposed else before
            axes.append(Sliding(size, taps, stride, before, after, dilation))
        out_channels, groups = copies * weight.shape[0], copies * call["groups"]
        bits = packed(call.masks.get("weight"), copies)
        return Pattern.of(Convolution(out_channels, copies * channels, groups, tuple(axes), bits, transposed))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert isinstance(pattern.structure, Convolution)
        return pattern.structure.values(self._weight(call))

    # The structure knows its orientation, and so the order of its weights.
    transposed_values = values

    def _weight(self, call: Call) -> torch.Tensor:
        weight, copies = call["weight"], call.in_shape[0]
        return weight if copies == 1 else weight.repeat(copies, *[1] * (weight.ndim - 1))

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        images = gradients.flatten(0, 1).flatten(0, 1)
        sizes = call.in_shape[2:]
        if call["transposed"]:
            arguments = (call[name] for name in ("stride", "padding", "dilation", "groups"))
            convolve = getattr(functional, f"conv{len(sizes)}d")
            pulled = convolve(images, call["weight"].detach(), None, *arguments)
            # Padding of the output may have room for windows that no input position has.
            pulled = pulled[(..., *(slice(size) for size in sizes))]
        else:
            pulled = input_gradients(call, images, [len(images), *call.in_shape[1:]])
        return pulled.reshape(*gradients.shape[:2], *call.in_shape)


def input_gradients(arguments: Call | Mapping[str, Any], gradients: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradients of a convolution's input of that shape, from those of its output.

    `arguments` are those of ``aten.convolution`` with ``transposed=False``.
    """
    weight, count = arguments["weight"].detach(), len(shape) - 2
    stride, padding, dilation = (pairs(arguments[name], count) for name in ("stride", "padding", "dilation"))
    if weight.dtype != torch.float32:
        gradient = getattr(grad, f"conv{count}d_input")
        return gradient(shape, weight, gradients, stride, padding, dilation, arguments["groups"])  # type: ignore[no-any-return]
    out_channels, channels, *kernel_size = weight.shape
    reach = [step * (taps - 1) for step, taps in zip(dilation, kernel_size, strict=True)]
    if weight.is_cpu and count == 2 and arguments["groups"] == 1:
        # oneDNN's kernels work on 16 channels at once, however few there are.
        if channels <= (8 if out_channels >= 16 else 4) and max(dilation) == 1:
            # It reads the shape alone of the input.
            x = gradients.new_empty(()).expand(shape)
            backward = torch.ops.aten._slow_conv2d_backward.output_mask
            return backward(gradients, x, weight, kernel_size, stride, padding, [True, False, False])[0]  # type: ignore[no-any-return]
        outer = [most - before for most, before in zip(reach, padding, strict=True)]
        if out_channels < 16 and min(outer) >= 0 and max(stride) == 1:
            return functional.conv2d(gradients, weight.flip(2, 3).transpose(0, 1), None, 1, outer, dilation)
    # On CPUs up to twice as fast as autograd's own backward, but in float32 alone.
    sizes = zip(shape[2:], gradients.shape[2:], reach, stride, padding, strict=True)
    output_padding = [size - ((out - 1) * step - 2 * before + most + 1) for size, out, most, step, before in sizes]
    convolve = getattr(functional, f"conv_transpose{count}d")
    return convolve(gradients, weight, None, stride, padding, output_padding, arguments["groups"], dilation)  # type: ignore[no-any-return]
