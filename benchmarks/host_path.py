"""The host's part of calls on a GPU, on one that is made up: nodes, functions called, and time.

They are calls of recurrent layers, of products, of compiled Jacobians, and of scans.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jacsparse.figures import BLUE, GREEN, ORANGE

from ._context import Context, Timing
from ._experiment import Experiment
from ._figures import Bars, Line, Panel, Picture
from ._host_path import BACKWARD, FORWARD, NOTHING, VECTORS, WITH_INPUT
from ._programs import JsonProgram
from ._rows import Comparison, Group, Row, reason, values_of, where

#: The most steps of a pass in one launch, and the most nodes of each part up to there and beyond.
_ONE_LAUNCH = 2000
_NODES = {FORWARD: (2, 2), BACKWARD: (3, 6), WITH_INPUT: (4, 6)}
#: The most functions of Python's that a product takes, and one with vectors; and its nodes.
_PRODUCT, _PRODUCT_WITH_VECTORS, _PRODUCT_NODES = 20, 25, 1
#: The most functions of Python's of a layer's parts, and the longest time over that of a Function without work.
_PYTHON = {FORWARD: 60, BACKWARD: 90, WITH_INPUT: 90}
_TIMES = {FORWARD: 5.0, BACKWARD: 3.5}
#: The most functions of Python's of a call of a compiled Jacobian.
_PYTHON_OF_JACOBIAN = 40
#: The most nodes of a compiled Jacobian for each level of dependence, and of a scan's backward pass for each product.
_NODES_FOR_EACH = {"levels": 1.0, "products": 1.2}
#: Entries of a case's data that a row's label has.
_NAMED = ("layer", "batch", "equation", "size", "network", "schedule")
#: Layers beside that of one direction.
_LAYERS: dict[str, dict[str, Any]] = {
    "": {},
    "two directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
}
#: Turns of each function, many short ones: what else the machine does takes both alike.
_ROUNDS = 25
#: The parts that single layers have in each part of two layers: the second one's input has a gradient.
_TWO_LAYERS = {
    FORWARD: (FORWARD, FORWARD),
    BACKWARD: (BACKWARD, WITH_INPUT),
    WITH_INPUT: (WITH_INPUT, WITH_INPUT),
}
_SHORT = {FORWARD: "forward", BACKWARD: "backward", WITH_INPUT: "with the input's gradient"}


@dataclass(frozen=True)
class HostPath(Experiment):
    """What a call costs the host: the nodes that a captured graph would have, functions called, and time.

    Nodes are launches of ours and kernels of PyTorch's. Times are those of the shortest sequences, and of a Function
    with the same inputs and outputs that computes nothing: what PyTorch itself takes.
    """

    #: Layers, and elements of a step's input.
    kinds: tuple[tuple[str, int], ...] = (("RNN", 1), ("GRU", 12), ("LSTM", 12))
    #: Lengths of the sequences, and samples per batch; the first ones of both are timed.
    times: tuple[int, ...] = (10, 1000, 30_000)
    batches: tuple[int, ...] = (1, 16)
    hidden: int = 20
    #: Methods of products, and products with vectors.
    methods: tuple[str, ...] = ("merge", "slots", "rowwise", "scale", "dense", "select", VECTORS)
    #: Discretised equations, and their sizes.
    equations: tuple[tuple[str, int], ...] = (
        *(("gray_scott", 64), ("cahn_hilliard", 64), ("kuramoto_sivashinsky", 4096), ("upwind_advection", 16)),
        *(("shallow_water", 4096), ("power_flow", 1000), ("oregonator", 4096)),
    )
    #: Networks with masks, and schedules of their scans.
    scans: tuple[tuple[str, str], ...] = (("VGG-11", "blelloch:2"),)

    name = "host_path"
    title = "What a call costs the host, beside a made-up GPU"
    source = "no paper: no GPU is faster than it is called"

    def run(self, context: Context) -> list[Row]:
        command = [sys.executable, "-m", f"{__package__}._host_path"]
        groups: dict[str, Group] = {}
        with contextlib.closing(JsonProgram(command, context.seconds, max(context.rounds, _ROUNDS))) as program:
            try:
                program.answer()
            except (RuntimeError, TimeoutError) as error:
                return [Row.missing(self.title, reason(error))]
            for name, question, case in self._questions():
                context.say(f"{name}: {', '.join(map(str, case.values()))}")
                group, answer = groups.setdefault(name, Group(name)), program.answer(json.dumps(question))
                if question[0] == "times":
                    _add_times(group, answer, case)
                else:
                    for part, counts in answer.items():
                        _add_counts(group, question[0], part, counts, case)
        return [row for group in groups.values() for row in group.rows()]

    def _questions(self) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        """The heading, the question and the data of each case."""
        for (kind, features), time, batch in itertools.product(self.kinds, self.times, self.batches):
            group, case = f"{kind}, T = {time:,}, H = {self.hidden}", {"kind": kind, "time": time, "batch": batch}
            sizes = kind, features, self.hidden, time, batch
            for layer, options in _LAYERS.items():
                yield group, ["layer", *sizes, options], {**case, "layer": layer}
            if (time, batch) == (self.times[0], self.batches[0]):
                yield group, ["times", *sizes, {}], case
        for method, batch in itertools.product(self.methods, self.batches):
            group = "Products with vectors" if method == VECTORS else f"Products by {method}"
            yield group, ["product", method, batch], {"method": method, "batch": batch}
        for equation, size in self.equations:
            yield "compiled Jacobians", ["jacobian", equation, size], {"equation": equation, "size": size}
        for network, schedule in self.scans:
            case = {"network": network, "schedule": schedule}
            yield "scans of pruned networks, batch 1", ["scan", network, schedule], case

    def picture(self, rows: Sequence[Row]) -> Picture:
        counts = [row for row in rows if row.data.get("layer") == ""]
        lengths = values_of(counts, "time")
        # The longest passes of one launch, and the longest of all.
        ends = [*[time for time in lengths if time <= _ONE_LAUNCH][-1:], *lengths[-1:]]
        bars = [(part, time) for part in _NODES for time in dict.fromkeys(ends)]
        names = [f"{_SHORT[part]}, T = {time:,}" for part, time in bars]
        drawn = [where(counts, part=part, time=time) for part, time in bars]
        nodes = [_NODES[part][time > _ONE_LAUNCH] for part, time in bars]
        functions = [_PYTHON[part] for part, _ in bars]
        timed = [row for row in rows if "over_nothing" in row.data]
        by_part = [where(timed, part=part) for part in _TIMES]
        panels = [
            _panel("launches of ours and PyTorch's kernels", "nodes", names, drawn, nodes),
            _panel("functions of Python's", "python", names, drawn, functions),
            _panel(
                f"host time over that of {NOTHING}", "over_nothing", [_SHORT[part] for part in _TIMES], by_part,
                [*_TIMES.values()],
            ),
        ]  # fmt: skip
        return Picture("What a call costs the host; black: the most that it may", panels, (6.5, 8.5), 1, legend=3)


def _panel(
    title: str, figure: str, names: Sequence[str], rows: Sequence[Sequence[Row]], most: Sequence[float]
) -> Panel:
    """The largest figures of each kind of layer as lying bars, and what they may be at most."""
    heights: dict[str, list[float | None]] = {
        kind: [max((row.data[figure] for row in where(of_bar, kind=kind)), default=None) for of_bar in rows]
        for kind in values_of([row for of_bar in rows for row in of_bar], "kind")
    }
    bars = Bars(names, heights, (BLUE, ORANGE, GREEN), "%.3g", lying=True)
    limits = [
        Line([limit, limit], [place - 0.42, place + 0.42], options={"linewidth": 2.5})
        for place, limit in enumerate(most)
    ]
    return Panel([bars, *limits], x=title, grid="x", size=9.5)


def _add_counts(group: Group, what: str, part: str, counts: dict[str, Any], case: dict[str, Any]) -> None:
    """Add a row of a call's nodes, and what they and others of its counts may be at most."""
    nodes, python, facts = counts["nodes"], counts["python"], counts["facts"]
    names = [
        part,
        *(f"B = {value}" if name == "batch" else str(value) for name, value in case.items() if name in _NAMED),
    ]
    notes = [
        f"{counts['launches']} of ours, {counts['kernels']} of PyTorch's",
        f"{python} functions of Python's, {counts['c']} of C's, {counts['operators']} operators",
        *(f"{number} {name}" for name, number in facts.items()),
    ]
    data = {**case, "part": part, "nodes": nodes, "python": python, "waits": counts["waits"]}
    row = group.value(", ".join(filter(None, names)), nodes, "nodes", note="; ".join(notes), data=data)
    most_nodes, most_python = _limits(what, part, case)
    if most_nodes is not None:
        row = row.beside(Comparison("nodes", nodes, at_most=most_nodes))
    if most_python is not None:
        row = row.beside(Comparison("functions of Python's", python, at_most=most_python))
    if what == "scan" and part in (FORWARD, BACKWARD):
        row = row.beside(Comparison("waits", counts["waits"], at_most=0))
    for name, most in _NODES_FOR_EACH.items():
        if name in facts:
            row = row.beside(Comparison(f"nodes / {name}", nodes / facts[name], at_most=most))
    group.add(row)


