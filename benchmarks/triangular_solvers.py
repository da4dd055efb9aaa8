"""Solvers of the triangular system that back-propagation is, over depth and width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse import solvers
from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._context import Context
from ._experiment import Experiment, Group, Row
from ._figures import COLOURS, Cells, Line, Panel, Part, Picture
from ._two_level import TwoLevel, solution_note

__all__ = ["TriangularSolvers"]

_PEER = "autograd"
_METHODS: dict[str, solvers.TriangularSolver] = {
    "substitution": solvers.Substitution(),
    "scan": solvers.PrefixScan("blelloch"),
    "cyclic_reduction": solvers.CyclicReduction(),
    "jacobi": solvers.Jacobi(),
    "richardson": solvers.Richardson(omega=0.9, limit=1000),
    "bicgstab": solvers.BiCGStab(),
    "gmres": solvers.GMRES(),
}
#: Those of two-level systems.
_TWO_LEVEL: dict[str, solvers.TriangularSolver] = {
    **{name: method for name, method in _METHODS.items() if name != "scan"},
    "cyclic_reduction, nested": solvers.CyclicReduction(nested=True),
    "hybrid": solvers.Hybrid(),
}
#: Elements of the vectors that GMRES stores, from which on it is left out: the paper calls them prohibitive.
_VECTORS = 2**27
#: Multiply-adds from which on a solver is counted, and not timed.
_MOST = 4 * 10**9
#: Workers that multiply-adds are counted for: so many that each element of a result has one, and steps decide.
_WORKERS = 2**20


#: Colours and markers of iterative solvers.
_LINES = (("#888888", "s"), ("#d95f02", "^"), ("#0072b2", "o"), ("#7570b3", "x"))


@dataclass(frozen=True)
class TriangularSolvers(Experiment):
    """Networks of equal layers with tanh; the weights dense, or pruned."""

    depths: tuple[int, ...] = (4, 16, 64, 256)
    widths: tuple[int, ...] = (4, 16, 64, 256)
    #: Share of pruned weights of the second set of networks.
    pruned: float = 0.97
    #: Samples of the mini-batch.
    batch: int = 16
    #: Layers, steps and units of recurrent networks.
    recurrent: tuple[tuple[int, int, int], ...] = ((2, 16, 16), (2, 64, 16), (4, 64, 16))

    name = "triangular_solvers"
    title = "Back-propagation as a triangular system, by several solvers"
    source = "Naumov, sections 2 to 4: the paper has no measurements of its own"

    def run(self, context: Context) -> list[Row]:
        rows = []
        for share in (0.0, self.pruned):
            for depth in self.depths:
                for width in self.widths:
                    rows += self._rows(context, depth, width, share)
        rows += _settled(rows)
        rows += _mini_batch(context, depth=16, width=64, batch=self.batch)
        rows += _approximate_forward(depth=16, width=64, batch=self.batch)
        networks = [TwoLevel(*sizes, self.batch) for sizes in self.recurrent]
        for network in networks:
            context.say(f"{network}: each solver once")
            rows += network.backward(context, _TWO_LEVEL, _WORKERS)
        return [*rows, *(row for network in networks[:1] for row in network.forward(_TWO_LEVEL, iterations=6))]

    def _rows(self, context: Context, depth: int, width: int, share: float) -> list[Row]:
        module, x, gradient = _network(depth, width, self.batch, share)
        system = solvers.propagation(module, x, gradient).system
        if not system.off_diagonal.entries:
            return []
        counted = dict[str, solvers.Solution]()
        for name, method in _METHODS.items():
            context.say(f"{depth} layers of {width} units, {share:.0%} pruned: {name} once")
            if name != "gmres" or (depth + 2) * self.batch * sum(system.sizes) <= _VECTORS:
                counted[name] = _solution(method, system)
        work = {name: solution.work for name, solution in counted.items()}
        functions: dict[str, Callable[[], Any]] = {
            name: partial(method.solve, system)
            for name, method in _METHODS.items()
            if name in counted and work[name].multiply_adds <= _MOST and counted[name].converged
        }
        functions[_PEER] = _autograd(module, x, gradient)
        timings = context.times(functions, seconds=context.seconds / 8)
        pruned = f"{share:.0%} pruned" if share else "dense"
        rows = Group(f"{depth} layers of {width} units, {pruned}, batch {self.batch}")
        network: dict[str, Any] = {"depth": depth, "width": width, "share": share}
        for name, method in _METHODS.items():
            data = {**network, "method": name}
            if name not in counted:
                size = (depth + 2) * self.batch * sum(system.sizes) * 4 / 2**30
                data["multiply_adds_until_done"] = None
                rows.missing(name, f"its {depth + 2} vectors would take {size:.2g} GiB", data=data)
                continue
            solution, note = counted[name], solution_note(counted[name])
            data |= {each: getattr(solution.work, each) for each in ("steps", "multiply_adds", "entries")}
            data["multiply_adds_until_done"] = solution.work.time(_WORKERS) if solution.converged else None
            data |= {"iterations": solution.iterations, "residual": solution.residual, "settled": solution.converged}
            if name in timings:
                rows.timed(name, timings[name], note=note, data=data)
            else:
                unsolved = "its solution is not finite" if method.direct else "its residual did not settle"
                reason = f"more than {_MOST:.0e} multiply-adds" if solution.converged else unsolved
                rows.missing(name, reason, note=note, data=data)
        peer = rows.timed(f"{_PEER}, as one call", timings[_PEER], role="peer", data=network).label
        first, *others = _METHODS
        rows.compare("autograd / substitution", peer, first)
        for name in others:
            rows.compare(f"substitution / {name}", first, name)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        panels = []
        for share, name in ((0.0, "dense"), (self.pruned, "pruned")):
            of_share = [row for row in rows if row.data.get("share") == share and "method" in row.data]
            counted = {id(row): row.data["multiply_adds_until_done"] for row in of_share}
            panels.append(self._map(of_share, {id(row): row.median for row in of_share}, f"{name}, measured here"))
            panels.append(self._map(of_share, counted, f"{name}, counted"))
        panels.insert(2, self._products([row for row in rows if row.data.get("share") == 0.0]))
        two_level = [row.data for row in rows if row.data.get("products")]
        panels += [_two_level_panel(two_level)] if two_level else []
        title = (
            f"{self.title}; batch r = {self.batch}.\n"
            "Maps: the best one, and substitution's time as a multiple of its own. "
            f"Counted: multiply-adds until {_WORKERS:,} workers are done. Empty: all weights are pruned.\n"
            "To the left of the red line the paper's criterion for direct methods holds, r >= n or l / log2 l >= n"
        )
        return Picture(title, panels, (11.5, 8.6), columns=3)

    def _products(self, rows: Sequence[Row]) -> Panel:
        """Products that an iterative solver makes in turn until each block row has settled."""
        iterative = [name for name, method in _METHODS.items() if not method.direct]
        parts = [Line(self.depths, self.depths, "l: a product reaches one row further")]
        for name, look in zip(iterative, _LINES, strict=True):
            settled = [row.data for row in rows if row.data.get("method") == name and row.data.get("settled")]
            parts.append(Line.through([(data["depth"], data["steps"]) for data in settled], name, *look))
        return Panel(parts, "until each block row has settled, dense", "layers l", "products in turn", "xy")

    def _map(self, rows: Sequence[Row], figures: Mapping[int, float | None], title: str) -> Panel:
        """The best solver by depth and width."""
        colours = dict(zip(_METHODS, ("#dddddd", SKY, BLUE, GREEN, ORANGE, PURPLE, "#aaaaaa"), strict=True))
        depths, cells, parts = self.depths[::-1], dict[tuple[int, int], tuple[str, Any, bool]](), list[Part]()
        for line, depth in enumerate(depths):
            for column, width in enumerate(self.widths):
                here = [row for row in rows if (row.data["depth"], row.data["width"]) == (depth, width)]
                known = {row.data["method"]: figure for row in here if (figure := figures[id(row)]) is not None}
                if "substitution" in known:
                    best = min(known, key=known.__getitem__)
                    text = f"{best.replace('_', chr(10))}\n{known['substitution'] / known[best]:.3g}"
                    cells[line, column] = text, colours[best], False
            holding = sum(solvers.reduction_pays(depth, width, self.batch) for width in self.widths)
            parts.append(Line([holding - 0.5] * 2, [line - 0.5, line + 0.5], "", "red"))
        table = Cells([str(depth) for depth in depths], [str(width) for width in self.widths], cells)
        return Panel([table, *parts], title, "units n", "layers l", grid="")


def _two_level_panel(lines: Sequence[dict[str, Any]]) -> Panel:
    """Products in turn of two-level systems, by solver; points of a colour for each network."""
    parts, methods = [], list(dict.fromkeys(line["method"] for line in lines))
    networks = dict.fromkeys((line["layers"], line["steps"]) for line in lines)
    for (layers, steps), colour in zip(networks, COLOURS, strict=False):
        of_network = [
            line for line in lines if (line["layers"], line["steps"]) == (layers, steps) and line["converged"]
        ]
        places = [methods.index(line["method"]) for line in of_network]
        label, options = f"{layers} layers, {steps} steps", {"markersize": 6}
        parts.append(Line([line["products"] for line in of_network], places, label, colour, "o", options=options))
    settings = {"yticks": range(len(methods)), "yticklabels": methods, "ylim": (len(methods) - 0.5, -0.5)}
    return Panel(parts, "recurrent networks (equation 24)", "products in turn", "", "x", "below", settings=settings)


def _solution(method: solvers.TriangularSolver, system: solvers.BlockTriangular) -> solvers.Solution:
    """A solution; only its count where that is beyond the limit, which a direct solver tells before it runs."""
    if not method.direct:
        return method.solve(system)
    count = method.solve(system.on_meta())
    return count if count.work.multiply_adds > _MOST else method.solve(system)


def _network(depth: int, width: int, batch: int, share: float) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    module = nn.Sequential(*layers)
    if share:
        for layer in layers[::2]:
            prune.random_unstructured(layer, "weight", share)
    return module, torch.randn(batch, width), torch.randn(batch, width)


def _autograd(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
    """The gradients of what each layer's matrix gives, by PyTorch."""
    outputs, value = [], x.clone().requires_grad_()
    leaf = value
    for layer in module.children():
        value = layer(value)
        if isinstance(layer, nn.Linear):
            outputs.append(value)
    return lambda: torch.autograd.grad(value, [leaf, *outputs], gradient, retain_graph=True)


