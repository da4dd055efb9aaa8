"""Where elements of views and concatenations come from, by steps, against the numbers of all elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from jacsparse.patterns import RULES, WHOLE, Layout, MixedSamplesError, Use
from jacsparse.patterns.moves_in_steps import placement_by_steps
from jacsparse.patterns.rules import Placement
from jacsparse.patterns.strided import Strided

aten = torch.ops.aten
places = st.integers(0, 3)
sizes = st.integers(1, 4)


def use_of_view(
    overload: Any, shape: tuple[int, ...], layout: Layout, batch: int, *numbers: Any, result: int = 0
) -> Use:
    """A view of a tensor whose samples lie so."""
    names = [parameter.name for parameter in overload._schema.arguments]
    arguments = dict(zip(names, [torch.zeros(shape), *numbers], strict=False))

    def evaluate(values: dict[str, Any]) -> torch.Tensor:
        view = overload(*values.values())
        return view if isinstance(view, torch.Tensor) else view[result]

    operator = overload._schema.name.replace("::", ".")
    return Use(operator, arguments, {"self": layout}, evaluate(arguments), batch, evaluate)


def use_of_concatenation(overload: Any, shapes: list[tuple[int, ...]], layout: Layout, batch: int, axis: int) -> Use:
    """Tensors side by side; the last of several is a constant."""
    arguments = {f"tensors.{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    layouts = dict.fromkeys(list(arguments)[: max(1, len(shapes) - 1)], layout)

    def evaluate(values: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = overload([values[name] for name in arguments], values["dim"])
        return result

    values = {**arguments, "dim": axis}
    return Use(overload._schema.name.replace("::", "."), values, layouts, evaluate(values), batch, evaluate)


def check(use: Use) -> Placement | None:
    """Compare places by steps, where there are any, with those of all elements."""
    placement = placement_by_steps(use)
    if placement is None:
        return None
    rule = RULES[use.operator]
    layout, expected = rule.located(use)  # type: ignore[attr-defined]
    assert placement.output == layout and placement.layouts == use.layouts
    assert placement.sources.keys() == expected.keys()
    shape = layout.shape_of_sample(use.output.shape)
    for name, numbers in expected.items():
        sources = placement.sources[name]
        assert (sources.rows, sources.size) == numbers.shape and np.array_equal(sources.array(), numbers)
        # The same description, of which digests of patterns are made.
        if sources.strided is None:
            assert np.array_equal(numbers, np.arange(sources.size)[None])
        else:
            assert sources.strided == Strided.from_sources(numbers.reshape(shape), sources.strided.columns)
    return placement


@st.composite
def batches(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, int]:
    """The shape of a tensor, the layout of its samples, and their number."""
    shape, batch = draw(st.lists(sizes, min_size=1, max_size=4)), draw(st.sampled_from([1, 2, 3]))
    axis, copies = draw(st.integers(0, len(shape) - 1)), draw(sizes)
    if batch == 1:
        return tuple(shape), WHOLE, 1
    shape[axis] = batch * copies
    return tuple(shape), Layout(axis, copies, copies > 1 and draw(st.booleans())), batch


@given(batches(), st.data())
def test_views(drawn: tuple[tuple[int, ...], Layout, int], data: st.DataObject) -> None:
    shape, layout, batch = drawn
    rank, numel = len(shape), int(np.prod(shape))
    axis, other = data.draw(st.integers(0, rank - 1)), data.draw(st.integers(0, rank - 1))
    begin, step = data.draw(st.integers(0, shape[axis] - 1)), data.draw(sizes)
    cuts = [divisor for divisor in range(1, numel + 1) if numel % divisor == 0]
    first = data.draw(st.sampled_from(cuts))
    second = data.draw(st.sampled_from([divisor for divisor in cuts if (numel // first) % divisor == 0]))
    calls: dict[str, tuple[Any, ...]] = {
        "alias": (aten.alias.default,),
        "clone": (aten.clone.default,),
        "view": (aten.view.default, [first, second, numel // first // second]),
        "_unsafe_view": (aten._unsafe_view.default, [numel // first, first]),
        "permute": (aten.permute.default, data.draw(st.permutations(range(rank)))),
        "transpose": (aten.transpose.int, axis, other),
        "select": (aten.select.int, axis, begin),
        "slice": (aten.slice.Tensor, axis, begin, shape[axis], step),
        "unsqueeze": (aten.unsqueeze.default, axis),
        "squeeze": (aten.squeeze.default,),
        "unfold": (aten.unfold.default, axis, begin + 1, step),
        "split": (aten.split.Tensor, step, axis),
        "split_with_sizes": (aten.split_with_sizes.default, [begin, shape[axis] - begin], axis),
        "unsafe_split": (aten.unsafe_split.Tensor, step, axis),
        "unbind": (aten.unbind.int, axis),
        "as_strided": (aten.as_strided.default, [first, numel // first, 2], [numel // first, 1, 0]),
    }
    if axis != other:
        calls["diagonal"] = (aten.diagonal.default, 0, axis, other)
    if 1 in shape:
        calls["expand"] = (aten.expand.default, [step if size == 1 else size for size in shape])
    overload, *numbers = calls[data.draw(st.sampled_from(sorted(calls)))]
    results = overload(torch.zeros(shape), *numbers)
    result = data.draw(st.integers(0, len(results) - 1)) if isinstance(results, (list, tuple)) else 0
    use = use_of_view(overload, shape, layout, batch, *numbers, result=result)
    try:
        RULES[use.operator].located(use)  # type: ignore[attr-defined]
    except MixedSamplesError:
        assert placement_by_steps(use) is None
    else:
        check(use)


@given(batches(), st.data())
def test_concatenations(drawn: tuple[tuple[int, ...], Layout, int], data: st.DataObject) -> None:
    shape, layout, batch = drawn
    if data.draw(st.booleans()):
        count, axis = data.draw(sizes), data.draw(st.integers(-len(shape) - 1, len(shape)))
        placement = check(use_of_concatenation(aten.stack.default, [shape] * count, layout, batch, axis))
        assert placement is not None
        return
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    assume(batch == 1 or axis % len(shape) != layout.axis)
    lengths = data.draw(st.lists(sizes, min_size=1, max_size=4))
    axis_size = axis % len(shape)
    shapes = [(*shape[:axis_size], length, *shape[axis_size + 1 :]) for length in lengths]
    assert check(use_of_concatenation(aten.cat.default, shapes, layout, batch, axis)) is not None


@pytest.mark.parametrize(
    ("overload", "shape", "layout", "numbers", "out"),
    [
        # Heads of attention: taken apart, brought beside the samples, and back.
        (aten.view.default, (3, 5, 12), Layout(0), ([3, 5, 4, 3],), Layout(0)),
        (aten.transpose.int, (3, 5, 4, 3), Layout(0), (1, 2), Layout(0)),
        (aten.view.default, (3, 4, 5, 3), Layout(0), ([12, 5, 3],), Layout(0, 4)),
        (aten.view.default, (12, 5, 3), Layout(0, 4), ([3, 4, 5, 3],), Layout(0)),
        # Samples beside the tokens.
        (aten.transpose.int, (3, 5, 12), Layout(0), (0, 1), Layout(1)),
        (aten.view.default, (5, 3, 12), Layout(1), ([5, 12, 3],), Layout(1, 4)),
        (aten.view.default, (5, 3, 12), Layout(1), ([15, 12],), Layout(0, 5, minor=True)),
        (aten.view.default, (15, 12), Layout(0, 5, minor=True), ([5, 3, 12],), Layout(1)),
        # Windows of an image.
        (aten.view.default, (3, 4, 4, 2), Layout(0), ([3, 2, 2, 2, 2, 2],), Layout(0)),
        (aten.permute.default, (3, 2, 2, 2, 2, 2), Layout(0), ([0, 1, 3, 2, 4, 5],), Layout(0)),
        (aten.clone.default, (5, 3, 12), Layout(1), (), Layout(1)),
        (aten.expand.default, (3, 1, 2), Layout(0), ([3, 4, 2],), Layout(0)),
    ],
)
def test_views_of_networks(overload: Any, shape: Any, layout: Layout, numbers: Any, out: Layout) -> None:
    placement = check(use_of_view(overload, shape, layout, 3, *numbers))
    assert placement is not None and placement.output == out


def test_steps_tell_nothing_of_other_operators() -> None:
    x, rows = (2, 3, 4), Layout(0)
    assert placement_by_steps(use_of_view(aten.flip.default, x, rows, 2, [1])) is None
    assert placement_by_steps(use_of_view(aten.select.int, x, rows, 2, 0, 1)) is None
    assert placement_by_steps(use_of_view(aten.view.default, (2, 3, 0), rows, 2, [2, 0])) is None
    assert placement_by_steps(use_of_concatenation(aten.cat.default, [x, x], rows, 2, 0)) is None
