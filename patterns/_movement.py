"""Operators that move data: each output is one element of the input, or none of them.

Where each output comes from is asked of the operator itself, on the whole batch: it is given the elements' own numbers,
from 1 on, and zeros. What answers the same to both holds nothing of the input. So it is seen for certain, for this
batch, from which sample each element comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ._layout import WHOLE, Layout, MixedSamplesError, layouts_of_samples
from ._pattern import Pattern
from ._rules import Call, Placement, Rule, Sources, Use, add_rule
from ._strided import Strided, picking
from ._structure import Csr, Identity, frozen, index_dtype, row_starts

__all__: list[str] = []


def _numbered(like: torch.Tensor) -> torch.Tensor:
    """The elements' numbers from 1 on: as floats, which every operator takes, and exact."""
    return torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device).reshape(like.shape)


_NAMES = (
    "_unsafe_view alias as_strided cat channel_shuffle clone constant_pad_nd copy diag_embed diagonal "
    "diagonal_scatter expand fill flip gather im2col index index_copy index_fill index_put index_select "
    "masked_scatter permute pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat "
    "replication_pad1d replication_pad2d replication_pad3d roll rot90 scatter select select_scatter slice "
    "slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unfold unsafe_split "
    "unsafe_split_with_sizes unsqueeze view zero"
)
#: Those that put elements of an operand at places that indices tell.
_PUTS = {"aten.index_copy": "source", "aten.index_put": "values", "aten.scatter": "src"}
#: Those each element of whose result is one of an operand, in the order of the operands.
_BESIDE = frozenset(("aten.cat", "aten.stack"))
#: Those that keep their operand's elements in their order.
_IN_ORDER = frozenset(f"aten.{name}" for name in ["_unsafe_view", "alias", "clone", "squeeze", "unsqueeze", "view"])