def _settled(rows: Sequence[Row]) -> list[Row]:
    """The number of systems on which each iterative solver settles each block row."""
    result = Group("Settled block by block")
    for name, method in _METHODS.items():
        data = [row.data for row in rows if row.data.get("method") == name]
        if not method.direct and data:
            left_out = sum("settled" not in each for each in data)
            note = f"of {len(data)}" + (f", {left_out} left out" if left_out else "")
            result.value(name, sum(bool(each.get("settled")) for each in data), "systems settled", note=note)
    return result.rows()


def _mini_batch(context: Context, depth: int, width: int, batch: int) -> list[Row]:
    """BiCGStab with all samples in each product, against one solve for each."""
    system = solvers.propagation(*_network(depth, width, batch, 0.0)).system
    together, apart = solvers.BiCGStab(), solvers.BiCGStab(together=False)
    timings = context.times({"together": lambda: together.solve(system), "apart": lambda: apart.solve(system)})
    rows = Group(f"BiCGStab for a mini-batch of {batch}, {depth} layers of {width} units")
    ours, apart_label = "all samples in each product, with coefficients of their own", "a solve for each sample"
    rows.timed(ours, timings["together"])
    rows.timed(apart_label, timings["apart"], role="reference")
    rows.compare("apart / together", apart_label, ours)
    return rows.rows()


def _approximate_forward(depth: int, width: int, batch: int) -> list[Row]:
    """Errors of the approximate forward pass around the one before a step of training."""
    module, x, _ = _network(depth, width, batch, 0.0)
    scales = solvers.forward_scales(module, x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().mean().backward()
    optimizer.step()
    errors = solvers.approximate_forward(module, x, scales, iterations=6).errors
    rows = Group(f"Approximate forward pass (equation 13) after a step of SGD, {depth} layers of {width} units")
    for number, error in enumerate(errors, 1):
        rows.value(f"{number} iteration{'s' if number > 1 else ''}", error, "largest error of the output")
    return rows.rows()
