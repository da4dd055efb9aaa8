"""Pruned VGG-11's products of two sparse matrices, planned ahead: against SciPy, PyTorch, GraphBLAS and MKL."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import jacsparse
from jacsparse import Pattern, ProductPlan, SparseJacobian, chain, plan_product
from jacsparse.schedule import Step, resolve

from ._context import Context
from ._experiment import Experiment, Row, compare
from ._figures import bars
from ._peers import MKL_REUSE, PEERS, SCIPY, Peer
from ._workloads import pruned_vgg11

__all__ = ["Spgemm"]

METHODS = ("slots", "rowwise", "merge")
#: Relative to the product's largest entry: peers add in another order.
TOLERANCE = 1e-5
# Seconds before each turn, so that no peer's threads still spin.
_PAUSE = 0.3


@dataclass(frozen=True)
class Spgemm(Experiment):
    """One product of two convolutions by all methods and peers, then all products of the schedule.

    Attributes
    ----------
    build : callable
        Makes the network.
    input_shape : tuple of int
        Of a sample.
    factors : pair of int
        The stages, from 0, whose transposed Jacobians are multiplied by all peers.
    batch : int
        Of the rows that say so.
    schedule : str
        Whose products are all measured.
    """

    build: Callable[[], nn.Module] = pruned_vgg11
    input_shape: tuple[int, ...] = (3, 32, 32)
    factors: tuple[int, int] = (6, 8)
    batch: int = 16
    schedule: str = "blelloch:2"

    name = "spgemm"
    title = "Products of pruned VGG-11's transposed Jacobians"
    source = "thesis, section 3.3: structure known ahead; peers' products"

    def run(self, context: Context) -> list[Row]:
        module = self.build()
        stages = chain(module, self.input_shape)
        records = stages.run(torch.randn(1, *self.input_shape, generator=torch.Generator().manual_seed(0)))
        left, right = (records[stage].transposed_jacobian() for stage in self.factors)
        names = [f"J{stage + 1}ᵀ" for stage in self.factors]
        rows = _one_product(left, right, f"{' · '.join(names)}, two convolutions", self.batch, context)
        jacobians = {len(stages) - number: record.transposed_jacobian() for number, record in enumerate(records)}
        winners = {len(stages) - number: record.winners() for number, record in enumerate(records)}
        return rows + self._all_products(module, jacobians, winners, context)

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        # The product that all peers compute; the schedule's many are in the report's tables.
        shown = [row for row in rows if row.group == rows[0].group]
        bars(shown, path, self.title)

    def _all_products(
        self,
        module: nn.Module,
        jacobians: dict[int, SparseJacobian],
        winners: dict[int, torch.Tensor | None],
        context: Context,
    ) -> list[Row]:
        """Each live product of two matrices, in the schedule's order."""
        report = jacsparse.count_flop(module, self.input_shape, schedule=self.schedule, executed=False)
        schedule = resolve(self.schedule, len(jacobians))
        rows: list[Row] = []
        for step, counted in zip(schedule.products, report.steps, strict=True):
            if step.kind != "mm" or not step.live:
                continue
            group = f"All products of {self.schedule}, batch 1"
            rows += _step(step, f"{counted.left} · {counted.right}", group, jacobians, winners, context)
        return rows


