"""Operators that move data: each output is one element of the input, or none of them.

Of views and concatenations their steps tell where each output comes from: `moves_in_steps.py`. Of all others the
operator itself tells, on the whole batch: it is run on the numbers of the elements, from 1 on, and on zeros. An output
that is the same in both runs does not depend on the input. So the sample from which each element comes is certain for
this batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ..runtime import frozen, index_dtype, row_starts
from .engine import gradient_of
from .layout import WHOLE, Layout, MixedSamplesError, layouts_of_samples
from .moves_in_steps import placement_by_steps
from .pattern import Pattern
from .rules import Call, Placement, Rule, Sources, Use, add_rule
from .strided import Strided, pattern_from_sources
from .structure import Csr, Identity


def _numbered(like: torch.Tensor) -> torch.Tensor:
    """The elements' numbers from 1 on: exact, and as floats, which every operator takes."""
    return torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device).reshape(like.shape)


_NAMES = (
    "_unsafe_view alias as_strided cat channel_shuffle clone constant_pad_nd copy diag_embed diagonal "
    "diagonal_scatter expand fill flip gather im2col index index_copy index_fill index_select masked_scatter "
    "masked_scatter_backward permute pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d "
    "repeat replication_pad1d replication_pad2d replication_pad3d roll rot90 scatter select select_scatter slice "
    "slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unfold unsafe_split "
    "unsafe_split_with_sizes unsqueeze view zero"
)
#: Operators that put elements of an operand at places that indices name, and that operand.
_PUTS = {"aten.index_copy": "source", "aten.index_put": "values", "aten.scatter": "src"}
#: Operators that move elements of their operands, and compute nothing of them.
MOVEMENTS = frozenset((*(f"aten.{name}" for name in _NAMES.split()), "jacsparse.gather"))


