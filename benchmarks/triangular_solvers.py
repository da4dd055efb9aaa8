"""Solvers of the triangular system that back-propagation is, over depth and width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse import solvers

from ._context import Context
from ._experiment import Experiment, Row, compare
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


#: Markers and colours of iterative solvers.
_LINES = (("s", "#888888"), ("^", "#d95f02"), ("o", "#0072b2"), ("x", "#7570b3"))


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
        group = (
            f"{depth} layers of {width} units, {'dense' if not share else f'{share:.0%} pruned'}, batch {self.batch}"
        )
        peer = Row.timed(
            f"{_PEER}, as one call", timings[_PEER], group=group, role="peer", data=_data(depth, width, share)
        )
        rows = []
        for name in _METHODS:
            data = _data(depth, width, share, name)
            if name not in counted:
                size = (depth + 2) * self.batch * sum(system.sizes) * 4 / 2**30
                reason = f"its {depth + 2} vectors would take {size:.2g} GiB"
                rows.append(Row.missing(name, reason, group=group, data={**data, "multiply_adds_until_done": None}))
                continue
            settled, note = counted[name].converged, solution_note(counted[name])
            data |= {
                "steps": work[name].steps,
                "multiply_adds": work[name].multiply_adds,
                "entries": work[name].entries,
                "multiply_adds_until_done": work[name].time(_WORKERS) if settled else None,
                "iterations": counted[name].iterations,
                "residual": counted[name].residual,
                "settled": settled,
            }
            if name in timings:
                rows.append(Row.timed(name, timings[name], group=group, note=note, data=data))
            else:
                unsolved = "its solution is not finite" if _METHODS[name].direct else "its residual did not settle"
                reason = f"more than {_MOST:.0e} multiply-adds" if settled else unsolved
                rows.append(Row.missing(name, reason, group=group, note=note, data=data))
        first, *others = rows
        with_ratios = [
            Row(**{**vars(row), "comparisons": compare(f"substitution / {row.label}", first, row)}) for row in others
        ]
        first = Row(**{**vars(first), "comparisons": compare("autograd / substitution", peer, first)})
        return [first, *with_ratios, peer]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse.figures import new_figure, save_figure

        figure, axes_rows = new_figure(11.5, 8.6, rows=2, columns=3)
        maps, products, recurrent = [*axes_rows[0][:2], *axes_rows[1][:2]], axes_rows[0][2], axes_rows[1][2]
        titles = ("dense, measured here", "dense, counted", "pruned, measured here", "pruned, counted")
        for number, (axes, title) in enumerate(zip(maps, titles, strict=True)):
            share, figure_of = (0.0, self.pruned)[number // 2], (_measured, _counted)[number % 2]
            self._panel(axes, [row for row in rows if row.data.get("share") == share], figure_of)
            axes.set_title(title, fontsize=9)
            axes.set_ylabel("layers l")
        self._products(products, [row for row in rows if row.data.get("share") == 0.0])
        two_level = [row for row in rows if row.data.get("products")]
        recurrent.set_visible(bool(two_level))
        _recurrent(recurrent, two_level)
        figure.suptitle(
            f"{self.title}; batch r = {self.batch}.\n"
            "Maps: the best one, and substitution's time as a multiple of its own. "
            f"Counted: multiply-adds until {_WORKERS:,} workers are done. Empty: all weights are pruned.\n"
            "To the left of the red line the paper's criterion for direct methods holds, r >= n or l / log2 l >= n",
            fontsize=10,
        )
        save_figure(figure, path)

    def _products(self, axes: Any, rows: Sequence[Row]) -> None:
        """Products that an iterative solver makes in turn until each block row has settled."""
        iterative = [name for name, method in _METHODS.items() if not method.direct]
        for name, (marker, colour) in zip(iterative, _LINES, strict=True):
            points = [
                (row.data["depth"], row.data["steps"])
                for row in rows
                if row.data.get("method") == name and row.data.get("settled")
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5, label=name)
        axes.plot(self.depths, self.depths, color="black", linewidth=0.8, label="l: a product reaches one row further")
        axes.set(xscale="log", yscale="log", xlabel="layers l", ylabel="products in turn")
        axes.set_title("until each block row has settled, dense", fontsize=9)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, frameon=False)

    def _panel(self, axes: Any, rows: Sequence[Row], figure_of: Callable[[Row], float | None]) -> None:
        from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

        colours = dict(zip(_METHODS, ("#dddddd", SKY, BLUE, GREEN, ORANGE, PURPLE, "#aaaaaa"), strict=True))
        for across, width in enumerate(self.widths):
            for up, depth in enumerate(self.depths):
                figures = {
                    row.data["method"]: figure_of(row)
                    for row in rows
                    if (row.data.get("depth"), row.data.get("width")) == (depth, width) and "method" in row.data
                }
                known = {name: value for name, value in figures.items() if value is not None}
                if "substitution" not in known:
                    continue
                best = min(known, key=lambda name: known[name])
                axes.add_patch(_square(across, up, colours[best]))
                text = f"{best.replace('_', chr(10))}\n{known['substitution'] / known[best]:.3g}"
                axes.text(across, up, text, ha="center", va="center", fontsize=6.5)
        for up, depth in enumerate(self.depths):
            holding = sum(solvers.reduction_pays(depth, width, self.batch) for width in self.widths)
            axes.plot([holding - 0.5] * 2, [up - 0.5, up + 0.5], color="red", linewidth=1.6)
        axes.set_xlim(-0.5, len(self.widths) - 0.5)
        axes.set_ylim(-0.5, len(self.depths) - 0.5)
        axes.set_xticks(range(len(self.widths)), [str(width) for width in self.widths])
        axes.set_yticks(range(len(self.depths)), [str(depth) for depth in self.depths])
        axes.set_xlabel("units n")
        axes.set_aspect("equal")
        axes.spines[["top", "right"]].set_visible(True)


def _recurrent(axes: Any, rows: Sequence[Row]) -> None:
    """Products in turn of two-level systems, by solver; points of a colour for each network."""
    from jacsparse.figures import BLUE, GREEN, ORANGE

    networks = list(dict.fromkeys((row.data["layers"], row.data["steps"]) for row in rows))
    for (layers, steps), colour in zip(networks, (BLUE, ORANGE, GREEN), strict=False):
        points = {
            row.data["method"]: row.data["products"]
            for row in rows
            if (row.data["layers"], row.data["steps"]) == (layers, steps) and row.data["converged"]
        }
        label = f"{layers} layers, {steps} steps"
        axes.plot(list(points.values()), list(points), "o", color=colour, markersize=6, label=label)
    axes.set(xscale="log", xlabel="products in turn")
    axes.set_title("recurrent networks (equation 24)", fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.grid(alpha=0.25)
    if networks:
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=2)


def _square(across: int, up: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((across - 0.5, up - 0.5), 1, 1, facecolor=colour, alpha=0.75, edgecolor="white")


def _measured(row: Row) -> float | None:
    return row.median


def _counted(row: Row) -> float | None:
    count: float | None = row.data["multiply_adds_until_done"]
    return count


def _solution(method: solvers.TriangularSolver, system: solvers.BlockTriangular) -> solvers.Solution:
    """A solution; only its count where that is beyond the limit, which a direct solver tells before it runs."""
    if not method.direct:
        return method.solve(system)
    count = method.solve(system.on_meta())
    return count if count.work.multiply_adds > _MOST else method.solve(system)


def _data(depth: int, width: int, share: float, method: str = "") -> dict[str, Any]:
    data: dict[str, Any] = {"depth": depth, "width": width, "share": share}
    return {**data, "method": method} if method else data


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
    result = []
    for name, method in _METHODS.items():
        data = [row.data for row in rows if row.data.get("method") == name]
        if not method.direct and data:
            settled = sum(bool(each.get("settled")) for each in data)
            left_out = sum("settled" not in each for each in data)
            note = f"of {len(data)}" + (f", {left_out} left out" if left_out else "")
            result.append(Row.of_value(name, settled, "systems settled", group="Settled block by block", note=note))
    return result


def _mini_batch(context: Context, depth: int, width: int, batch: int) -> list[Row]:
    """BiCGStab with all samples in each product, against one solve for each."""
    system = solvers.propagation(*_network(depth, width, batch, 0.0)).system
    together, apart = solvers.BiCGStab(), solvers.BiCGStab(together=False)
    timings = context.times({"together": lambda: together.solve(system), "apart": lambda: apart.solve(system)})
    group = f"BiCGStab for a mini-batch of {batch}, {depth} layers of {width} units"
    reference = Row.timed("a solve for each sample", timings["apart"], group=group, role="reference")
    ours = Row.timed("all samples in each product, with coefficients of their own", timings["together"], group=group)
    return [Row(**{**vars(ours), "comparisons": compare("apart / together", reference, ours)}), reference]


def _approximate_forward(depth: int, width: int, batch: int) -> list[Row]:
    """Errors of the approximate forward pass around the one before a step of training."""
    module, x, _ = _network(depth, width, batch, 0.0)
    scales = solvers.forward_scales(module, x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().mean().backward()
    optimizer.step()
    errors = solvers.approximate_forward(module, x, scales, iterations=6).errors
    group = f"Approximate forward pass (equation 13) after a step of SGD, {depth} layers of {width} units"
    return [
        Row.of_value(
            f"{number} iteration{'s' if number > 1 else ''}", error, "largest error of the output", group=group
        )
        for number, error in enumerate(errors, 1)
    ]
