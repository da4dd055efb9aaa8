"""Which share of the processor's rates the kernels of pruned convolutions reach, and which limit binds each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from jacsparse.nn import SparseConv2d
from jacsparse.sparse.activations import gradient_of_sums
from jacsparse.sparse.convolution import BlockConvolution
from jacsparse.sparse.normalisation import Normalised, Statistics
from jacsparse.sparse.pooling import Pool
from jacsparse.sparse.pooling_kernels import find_winners
from jacsparse.sparse.processor import lanes_for
from jacsparse.sparse.windows import Pair

from ._calls import Call
from ._context import Context
from ._experiment import Grid
from ._figures import Bars, Panel, Picture, Straight
from ._processor_rates import Rates, measured_rates, moved
from ._rows import Comparison, Group, Row
from ._workloads import pruned_vgg11

#: What bounds a kernel.
ARITHMETIC, FIRST, MEMORY = "arithmetic", "first-level loads", "memory"
#: Before a limit's name, what a kernel reaches of it.
_SHARE = "share of "


class _Layer(NamedTuple):
    """A convolution of a network, and blocks of random numbers of its input's and its output's shape."""

    name: str
    values: torch.Tensor
    convolution: BlockConvolution
    x: torch.Tensor
    y: torch.Tensor
    #: Rows and columns of the windows of the max-pooling that follows, or one of each.
    pool: Pair
    #: Vectors of samples that are multiplied and added: by each weight at each position that meets no border.
    products: int


class _Kernel(NamedTuple):
    """A run of a kernel, the tensors that it reads and writes, and what else bounds it."""

    run: Call
    read: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    #: Vectors of inputs that it loads, and multiply-adds for each of them.
    loads: int = 0
    factors: int = 1

    def limits(self, rates: Rates) -> dict[str, float]:
        """The least seconds that the first-level cache and the arithmetic allow."""
        if not self.loads:
            return {}
        return {ARITHMETIC: self.factors * self.loads / rates.multiply_adds, FIRST: self.loads / rates.first}


def _forward(layer: _Layer) -> _Kernel:
    """The sums with ReLU and, where it follows, max-pooling."""
    _, values, convolution, x, y, pool, products = layer
    forward = convolution.forward
    if pool == (1, 1) or not forward.pools(pool):
        return _Kernel(lambda: forward(x, values, None, 0.0), (x,), (y,), products)
    pooled = y[:, :, :: pool[0], :: pool[1]].contiguous()
    return _Kernel(lambda: forward.pooled(x, values, None, pool, keep=False), (x,), (pooled,), products)


def _both_gradients(layer: _Layer) -> _Kernel:
    _, values, convolution, x, y, _, products = layer
    transposed, order = convolution.transposed, convolution.structure.order
    return _Kernel(lambda: transposed.with_products(y, x, values, order), (x, y), (x.clone(),), products, 2)


def _weight_gradients(layer: _Layer) -> _Kernel:
    _, _, convolution, x, y, _, products = layer
    return _Kernel(lambda: convolution.forward.products(x, y), (x, y), (), products)


OF_CONVOLUTIONS: dict[str, Callable[[_Layer], _Kernel]] = {
    "forward pass": _forward,
    "gradients of inputs and weights": _both_gradients,
    "gradients of weights alone": _weight_gradients,
}


def _others(x: torch.Tensor, batch: int) -> dict[str, _Kernel]:
    """The kernels that do little with each number, on blocks of a batch, which each read or write but once."""
    pool = Pool((2, 2), (2, 2), (0, 0), (1, 1))
    pooled = torch.randn(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2, x.shape[4])
    winners, y, scale, shift = torch.zeros(pooled.shape, dtype=torch.uint8), torch.relu(x), *torch.ones(2, x.shape[1])
    maxima, of_statistics = (torch.empty_like(pooled), torch.empty_like(winners)), Statistics.of(x, batch)
    normalised = Normalised(x, scale, shift, 1e-5, of_statistics).activated()
    gradient, needed = torch.randn_like(x), (True, True, True, False)
    return {
        "max-pooling": _Kernel(lambda: pool.run(find_winners, x, *maxima), (x,), maxima),
        "gradient through ReLU": _Kernel(lambda: gradient_of_sums(x, y), (x, y), (y.clone(),)),
        "gradient through ReLU and max-pooling": _Kernel(
            lambda: gradient_of_sums(pooled, winners, pool.kernel), (pooled, winners.view(x.dtype)), (y.clone(),)
        ),
        "statistics of a batch": _Kernel(lambda: Statistics.of(x, batch), (x,), ()),
        "normalisation and ReLU": _Kernel(normalised.compute, (x,), (y.clone(),)),
        "gradients of normalisation and ReLU": _Kernel(
            lambda: normalised.gradients(gradient, y, needed), (x, gradient, y), (y.clone(),)
        ),
    }


@dataclass(frozen=True)
class SparseKernels(Grid):
    """The convolutions of a pruned network one by one: the time of each kernel beside what the processor allows."""

    #: Layers one after the other: ReLU follows each convolution, and max-pooling some.
    build: Callable[[], nn.Module] = pruned_vgg11
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: At least two samples: those of a block are the lanes of a vector.
    batches: tuple[int, ...] = (64,)
    #: GFLOP/s of a core in the forward pass of all layers, where products with the border count, too.
    at_least: float | None = 60.0

    name = "sparse_kernels"
    title = "Kernels of a pruned network's convolutions beside the processor's rates"
    source = "Williams et al., Roofline (2009): which limit binds a kernel"

    def cases(self, context: Context) -> Iterable[int]:
        return self.batches

    def measure(self, case: int, context: Context) -> list[Row]:
        layers = _layers(self.build(), torch.randn(1, *self.input_shape), case)
        rates = measured_rates(lanes_for(case, 4), context)
        rows = _rate_rows(Group(f"batch {case}: what a core can do"), rates)
        for name, make in OF_CONVOLUTIONS.items():
            group = Group(f"batch {case}: convolutions, {name}")
            for layer in layers:
                _add(group, layer.name, make(layer), rates, context)
            _add_total(group, layers, rates, self.at_least if make is _forward else None)
            rows += group.rows()
        largest = max(layers, key=lambda layer: layer.y.numel()).y
        group = Group(f"batch {case}: other kernels, {largest.shape[1]} × {largest.shape[2]} × {largest.shape[3]}")
        for label, kernel in _others(largest, case).items():
            _add(group, label, kernel, rates, context)
        return rows + group.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        """For each kernel and layer, the share of each rate that it reaches."""
        panels = []
        drawn = [row for row in rows if _SHARE + ARITHMETIC in _ratios(row)]
        for group in dict.fromkeys(row.group for row in drawn):
            of_group = [row for row in drawn if row.group == group]
            shares = [text for text in _ratios(of_group[0]) if text.startswith(_SHARE)]
            heights = {text.removeprefix(_SHARE): [_ratios(row)[text] for row in of_group] for text in shares}
            # The number, the channels, and the plane below them.
            names = ["\n".join(row.label.split(", ")[:2]) for row in of_group]
            panels.append(Panel([Straight(1.0), Bars(names, heights)], group, "", "share of the rate", grid="y"))
        return Picture(self.title, panels, (9.0, 2.6 * len(panels)), columns=1, legend=4)


def _layers(model: nn.Module, x: torch.Tensor, batch: int) -> list[_Layer]:
    """The convolutions of layers that follow one another, which `x` goes through."""
    layers: list[_Layer] = []
    lanes, parts = lanes_for(batch, 4), [*model.children()]
    for number, part in enumerate(parts):
        if isinstance(part, nn.Conv2d):
            layer = SparseConv2d.from_dense(part)
            convolution = layer._convolution((x.shape[2], x.shape[3]), lanes)
            after, blocks = parts[number + 2 : number + 3], -(-batch // lanes)
            pooling = after[0] if after and isinstance(after[0], nn.MaxPool2d) else nn.MaxPool2d(1)
            window = pooling.kernel_size if isinstance(pooling.kernel_size, tuple) else (pooling.kernel_size,) * 2
            inputs = torch.randn(blocks, *x.shape[1:], lanes)
            outputs = torch.randn(blocks, *convolution.out_shape)
            values = layer.values.detach()
            name = f"{x.shape[1]} → {outputs.shape[1]}, {x.shape[2]} × {x.shape[3]}, {len(values):,} weights"
            met = nn.functional.conv2d(
                torch.ones(1, *x.shape[1:]).double(), layer.mask.double(), None, part.stride, part.padding
            )
            products = blocks * int(met.sum())
            layers.append(_Layer(f"{len(layers) + 1}: {name}", values, convolution, inputs, outputs, window, products))
        with torch.no_grad():
            x = part(x)
    return layers


def _ratios(row: Row) -> dict[str, float]:
    return {comparison.text: comparison.ratio for comparison in row.comparisons}


def _rate_rows(rows: Group, rates: Rates) -> list[Row]:
    loops = {
        "multiply-adds of registers": (rates.multiply_adds, ""),
        "multiply-adds, loading from the first-level cache": (
            rates.first, f"{1e-9 * rates.first * rates.width / rates.threads:.0f} GB/s"
        ),
    }  # fmt: skip
    for label, (rate, loaded) in loops.items():
        gflop = 2e-9 * rate * rates.width / 4 / rates.threads
        rows.value(label, gflop, "rate", "GFLOP/s", role="reference", note=loaded)
    return rows.rows()


def _add(rows: Group, label: str, kernel: _Kernel, rates: Rates, context: Context) -> None:
    """Add the row of a kernel, whose floor is what the nearest limit allows."""
    calls = {label: kernel.run, MEMORY: moved(kernel.read, kernel.written, rates)}
    timings = context.under(rows.name).times(calls)
    row = rows.timed(label, timings[label])
    if not (row.median and row.fastest) or timings[MEMORY].problem:
        return
    limits = {**kernel.limits(rates), MEMORY: min(timings[MEMORY].seconds)}
    shares = [Comparison(_SHARE + limit, least / row.median, least / row.fastest) for limit, least in limits.items()]
    flop = kernel.factors * kernel.loads * rates.width / 2
    speed = [_speed("GFLOP/s a core", flop, row, rates)] if flop else []
    binds = max(limits, key=lambda limit: limits[limit])
    row = replace(row, floor=limits[binds], note=f"nearest limit: {binds}", data={"flop": flop})
    rows.add(row.beside(*speed, *shares))


def _speed(text: str, flop: float, row: Row, rates: Rates, at_least: float | None = None) -> Comparison:
    median, fastest = (1e-9 * flop / rates.threads / (seconds or math.inf) for seconds in (row.median, row.fastest))
    return Comparison(text, median, fastest, at_least=at_least)


def _add_total(rows: Group, layers: Sequence[_Layer], rates: Rates, at_least: float | None) -> None:
    """Add the sum of all layers' times, and the speed that it is."""
    of_layers = rows.rows()
    if any(row.floor is None for row in of_layers):
        return
    sums = {name: sum(getattr(row, name) for row in of_layers) for name in ("median", "fastest", "floor")}
    row = Row("all layers, the sum", rows.name, runs=1, **sums)
    with_border = 2 * sum(len(each.values) * each.y.numel() / each.y.shape[1] for each in layers)
    done = sum(row.data["flop"] for row in of_layers)
    row = row.beside(_speed("GFLOP/s a core", done, row, rates))
    if at_least is not None:
        row = row.beside(_speed("GFLOP/s a core with the border", with_border, row, rates, at_least))
    rows.add(
        row.beside(Comparison("share of the limits", sums["floor"] / sums["median"], sums["floor"] / sums["fastest"]))
    )