@add_rule(*MOVEMENTS)
class _MovementRule(Rule):
    """A value is one where an output is an element of the input."""

    several = True
    operands_apart = True
    all_results = True
    reads_contents = True
    reads = ()

    def check(self, call: Call) -> None:
        chosen = [n for n in sorted(call.dependent) if n in call.arguments and not call[n].is_floating_point()]
        if chosen:
            raise call.unsupported(
                f"{', '.join(chosen)} of {call.operator} depends on the input: which elements are taken is known only "
                "when it runs",
                "take them by a product with zeros and ones, or by torch.where",
            )
        if call.arguments.get("reduce"):
            raise call.unsupported(
                f"{call.operator} with reduce={call['reduce']}", "add a tensor of zeros with the values put in"
            )

    def placement(self, use: Use) -> Placement:
        if use.operator == "aten.as_strided":
            x = use.arguments["self"]
            if not x.is_contiguous() or x.storage_offset():
                raise MixedSamplesError(
                    "aten.as_strided reads memory beside its operand", "call .contiguous() on the tensor before"
                )
        if self.collides(use):
            raise MixedSamplesError(
                f"{use.operator} puts several elements at one place, and PyTorch does not say which of them stays",
                "give each place once",
            )
        by_steps = placement_by_steps(use)
        if by_steps is not None:
            return by_steps
        out, places = self.located(use)
        sources = {name: _sources(array, self.shape_of_places(use, name, out)) for name, array in places.items()}
        return Placement(dict(use.layouts), out, sources)

    def shape_of_places(self, use: Use, name: str, out: Layout) -> tuple[int, ...]:
        """The shape of one sample of the tensor whose elements' places `located` returns."""
        return out.shape_of_sample(use.output.shape)

    def located(self, use: Use) -> tuple[Layout, dict[str, np.ndarray]]:
        """The output's layout, and for each operand the place from which each output comes, in each sample."""
        sources = {name: self.traced(use, name) for name in use.layouts}
        if use.batch == 1:
            return WHOLE, {name: array.reshape(1, -1) for name, array in sources.items()}
        samples = {
            name: _samples_of(layout, use.arguments[name].shape, use.batch) for name, layout in use.layouts.items()
        }
        candidates = [
            layouts_of_samples(_looked_up(sample, sources[name]), use.batch) for name, (sample, _) in samples.items()
        ]
        out = next((layout for layout in candidates[0] if all(layout in others for others in candidates)), None)
        if out is None:
            raise MixedSamplesError
        places = {
            name: _by_sample(_looked_up(samples[name][1], array), out, use.batch) for name, array in sources.items()
        }
        return out, places

    def traced(self, use: Use, name: str) -> np.ndarray:
        """The number of the operand's element that each element of the whole output is, from 0 on; else -1."""
        arguments = _with_operand(use, name, _numbered)
        moved, numbers = use.evaluate(arguments), arguments[name]
        assert isinstance(numbers, torch.Tensor)
        if moved.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr():
            # A view has no other elements.
            return moved.to(torch.int64).numpy(force=True) - 1
        zero = use.evaluate(_with_operand(use, name, torch.zeros_like))
        constant = (moved == zero) | (moved.isnan() & zero.isnan())
        return moved.masked_fill(constant, 0).to(torch.int64).numpy(force=True) - 1

    def collides(self, use: Use) -> bool:
        """Whether two elements are put at one place: then autograd has a gradient of both."""
        name = _PUTS.get(use.operator, "")
        if name not in use.layouts or use.arguments.get("accumulate"):
            return False
        arguments = _with_operand(use, name, torch.ones_like)
        x = arguments[name]
        assert isinstance(x, torch.Tensor)
        with torch.enable_grad():
            total = use.evaluate({**arguments, name: x.requires_grad_()}).sum()
        (gradient,) = torch.autograd.grad(total, x)
        places = self.traced(use, name)
        return int(gradient.count_nonzero()) > len(np.unique(places[places >= 0]))

    def shared(self, call: Call) -> bool:
        assert call.sources is not None
        return call.sources.rows == 1

    def factor(self, call: Call) -> float | None:
        return 1.0 if self.shared(call) and call.arguments.get("alpha", 1) == 1 else None

    def pattern(self, call: Call) -> Pattern:
        assert call.sources is not None
        return _pattern(call.sources, call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.sources is not None
        if self.shared(call):
            return call.input.new_ones((pattern.nnz, 1))
        chosen = call.sources.array()[:, pattern.rows] == pattern.indices
        return torch.from_numpy(chosen.T).to(call.input).contiguous()


@add_rule("aten.lu_unpack")
class _UnpackRule(_MovementRule):
    """The triangular factors of a matrix from one tensor that has both; those of the permutation move no element."""

    reads_contents = False

    def check(self, call: Call) -> None:
        """All uses have a Jacobian."""


def _with_operand(use: Use, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, object]:
    """An operator's arguments with another operand, and with zeros for all other floating-point tensors."""
    arguments: dict[str, object] = {}
    for other, value in use.arguments.items():
        arguments[other] = value
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            device = "cpu" if value.is_meta else value.device
            zeros = torch.zeros(value.shape, dtype=torch.float64, device=device)
            arguments[other] = make(zeros) if other == name else zeros
    return arguments


def _sources(places: np.ndarray, shape: tuple[int, ...]) -> Sources:
    """The places, ``(rows, size)``, in the smallest form; a sample has that shape."""
    rows, size = places.shape
    if rows == 1 and bool((places[0] == np.arange(size)).all()):
        return Sources(rows, size)
    # The number of columns is not known before a pattern is made.
    strided = Strided.from_sources(places.reshape(shape), int(places.max()) + 1) if rows == 1 and size else None
    if strided is not None:
        return Sources(rows, size, strided=strided)
    narrow = places.astype(np.int32) if places.size and places.max() < 2**31 else places
    return Sources(rows, size, narrow)


def _samples_of(layout: Layout, shape: torch.Size, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The sample of each element of a whole tensor, and its place in that sample; both flat."""
    elements = torch.arange(shape.numel(), device="cpu").reshape(shape)
    split = layout.split(elements).reshape(batch, -1).numpy()
    sample, place = np.empty((2, shape.numel()), dtype=np.int64)
    sample[split] = np.arange(batch)[:, None]
    place[split] = np.arange(split.shape[1])
    return sample, place


def _looked_up(numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The numbers at the places; -1 where a place is negative."""
    result = np.full(places.shape, -1, dtype=np.int64)
    result[places >= 0] = numbers[places[places >= 0]]
    return result


def _by_sample(places: np.ndarray, layout: Layout, batch: int) -> np.ndarray:
    """Places of a whole tensor by sample, ``(batch, elements)``; one row where all are the same."""
    split = layout.split(torch.from_numpy(places)).reshape(batch, -1).numpy()
    return split[:1] if bool((split == split[0]).all()) else split


def _pattern(sources: Sources, columns: int) -> Pattern:
    """The pattern with an entry for each output and each of its sources, in any sample."""
    if sources.strided is not None:
        return Pattern.of(replace(sources.strided, columns=columns))
    if sources.places is None and sources.size == columns:
        return Pattern.of(Identity(columns))
    places = sources.array()
    if len(places) == 1:
        return pattern_from_sources(places[0], columns)
    rows = np.broadcast_to(np.arange(sources.size), places.shape)[places >= 0]
    entries = np.unique(rows * columns + places[places >= 0])
    counts = np.bincount(entries // max(1, columns), minlength=sources.size)
    dtype = index_dtype(len(entries), sources.size, columns)
    indices = frozen((entries % max(1, columns)).astype(dtype))
    return Pattern.of(Csr(sources.size, columns, frozen(row_starts(counts, dtype)), indices))


@add_rule(
    *("aten.col2im", "aten.index_add", "aten.scatter_add"),
    *(f"aten.replication_pad{axes}d_backward" for axes in (1, 2, 3)),
)
class _AddedRule(_MovementRule):
    """Each element is added to one output, or to none: its gradient is that output's."""

    def located(self, use: Use) -> tuple[Layout, dict[str, np.ndarray]]:
        """The output's layout, and for each operand the place to which each element is added, in each sample."""
        targets = {name: self.added(use, name) for name in use.layouts}
        if use.batch == 1:
            return WHOLE, {name: target.reshape(1, -1) for name, target in targets.items()}
        samples = {
            name: _samples_of(layout, use.arguments[name].shape, use.batch)[0] for name, layout in use.layouts.items()
        }
        out_samples = np.full(use.output.numel(), -1)
        for name, target in targets.items():
            flat = target.reshape(-1)
            out_samples[flat[flat >= 0]] = samples[name][flat >= 0]
        out = next(iter(layouts_of_samples(out_samples.reshape(use.output.shape), use.batch)), None)
        if out is None:
            raise MixedSamplesError
        out_sample, out_place = _samples_of(out, use.output.shape, use.batch)
        places = {}
        for name, target in targets.items():
            flat = target.reshape(-1)
            if not bool((_looked_up(out_sample, flat) == samples[name])[flat >= 0].all()):
                raise MixedSamplesError
            places[name] = _by_sample(_looked_up(out_place, target), use.layouts[name], use.batch)
        return out, places

    def shape_of_places(self, use: Use, name: str, out: Layout) -> tuple[int, ...]:
        return use.layouts[name].shape_of_sample(use.arguments[name].shape)

    def added(self, use: Use, name: str) -> np.ndarray:
        """The number of the output's element that each element of an operand is added to, from 0 on; else -1."""
        arguments = _with_operand(use, name, torch.zeros_like)
        if "alpha" in arguments:
            arguments["alpha"] = 1
        x = arguments[name]
        assert isinstance(x, torch.Tensor)
        with torch.enable_grad():
            y = use.evaluate({**arguments, name: x.requires_grad_()})
        return gradient_of(y, x, _numbered(y)).to(torch.int64).numpy(force=True) - 1

    def pattern(self, call: Call) -> Pattern:
        assert call.sources is not None
        if call.sources.rows > 1:
            raise call.unsupported("indices that differ between the samples", "use the same for all")
        pattern = _pattern(call.sources, call.out_size).T
        return pattern if _scale(call) == 1 else pattern.scaled()

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return call.input.new_full((pattern.nnz, 1), _scale(call))


def _scale(call: Call) -> float:
    """The number by which the elements are multiplied before they are added."""
    return 1 if call.argument == "self" else call.arguments.get("alpha", 1)


@add_rule("aten.index_put")
class _IndexPutRule(_AddedRule):
    """Elements are put at places, or added there with `accumulate`, as the backward pass of ``aten.index`` does."""

    def located(self, use: Use) -> tuple[Layout, dict[str, np.ndarray]]:
        return _rule_of_put(use).located(self, use)

    def shape_of_places(self, use: Use, name: str, out: Layout) -> tuple[int, ...]:
        return _rule_of_put(use).shape_of_places(self, use, name, out)

    def pattern(self, call: Call) -> Pattern:
        return _rule_of_put(call).pattern(self, call)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return _rule_of_put(call).values(self, call, pattern)


def _rule_of_put(call: Use | Call) -> type[_MovementRule]:
    return _AddedRule if call.arguments.get("accumulate") else _MovementRule