def _limits(what: str, part: str, case: dict[str, Any]) -> tuple[int | None, int | None]:
    """The most nodes of a call, and the most functions of Python's."""
    if what == "product":
        return _PRODUCT_NODES, _PRODUCT_WITH_VECTORS if case["method"] == VECTORS else _PRODUCT
    if what != "layer":
        return None, _PYTHON_OF_JACOBIAN if what == "jacobian" else None
    parts = {"": (part,), "two layers": _TWO_LAYERS[part]}.get(case["layer"], (part, part))
    nodes = sum(_NODES[each][case["time"] > _ONE_LAUNCH] for each in parts)
    return nodes, None if case["layer"] else _PYTHON[part]


def _add_times(group: Group, times: dict[str, dict[str, Any]], case: dict[str, Any]) -> None:
    """Rows of the host's times of both passes, and of those of a Function that computes nothing."""
    for part, at_most in _TIMES.items():
        label, nothing = f"host time, {part}", f"host time, {part}, {NOTHING}"
        ours, reference = Timing(**times[part]), Timing(**times[f"{part}, {NOTHING}"])
        group.timed(nothing, reference, role="reference")
        data = {
            **case,
            "part": part,
            "over_nothing": statistics.median(ours.seconds) / statistics.median(reference.seconds),
        }
        group.timed(label, ours, data=data)
        group.compare("jacsparse / nothing", label, nothing, at=label, at_most=at_most)
