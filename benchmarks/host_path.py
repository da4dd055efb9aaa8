"""The host's part of calls on a GPU, on one that is made up: nodes, functions called, and time.

They are calls of recurrent layers, of products, of compiled Jacobians, and of scans.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jacsparse.figures import BLUE, GREEN, ORANGE

from ._context import Context, Timing
from ._experiment import Experiment
from ._figures import Bars, Line, Panel, Picture
from ._host_path import BACKWARD, EMPTY, FORWARD, PARTS, VECTORS, WITH_INPUT
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
#: The most nodes of a scan's backward pass for each of its products.
_NODES_OF_SCAN = 1.2
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
        arguments = self.hidden, context.seconds, max(context.rounds, _ROUNDS)
        rows = []
        with contextlib.closing(JsonProgram(command, *arguments)) as program:
            try:
                program.answer()
            except (RuntimeError, TimeoutError) as error:
                return [Row.missing(self.title, reason(error))]
            for kind, features in self.kinds:
                for time in self.times:
                    group = Group(f"{kind}, T = {time:,}, H = {self.hidden}")
                    for batch in self.batches:
                        timed = (time, batch) == (self.times[0], self.batches[0])
                        context.say(f"{group.name}, B = {batch}")
                        answer = program.answer(json.dumps([kind, features, time, batch, timed]))
                        _add_counts(group, answer["counts"], {"kind": kind, "time": time, "batch": batch})
                        _add_times(group, answer["times"], {"kind": kind, "time": time, "batch": batch})
                    rows += group.rows()
            for method in self.methods:
                group = Group("Products with vectors" if method == VECTORS else f"Products by {method}")
                for batch in self.batches:
                    _add_products(group, program.answer(json.dumps([method, batch]))["counts"], method, batch)
                rows += group.rows()
            group = Group("compiled Jacobians")
            for equation, size in self.equations:
                context.say(f"{equation}, {size}")
                _add_jacobian(group, equation, size, program.answer(json.dumps([equation, size])))
            rows += group.rows()
            group = Group("scans of pruned networks, batch 1")
            for network, schedule in self.scans:
                context.say(f"{network} by {schedule}")
                _add_scan(group, network, schedule, program.answer(json.dumps([network, schedule])))
        return rows + group.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        counts = [row for row in rows if row.data.get("layer") == ""]
        lengths = values_of(counts, "time")
        # The longest passes of one launch, and the longest of all.
        ends = [*[time for time in lengths if time <= _ONE_LAUNCH][-1:], *lengths[-1:]]
        bars = [(part, time) for part in PARTS for time in dict.fromkeys(ends)]
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
                f"host time over that of {EMPTY}", "over_nothing", [_SHORT[part] for part in _TIMES], by_part,
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


def _add_counts(group: Group, counts: Iterable[dict[str, Any]], case: dict[str, Any]) -> None:
    """Rows of one layer's nodes, and of those of two directions and layers beside the sum of single ones."""
    nodes: dict[tuple[str, str], int] = {}
    beyond = case["time"] > _ONE_LAUNCH
    for each in counts:
        layer, part, launches, kernels = (each[name] for name in ("layer", "part", "launches", "kernels"))
        nodes[layer, part] = launches + kernels
        label = ", ".join(filter(None, (part, layer, f"B = {case['batch']}")))
        note = (
            f"{launches} of ours, {kernels} of PyTorch's; {each['c']} functions of C's, {each['operators']} operators"
        )
        data = {**case, "layer": layer, "part": part, "nodes": nodes[layer, part], "python": each["python"]}
        row = group.value(label, nodes[layer, part], "nodes", note=note, data=data)
        if layer:
            parts = _TWO_LAYERS[part] if layer == "two layers" else (part, part)
            most = sum(_NODES[each][beyond] for each in parts)
            group.add(row.beside(Comparison("nodes", nodes[layer, part], at_most=most)))
        else:
            limits = Comparison("nodes", nodes[layer, part], at_most=_NODES[part][beyond])
            group.add(row.beside(limits, Comparison("functions of Python's", each["python"], at_most=_PYTHON[part])))


def _add_products(group: Group, counts: Iterable[dict[str, Any]], method: str, batch: int) -> None:
    """Rows of a product's nodes and functions."""
    for each in counts:
        label, nodes = ", ".join(filter(None, (each["part"], f"B = {batch}"))), each["launches"] + each["kernels"]
        note = f"{each['python']} functions of Python's, {each['c']} of C's, {each['operators']} operators"
        data = {"method": method, "batch": batch, "nodes": nodes, "python": each["python"]}
        row = group.value(label, nodes, "nodes", note=note, data=data)
        limits = Comparison("nodes", nodes, at_most=_PRODUCT_NODES)
        most = _PRODUCT_WITH_VECTORS if method == VECTORS else _PRODUCT
        group.add(row.beside(limits, Comparison("functions of Python's", each["python"], at_most=most)))


def _add_jacobian(group: Group, equation: str, size: int, counts: dict[str, int]) -> None:
    """A row of a compiled Jacobian's nodes, beside its kernels that wait for each other."""
    nodes, python = counts["launches"] + counts["kernels"], counts["python"]
    note = f"{counts['launches']} of ours, {counts['kernels']} of PyTorch's; {counts['c']} functions of C's"
    data = {"equation": equation, "size": size, "nodes": nodes, "python": python}
    row = group.value(f"{equation}, {size}", nodes, "nodes", note=note, data=data)
    levels = Comparison("nodes / levels", nodes / counts["levels"], at_most=1.0)
    group.add(row.beside(levels, Comparison("functions of Python's", python, at_most=_PYTHON_OF_JACOBIAN)))


def _add_scan(group: Group, network: str, schedule: str, answer: dict[str, Any]) -> None:
    """Rows of both passes of a scan: their nodes, beside the products of the second one, and how often they wait."""
    weights, products = answer["weights"], answer["products"] + answer["weights"]
    autograd = answer["autograd"]["launches"] + answer["autograd"]["kernels"]
    for part in (FORWARD, BACKWARD):
        counts = answer[part]
        nodes, waits = counts["launches"] + counts["kernels"], Comparison("waits", counts["waits"], at_most=0)
        note = (
            f"{counts['launches']} of ours, {counts['kernels']} of PyTorch's; {counts['python']} functions of Python's"
        )
        data = {"network": network, "schedule": schedule, "part": part, "nodes": nodes, "waits": counts["waits"]}
        limits = [waits]
        if part == BACKWARD:
            note += (
                f"; {products} products, {weights} of them gradients of weights; autograd's pass has {autograd} nodes"
            )
            limits.append(Comparison("nodes / products", nodes / products, at_most=_NODES_OF_SCAN))
        label = f"{network} by {schedule}, {part}"
        group.add(group.value(label, nodes, "nodes", note=note, data=data).beside(*limits))


def _add_times(group: Group, times: dict[str, dict[str, Any]], case: dict[str, Any]) -> None:
    """Rows of the host's times of both passes, and of those of a Function that computes nothing."""
    if not times:
        return
    for part, at_most in _TIMES.items():
        label, nothing = f"host time, {part}", f"host time, {part}, {EMPTY}"
        ours, reference = Timing(**times[part]), Timing(**times[f"{part}, {EMPTY}"])
        group.timed(nothing, reference, role="reference")
        data = {
            **case,
            "part": part,
            "over_nothing": statistics.median(ours.seconds) / statistics.median(reference.seconds),
        }
        group.timed(label, ours, data=data)
        group.compare("jacsparse / nothing", label, nothing, at=label, at_most=at_most)