def _one_product(left: SparseJacobian, right: SparseJacobian, group: str, batch: int, context: Context) -> list[Row]:
    a, b = left.pattern, right.pattern
    plans = {method: plan_product(a, b, method=method) for method in METHODS}
    product = plans["slots"].pattern
    out = torch.empty((product.nnz, 1))
    peers, missing = _prepared(left, right, plans["slots"], group, context)
    found = context.times(
        {
            **{method: _multiplication(plan, left.values, right.values, out) for method, plan in plans.items()},
            **{label: peer.multiply for label, peer in peers.items()},
        },
        pause=_PAUSE,
    )
    plan_times = context.times({method: _planning(a, b, method) for method in METHODS}, seconds=context.seconds / 2)
    peer_rows = [Row.timed(label, found[label], group=group, role="peer") for label in peers]
    scipy, reuse = (next((row for row in peer_rows if row.label == label), None) for label in (SCIPY, MKL_REUSE))
    rows = [_size_row(plans["slots"], group)]
    multiplied = {}
    for method, plan in plans.items():
        rows.append(Row.timed(f"plan, {method}", plan_times[method], group=group))
        floor = context.limits.floor(_moved(plan, (left.values, right.values), 1), plan.flop)
        row = Row.timed(f"multiply, {method}", found[method], group=group, floor=floor)
        # The targets are those of the fastest method.
        goals = ({"at_least": 10.0}, {"at_least": 1.3}) if method == "slots" else ({}, {})
        compared = [
            compare(f"{name} / {method}", peer, row, **goal)
            for name, peer, goal in zip(("SciPy", "MKL reuse"), (scipy, reuse), goals, strict=True)
            if peer is not None
        ]
        multiplied[method] = replace(row, comparisons=tuple(itertools.chain(*compared)))
        rows.append(multiplied[method])
    del out
    rows += _batch_rows(plans, left, right, multiplied, batch, context)
    return rows + peer_rows + missing


def _prepared(
    left: SparseJacobian, right: SparseJacobian, plan: ProductPlan, group: str, context: Context
) -> tuple[dict[str, Peer], list[Row]]:
    """The peers that are installed and compute the same product, and rows that say why the others are not measured."""
    a, b = left.to_scipy(), right.to_scipy()
    expected = plan.pattern.to_scipy(plan.multiply(left.values, right.values)[:, 0].numpy())
    peers, missing = {}, []
    for label, prepare in PEERS.items():
        context.say(f"{label}: checking its product")
        try:
            peer = prepare(a, b, context.threads)
        except ImportError as error:
            missing.append(Row.missing(label, str(error), group=group, role="peer"))
            continue
        difference = _difference(peer.to_scipy(peer.multiply()), expected)
        if difference > TOLERANCE:
            reason = f"its product differs from ours by {difference:.1e} of the largest entry"
            missing.append(Row.missing(label, reason, group=group, role="peer"))
        else:
            peers[label] = peer
    return peers, missing


def _difference(found: Any, expected: Any) -> float:
    """Largest difference between two matrices, as a share of the largest entry."""
    found.sort_indices()
    if np.array_equal(found.indptr, expected.indptr) and np.array_equal(found.indices, expected.indices):
        difference = np.abs(found.data - expected.data)
    else:
        difference = np.abs((found - expected).data)
    return float(difference.max(initial=0) / max(np.abs(expected.data).max(initial=0), np.finfo(np.float32).tiny))


def _batch_rows(
    plans: dict[str, ProductPlan],
    left: SparseJacobian,
    right: SparseJacobian,
    single: dict[str, Row],
    batch: int,
    context: Context,
) -> list[Row]:
    """The product for several samples at once, each method in turn: times are for one sample."""
    product, group = plans["slots"].pattern, single["slots"].group
    needed = 4 * batch * (left.pattern.nnz + right.pattern.nnz + product.nnz)
    if needed > _available() // 2:
        reason = f"a batch of {batch} needs {needed / 2**30:.1f} GiB"
        return [Row.missing(f"multiply, {method}, batch {batch}", reason, group=group) for method in plans]
    a_values, b_values = (matrix.values.repeat(1, batch) for matrix in (left, right))
    out = torch.empty((product.nnz, batch))
    found = context.times(
        {f"{method}, batch {batch}": _multiplication(plan, a_values, b_values, out) for method, plan in plans.items()}
    )
    rows = []
    for method, plan in plans.items():
        floor = context.limits.floor(_moved(plan, (a_values, b_values), batch), plan.flop * batch) / batch
        timing = found[f"{method}, batch {batch}"]
        label = f"multiply, {method}, batch {batch}, for each sample"
        row = Row.timed(label, timing, per=batch, group=group, floor=floor)
        goal = {"at_least": 1.0} if method == "slots" else {}
        rows.append(replace(row, comparisons=compare("batch 1 / this", single[method], row, **goal)))
    return rows


