"""Solvers of the triangular system that back-propagation is, over depth and width."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse import solvers
from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._approximate_forward import TanhNetwork
from ._context import Context
from ._experiment import Grid
from ._figures import COLOURS, Cells, Drawn, Line, Panel, Picture
from ._rows import Group, Row, where
from ._workloads import equal_layers

_PEER = "autograd, as one call"
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
class _Network:
    """Equal layers with tanh; the weights dense, or pruned: back-propagation is equation 14."""

    depth: int
    width: int
    batch: int
    #: Share of pruned weights.
    share: float = 0.0

    methods = _METHODS
    share_of_time = 1 / 8

    def __str__(self) -> str:
        return f"{self.depth} layers of {self.width} units"

    @property
    def group(self) -> str:
        """The heading of its rows."""
        return f"{self}, {f'{self.share:.0%} pruned' if self.share else 'dense'}, batch {self.batch}"

    @property
    def sizes(self) -> dict[str, Any]:
        """The data of its rows."""
        return {"depth": self.depth, "width": self.width, "share": self.share}

    def counts(self, solution: solvers.Solution) -> dict[str, Any]:
        """What the data of a solution's row has besides."""
        work = {name: getattr(solution.work, name) for name in ("steps", "multiply_adds", "entries")}
        return work | {
            "iterations": solution.iterations, "residual": solution.residual, "settled": solution.converged
        }  # fmt: skip

    def drawn(self) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """The module, its input and the gradient of its output."""
        layers = equal_layers(self.depth, self.width)
        for layer in [*layers][::2] if self.share else ():
            prune.random_unstructured(layer, "weight", self.share)
        return layers, torch.randn(self.batch, self.width), torch.randn(self.batch, self.width)

    def autograd(self, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
        """The gradients of what each layer's matrix gives, by PyTorch."""
        outputs, value = [], x.clone().requires_grad_()
        leaf = value
        for layer in module.children():
            value = layer(value)
            if isinstance(layer, nn.Linear):
                outputs.append(value)
        return partial(torch.autograd.grad, value, [leaf, *outputs], gradient, retain_graph=True)


@dataclass(frozen=True)
class _Recurrent:
    """A stacked RNN over some steps: back-propagation is equation 24, the forward pass equation 23."""

    layers: int
    steps: int
    units: int
    batch: int

    methods = _TWO_LEVEL
    share_of_time = 1 / 4

    def __str__(self) -> str:
        return f"RNN of {self.layers} layers of {self.units} units, {self.steps} steps, batch {self.batch}"

    @property
    def group(self) -> str:
        """The heading of its rows."""
        return f"Equation 24: {self}"

    @property
    def sizes(self) -> dict[str, Any]:
        """The data of its rows."""
        return {"layers": self.layers, "steps": self.steps}

    def counts(self, solution: solvers.Solution) -> dict[str, Any]:
        """What the data of a solution's row has besides."""
        return {"products": solution.work.steps, "converged": solution.converged}

    def drawn(self) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """The module, its input and the gradient of its output."""
        torch.manual_seed(0)
        module = nn.RNN(self.units, self.units, self.layers)
        return module, *torch.randn(2, self.steps, self.batch, self.units)

    def autograd(self, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
        """The gradients of the input and of the weights, by PyTorch."""
        leaf = x.clone().requires_grad_()
        output, _ = module(leaf)
        return partial(torch.autograd.grad, output, [leaf, *module.parameters()], gradient, retain_graph=True)


@dataclass(frozen=True)
class TriangularSolvers(Grid):
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

    def cases(self, context: Context) -> Iterable[_Network | _Recurrent]:
        for share, depth, width in itertools.product((0.0, self.pruned), self.depths, self.widths):
            yield _Network(depth, width, self.batch, share)
        yield from (_Recurrent(*sizes, self.batch) for sizes in self.recurrent)

    def measure(self, case: _Network | _Recurrent, context: Context) -> list[Row]:
        module, x, gradient = case.drawn()
        system = solvers.propagation(module, x, gradient).system
        if not system.off_diagonal.entries:
            return []
        rows, solutions, too_large = Group(case.group, data=case.sizes), dict[str, solvers.Solution](), dict[str, str]()
        vectors = (len(system.sizes) + 1) * self.batch * sum(system.sizes)
        for name, method in case.methods.items():
            context.under(rows.name).say(f"{name} once")
            if name == "gmres" and vectors > _VECTORS:
                too_large[name] = f"its {len(system.sizes) + 1} vectors would take {4 * vectors / 2**30:.2g} GiB"
            else:
                solutions[name] = _solution(method, system)
        functions: dict[str, Callable[[], Any]] = {
            name: partial(case.methods[name].solve, system)
            for name, each in solutions.items()
            if each.work.multiply_adds <= _MOST and each.converged
        }
        functions[_PEER] = case.autograd(module, x, gradient)
        timings = context.under(rows.name).times(functions, seconds=context.seconds * case.share_of_time)
        for name, solution in solutions.items():
            note = _note(solution)
            until_done = solution.work.time(_WORKERS) if solution.converged else None
            data = {**case.sizes, "method": name, "multiply_adds_until_done": until_done, **case.counts(solution)}
            if name in timings:
                rows.timed(name, timings[name], note=note, data=data)
            else:
                unsolved = "its solution is not finite" if case.methods[name].direct else "its residual did not settle"
                why_not = f"more than {_MOST:.0e} multiply-adds" if solution.converged else unsolved
                rows.missing(name, why_not, note=note, data=data)
        for name, why_not in too_large.items():
            rows.missing(name, why_not, data={**case.sizes, "method": name, "multiply_adds_until_done": None})
        rows.timed(_PEER, timings[_PEER], role="peer")
        first, *others = solutions
        rows.compare("autograd / substitution", _PEER, first)
        for name in others:
            rows.compare(f"substitution / {name}", first, name)
        return rows.rows()

    def run(self, context: Context) -> list[Row]:
        rows, network = super().run(context), _Network(16, 64, self.batch)
        rows += [*_settled(rows), *_mini_batch(context, network), *_approximate_forward(network, "equation 13")]
        first = [_Recurrent(*sizes, self.batch) for sizes in self.recurrent[:1]]
        return rows + [row for each in first for row in _approximate_forward(each, "equations 23 and 25")]

    def picture(self, rows: Sequence[Row]) -> Picture:
        panels = []
        for share, name in ((0.0, "dense"), (self.pruned, "pruned")):
            of_share = [row for row in where(rows, share=share) if "method" in row.data]
            counted = {id(row): row.data["multiply_adds_until_done"] for row in of_share}
            panels.append(self._map(of_share, {id(row): row.median for row in of_share}, f"{name}, measured here"))
            panels.append(self._map(of_share, counted, f"{name}, counted"))
        panels.insert(2, self._products(where(rows, share=0.0)))
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
            settled = where(rows, method=name, settled=True)
            parts.append(Line.through([(row.data["depth"], row.data["steps"]) for row in settled], name, *look))
        return Panel(parts, "until each block row has settled, dense", "layers l", "products in turn", "xy")

    def _map(self, rows: Sequence[Row], figures: Mapping[int, float | None], title: str) -> Panel:
        """The best solver by depth and width."""
        colours = dict(zip(_METHODS, ("#dddddd", SKY, BLUE, GREEN, ORANGE, PURPLE, "#aaaaaa"), strict=True))
        depths, cells, parts = self.depths[::-1], dict[tuple[int, int], tuple[str, Any, bool]](), list[Drawn]()
        for line, depth in enumerate(depths):
            for column, width in enumerate(self.widths):
                here = where(rows, depth=depth, width=width)
                known = {row.data["method"]: figure for row in here if (figure := figures[id(row)]) is not None}
                if "substitution" in known:
                    best = min(known, key=known.__getitem__)
                    text = f"{best.replace('_', chr(10))}\n{known['substitution'] / known[best]:.3g}"
                    cells[line, column] = text, colours[best], False
            holding = sum(self.batch >= width or depth / math.log2(depth) >= width for width in self.widths)
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


def _note(solution: solvers.Solution) -> str:
    """Products, and of an iterative solver iterations, up to the residual of each block row."""
    products = f"{solution.work.steps} products in turn"
    if solution.residual is None:
        return products
    return f"{solution.iterations} iterations, {products}, residual of each block row {solution.residual:.1e}"


def _solution(method: solvers.TriangularSolver, system: solvers.BlockTriangular) -> solvers.Solution:
    """A solution; only its count where that is beyond the limit, which a direct solver tells before it runs."""
    if not method.direct:
        return method.solve(system)
    count = method.solve(system.on_meta())
    return count if count.work.multiply_adds > _MOST else method.solve(system)


def _settled(rows: Sequence[Row]) -> list[Row]:
    """The number of systems on which each iterative solver settles each block row."""
    result = Group("Settled block by block")
    for name, method in _METHODS.items():
        data = [row.data for row in where(rows, method=name) if "depth" in row.data]
        if not method.direct and data:
            left_out = sum("settled" not in each for each in data)
            note = f"of {len(data)}" + (f", {left_out} left out" if left_out else "")
            result.value(name, sum(bool(each.get("settled")) for each in data), "systems settled", note=note)
    return result.rows()


def _mini_batch(context: Context, network: _Network) -> list[Row]:
    """BiCGStab with all samples in each product, against one solve for each."""
    system = solvers.propagation(*network.drawn()).system
    rows = Group(f"BiCGStab for a mini-batch of {network.batch}, {network}")
    ours, apart = "all samples in each product, with coefficients of their own", "a solve for each sample"
    samples, method = [system.sample(number) for number in range(network.batch)], solvers.BiCGStab()
    calls: dict[str, Callable[[], object]] = {
        ours: lambda: method.solve(system),
        apart: lambda: [method.solve(sample) for sample in samples],
    }
    rows.in_turns(context, calls, role={apart: "reference"})
    rows.compare("apart / together", apart, ours)
    return rows.rows()


def _approximate_forward(network: _Network | _Recurrent, equations: str) -> list[Row]:
    """Errors of the approximate forward pass around the one before a step of SGD.

    They are those over iterations by substitution, and of recurrent networks also after one by the other solvers.
    """
    module, x, _ = network.drawn()
    before, after = TanhNetwork.of(module, x), copy.deepcopy(module)
    scales = before.scales(before.states())
    optimizer, output = torch.optim.SGD(after.parameters(), lr=0.1), after(x)
    (output[0] if isinstance(output, tuple) else output).square().mean().backward()
    optimizer.step()
    rows = Group(f"Approximate forward pass ({equations}) after a step of SGD, {network}")
    moved = TanhNetwork.of(after, x)
    for number, error in enumerate(moved.errors(scales, solvers.Substitution(), iterations=6), 1):
        rows.value(f"{number} iteration{'s' if number > 1 else ''}, substitution", error, "largest error")
    for name, method in network.methods.items():
        if isinstance(network, _Recurrent) and name != "substitution":
            rows.value(f"1 iteration, {name}", moved.errors(scales, method)[0], "largest error")
    return rows.rows()