@add_rule(*(f"aten.{name}" for name in _NAMES.split()), "jacsparse.overwrite")
class _MovementRule(Rule):
    """One, where an output is an element of the input."""

    several = True
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
        for name in ("accumulate", "reduce"):
            if call.arguments.get(name):
                raise call.unsupported(
                    f"{call.operator} with {name}={call[name]}", "add a tensor of zeros with the values put in"
                )

    def placement(self, use: Use) -> Placement:
        if use.operator == "aten.as_strided" and not _fills_memory(use.arguments["self"]):
            raise MixedSamplesError(
                "aten.as_strided reads memory beside its operand", "call .contiguous() on the tensor before"
            )
        if self.collides(use):
            raise MixedSamplesError(
                f"{use.operator} puts several elements at one place, and PyTorch does not say which of them stays",
                "give each place once",
            )
        if use.operator in _IN_ORDER and _keeps_order(use):
            ((name, layout),) = use.layouts.items()
            out = layout if layout == WHOLE else Layout(0, use.output.shape[0] // use.batch)
            return Placement({name: layout}, out, {name: Sources(1, use.output.numel() // use.batch, identity=True)})
        out, places = self.located(use)
        light = _light(use)

        def again(name: str) -> Callable[[], np.ndarray]:
            alone = replace(light, layouts={name: use.layouts[name]})
            return lambda: self.located(alone, out)[1][name]

        held = {name: _held(own, self.shape_of_places(use, name, out), again(name)) for name, own in places.items()}
        return Placement(dict(use.layouts), out, held)

    def shape_of_places(self, use: Use, name: str, out: Layout) -> tuple[int, ...]:
        """The shape of one sample's tensor whose elements have places in the other."""
        return out.shape_of_sample(use.output.shape)

    def located(self, use: Use, out: Layout | None = None) -> tuple[Layout, dict[str, np.ndarray]]:
        """Where the samples are in the output, and by operand where its elements come from in each sample."""
        sources = self.traced_together(use) or {name: self.traced(use, name) for name in use.layouts}
        if use.batch == 1:
            return WHOLE, {name: own.reshape(1, -1) for name, own in sources.items()}
        samples = {}
        for name, layout in use.layouts.items():
            of_elements = _samples_of(layout, use.arguments[name].shape, use.batch)
            samples[name] = of_elements, _taken(of_elements[0], sources[name])
        if out is None:
            out = next(iter(_common([layouts_of_samples(each, use.batch) for _, each in samples.values()])), None)
        if out is None:
            raise MixedSamplesError
        found = {}
        for name, own in sources.items():
            (_, place), _ = samples[name]
            found[name] = _by_sample(_taken(place, own), out, use.batch)
        return out, found

    def traced(self, use: Use, name: str) -> np.ndarray:
        """The number of the operand's element that each element of the whole output is, from 0 on; else -1."""
        moved, nothing = (use.evaluate(_in_place_of(use, name, make)) for make in (_numbered, torch.zeros_like))
        constant = (moved == nothing) | (moved.isnan() & nothing.isnan())
        return moved.masked_fill(constant, 0).to(torch.int64).numpy(force=True) - 1

    def collides(self, use: Use) -> bool:
        """Whether an element is put where another one then is: autograd has a gradient of both."""
        name = _PUTS.get(use.operator, "")
        if name not in use.layouts or use.arguments.get("accumulate"):
            return False
        arguments = _in_place_of(use, name, torch.ones_like)
        put = arguments[name]
        assert isinstance(put, torch.Tensor)
        with torch.enable_grad():
            y = use.evaluate({**arguments, name: put.requires_grad_()})
        (taken,) = torch.autograd.grad(y.sum(), put)
        places = self.traced(use, name)
        return int(taken.count_nonzero()) > len(np.unique(places[places >= 0]))

    def traced_together(self, use: Use) -> dict[str, np.ndarray] | None:
        """The same for all operands at once, of an operator that lays them beside each other."""
        tensors = [value for value in use.arguments.values() if isinstance(value, torch.Tensor)]
        if use.operator not in _BESIDE or len(use.layouts) == 1 or not all(t.is_floating_point() for t in tensors):
            return None
        sizes = [use.arguments[name].numel() for name in use.layouts]
        starts = dict(zip(use.layouts, itertools.accumulate(sizes, initial=0), strict=False))

        def numbered(name: str, like: torch.Tensor) -> torch.Tensor:
            return _numbered(like) + starts[name] if name in starts else like

        moved = use.evaluate(_replaced(use, numbered)).to(torch.int64).numpy(force=True) - 1
        found = {}
        for (name, start), size in zip(starts.items(), sizes, strict=True):
            own = moved - start
            own[(own < 0) | (own >= size)] = -1
            found[name] = own
        return found

    def shared(self, call: Call) -> bool:
        assert call.sources is not None
        return call.sources.rows == 1

    def pattern(self, call: Call) -> Pattern:
        assert call.sources is not None
        return _picking(call.sources, call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None and call.sources is not None
        if self.shared(call):
            return call.input.new_ones((pattern.nnz, 1))
        rows = np.repeat(np.arange(pattern.shape[0]), pattern.structure.row_counts())
        chosen = call.sources.array()[:, rows] == pattern.indices
        return torch.from_numpy(chosen.T).to(call.input).contiguous()


def _in_place_of(use: Use, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, object]:
    """An operator's arguments with another operand, and zeros for all other numbers that are no indices."""
    return _replaced(use, lambda other, zeros: make(zeros) if other == name else zeros)


def _replaced(use: Use, make: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, object]:
    """An operator's arguments: for all that are no indices what `make` makes of the argument's name and of zeros."""
    arguments: dict[str, object] = {}
    for other, value in use.arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            device = "cpu" if value.is_meta else value.device
            arguments[other] = make(other, torch.zeros(value.shape, dtype=torch.float64, device=device))
        else:
            arguments[other] = value
    return arguments


def _keeps_order(use: Use) -> bool:
    """Whether the samples are the slowest index of operand and output, whose elements are in the same order."""
    if len(use.layouts) != 1:
        return False
    ((name, layout),) = use.layouts.items()
    contiguous = use.output.numel() == use.arguments[name].numel()
    if layout == WHOLE:
        return contiguous
    first = layout.axis == 0 and not layout.minor
    return contiguous and first and use.output.ndim > 0 and use.output.shape[0] % use.batch == 0


def _fills_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.storage_offset() == 0


#: Bytes of places up to which they are held; others are worked out again where a pattern is asked for.
_HELD = 2**16


def _held(places: np.ndarray, shape: tuple[int, ...], again: Callable[[], np.ndarray]) -> Sources:
    rows, size = places.shape
    if rows == 1 and bool((places[0] == np.arange(size)).all()):
        return Sources(rows, size, identity=True)
    # How many columns there are is known where a pattern is asked for.
    strided = Strided.found(places.reshape(shape), int(places.max()) + 1) if rows == 1 and size else None
    if strided is not None:
        return Sources(rows, size, make=lambda: strided.sources().reshape(1, -1), strided=strided)
    narrow = places.astype(np.int32) if places.size and places.max() < 2**31 else places
    return Sources(rows, size, make=(lambda: narrow) if narrow.nbytes <= _HELD else again)


def _light(use: Use) -> Use:
    """The same use without its numbers: tensors are stood for by their shapes, but for indices and masks."""
    arguments = {}
    for name, value in use.arguments.items():
        if isinstance(value, torch.Tensor):
            floating = value.is_floating_point()
            value = (
                torch.empty(value.shape, dtype=value.dtype, device="meta") if floating else value.detach().cpu().clone()
            )
        arguments[name] = value
    return replace(use, arguments=arguments, output=torch.empty(use.output.shape, device="meta"))


def _samples_of(layout: Layout, shape: torch.Size, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The sample of each element of a whole tensor, and its place in that sample; both flat."""
    elements = torch.arange(shape.numel()).reshape(shape)
    split = layout.split(elements).reshape(batch, -1).numpy()
    sample, place = np.empty((2, shape.numel()), dtype=np.int64)
    sample[split] = np.arange(batch)[:, None]
    place[split] = np.arange(split.shape[1])
    return sample, place


def _taken(numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The numbers at some places; -1 where a place is none."""
    some = np.full(places.shape, -1, dtype=np.int64)
    some[places >= 0] = numbers[places[places >= 0]]
    return some


def _common(candidates: list[list[Layout]]) -> list[Layout]:
    """The layouts that all lists have, in the order of the first."""
    return [layout for layout in candidates[0] if all(layout in others for others in candidates[1:])]


def _by_sample(places: np.ndarray, layout: Layout, batch: int) -> np.ndarray:
    """Places of a whole output by sample, ``(batch, elements)``; one row where all are the same."""
    split = layout.split(torch.from_numpy(places)).reshape(batch, -1).numpy()
    return split[:1] if bool((split == split[0]).all()) else split


def _picking(given: Sources, columns: int) -> Pattern:
    """The pattern of outputs that are each one element, or none: in all samples the same, or in each another."""
    if given.identity and given.size == columns:
        return Pattern.of(Identity(columns))
    if given.strided is not None:
        return Pattern.of(replace(given.strided, columns=columns))
    sources = given.array()
    if len(sources) > 1:
        rows = np.broadcast_to(np.arange(sources.shape[1]), sources.shape)[sources >= 0]
        entries = np.unique(rows * columns + sources[sources >= 0])
        starts = np.bincount(entries // max(1, columns), minlength=sources.shape[1])
        dtype = index_dtype(len(entries), sources.shape[1], columns)
        indices = frozen((entries % max(1, columns)).astype(dtype))
        return Pattern.of(Csr(sources.shape[1], columns, frozen(row_starts(starts, dtype)), indices))
    return picking(sources[0], columns)


@add_rule("aten.col2im", "aten.index_add", "aten.scatter_add")
class _AddedRule(_MovementRule):
    """Each element is added to one output, or to none: the one whose gradient it is given."""

    def located(self, use: Use, out: Layout | None = None) -> tuple[Layout, dict[str, np.ndarray]]:
        """Where the samples are in the output, and by operand where its elements go to in each sample."""
        targets = {name: self.added(use, name) for name in use.layouts}
        if use.batch == 1:
            return WHOLE, {name: own.reshape(1, -1) for name, own in targets.items()}
        samples = np.full(use.output.numel(), -1)
        for name, layout in use.layouts.items():
            own, _ = _samples_of(layout, use.arguments[name].shape, use.batch)
            reached = targets[name].reshape(-1)
            samples[reached[reached >= 0]] = own[reached >= 0]
        candidates = layouts_of_samples(samples.reshape(use.output.shape), use.batch) if out is None else [out]
        for out in candidates:
            of_out, places = _samples_of(out, use.output.shape, use.batch)
            found = {}
            for name, layout in use.layouts.items():
                own, _ = _samples_of(layout, use.arguments[name].shape, use.batch)
                reached = targets[name].reshape(-1)
                if not bool((_taken(of_out, reached) == own)[reached >= 0].all()):
                    raise MixedSamplesError
                place = _taken(places, reached).reshape(use.arguments[name].shape)
                found[name] = _by_sample(place, layout, use.batch)
            return out, found
        raise MixedSamplesError

    def shape_of_places(self, use: Use, name: str, out: Layout) -> tuple[int, ...]:
        return use.layouts[name].shape_of_sample(use.arguments[name].shape)

    def added(self, use: Use, name: str) -> np.ndarray:
        """The number of the output's element that each element of an operand is added to, from 0 on; else -1."""
        arguments = _in_place_of(use, name, torch.zeros_like)
        if "alpha" in arguments:
            arguments["alpha"] = 1
        x = arguments[name]
        assert isinstance(x, torch.Tensor)
        with torch.enable_grad():
            y = use.evaluate({**arguments, name: x.requires_grad_()})
        (given,) = torch.autograd.grad(y, x, _numbered(y), materialize_grads=True)
        return given.to(torch.int64).numpy(force=True) - 1

    def pattern(self, call: Call) -> Pattern:
        assert call.sources is not None
        if call.sources.rows > 1:
            raise call.unsupported("indices that differ between the samples", "use the same for all")
        return _picking(call.sources, call.out_size).T

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        scale = 1 if call.argument == "self" else call.arguments.get("alpha", 1)
        return call.input.new_full((pattern.nnz, 1), scale)