def _step(
    step: Step,
    name: str,
    group: str,
    jacobians: dict[int, SparseJacobian],
    winners: dict[int, torch.Tensor | None],
    context: Context,
) -> list[Row]:
    """One product of the schedule, ours and SciPy's; its values go into `jacobians`, for later products."""
    if step.left not in jacobians or step.right not in jacobians:
        return [Row.missing(f"{name}: multiply", "a factor was too large to be made", group=group)]
    left, right = jacobians[step.left], jacobians[step.right]
    a, b = left.pattern, right.pattern
    plan = plan_product(a, b, winners=True)
    needed = plan.nbytes + 8 * plan.pattern.nnz
    if needed > _available() // 2:
        return [Row.missing(f"{name}: multiply", f"it needs {needed / 2**30:.1f} GiB", group=group)]
    a_values = _operand(step.left, plan.selects_left, jacobians, winners)
    b_values = _operand(step.right, plan.selects_right, jacobians, winners)
    out = torch.empty((plan.pattern.nnz, 1))
    planning, multiplying, by_scipy = (
        f"{name}: plan, {plan.method}",
        f"{name}: multiply, {plan.method}",
        f"{name}: {SCIPY}",
    )
    functions = {planning: _planning(a, b, "auto"), multiplying: _multiplication(plan, a_values, b_values, out)}
    # SciPy holds the product's indices and values twice while it sorts them out.
    scipy_needs = 2 * 8 * plan.pattern.nnz
    if scipy_needs <= _available() // 2:
        scipy_a, scipy_b = left.to_scipy(), right.to_scipy()
        functions[by_scipy] = lambda: scipy_a @ scipy_b
    found = context.times(functions, seconds=context.seconds / 5)
    jacobians[step.out] = SparseJacobian(plan.pattern, out)
    if by_scipy in found:
        scipy = Row.timed(by_scipy, found[by_scipy], group=group, role="peer")
    else:
        scipy = Row.missing(by_scipy, f"it needs {scipy_needs / 2**30:.1f} GiB", group=group, role="peer")
    multiplied = Row.timed(
        multiplying,
        found[multiplying],
        group=group,
        floor=context.limits.floor(_moved(plan, (a_values, b_values), 1), plan.flop),
        note=f"{plan.flop:,} flop, {plan.pattern.nnz:,} entries",
    )
    return [
        Row.timed(planning, found[planning], group=group),
        replace(multiplied, comparisons=compare(f"SciPy / {plan.method}", scipy, multiplied)),
        scipy,
    ]


def _operand(
    value: int, selects: bool, jacobians: dict[int, SparseJacobian], winners: dict[int, torch.Tensor | None]
) -> torch.Tensor:
    """Values of a factor; the winners where the plan selects by them."""
    chosen = winners[value] if selects else jacobians[value].values
    assert chosen is not None
    return chosen


def _multiplication(
    plan: ProductPlan, a_values: torch.Tensor, b_values: torch.Tensor, out: torch.Tensor
) -> Callable[[], object]:
    return lambda: plan.multiply(a_values, b_values, out=out)


def _planning(a: Pattern, b: Pattern, method: str) -> Callable[[], object]:
    return lambda: plan_product(a, b, method=method)


def _moved(plan: ProductPlan, factors: Sequence[torch.Tensor], batch: int) -> int:
    """Bytes that have to move: factors and the plan's index arrays read once, the product written once."""
    return sum(values.nbytes for values in factors) + plan.nbytes + 4 * plan.pattern.nnz * batch


def _size_row(plan: ProductPlan, group: str) -> Row:
    (m, k), n = plan.a.shape, plan.b.shape[1]
    note = f"{m:,} × {k:,} × {n:,}; {plan.a.nnz:,} and {plan.b.nnz:,} entries in, {plan.pattern.nnz:,} out"
    return Row.of_value("multiply-adds", plan.flop // 2, "count", group=group, note=note)


def _available() -> int:
    """Bytes of memory that nobody uses."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30
