"""Pruned VGG-11's products of two sparse matrices, planned ahead, against SciPy, MKL, cuSPARSE and others."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jacsparse.spgemm import Stencil
from torch import nn

import jacsparse
from jacsparse import Pattern, ProductPlan, SparseJacobian, chain, plan_product
from jacsparse.schedule import Step, resolve

from ._calls import GRAPH, MODES, Call, in_mode, labelled, ready
from ._context import Context, Timing
from ._experiment import Experiment, Group, Row, reason
from ._figures import Picture, times_picture
from ._peers import GOALS, MKL_REUSE, PEERS, Peer
from ._workloads import pruned_vgg11

__all__ = ["Spgemm"]

METHODS = ("slots", "rowwise", "merge")
#: The allowed difference relative to the product's largest entry, as peers add in another order.
TOLERANCE = 1e-5
# Seconds before each turn, until no peer's threads spin any more.
_PAUSE = 0.3


@dataclass(frozen=True)
class Spgemm(Experiment):
    """One product of two convolutions by all methods and peers, then all products of the schedule."""

    build: Callable[[], nn.Module] = pruned_vgg11
    #: Shape of one sample.
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: The stages, from 0, whose transposed Jacobians are multiplied by all peers.
    factors: tuple[int, int] = (6, 8)
    #: Samples per batch in the rows of batches.
    batch: int = 16
    #: The schedule whose products are all measured.
    schedule: str = "blelloch:2"

    name = "spgemm"
    title = "Products of pruned VGG-11's transposed Jacobians"
    source = "thesis, section 3.3: structure known ahead; peers' products"
    devices = ("cpu", "cuda")

    def run(self, context: Context) -> list[Row]:
        module = self.build()
        stages = chain(module, self.input_shape)
        records = stages.run(torch.randn(1, *self.input_shape, generator=torch.Generator().manual_seed(0)))
        # The factors are computed on the CPU and moved, as only products are measured.
        matrices = [record.transposed_jacobian().to(context.place) for record in records]
        selected = [record.winners() for record in records]
        names = [f"J{stage + 1}ᵀ" for stage in self.factors]
        left, right = (matrices[stage] for stage in self.factors)
        rows = _one_product(left, right, f"{' · '.join(names)}, two convolutions", self.batch, context)
        between = range(self.factors[0] + 1, self.factors[1])
        if context.device == "cpu" and len(between) == 1:
            named = f"{names[0]} · J{between[0] + 1}ᵀ · {names[1]}"
            group = f"Two convolutions and a diagonal between them, {named}"
            rows += _stencil_rows(left, matrices[between[0]], right, group, self.batch, context)
        jacobians = {len(stages) - number: matrix for number, matrix in enumerate(matrices)}
        winners = {
            len(stages) - number: None if winner is None else winner.to(context.place)
            for number, winner in enumerate(selected)
        }
        return rows + self._all_products(module, jacobians, winners, context)

    def picture(self, rows: Sequence[Row]) -> Picture:
        # The picture has the product that all peers compute; the report's tables have all products of the schedule.
        return times_picture([row for row in rows if row.group == rows[0].group], self.title)

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
    out = left.values.new_empty((plans["slots"].pattern.nnz, 1))
    peers, missing = _prepared(left, right, plans["slots"], group, context)
    multiplications = {
        f"multiply, {method}": _multiplication(plan, left.values, right.values, out) for method, plan in plans.items()
    }
    capturable = {*multiplications, *(label for label, peer in peers.items() if peer.capturable)}
    calls = {**multiplications, **{label: peer.multiply for label, peer in peers.items()}}
    timings = _timed(calls, capturable, context, pause=_PAUSE if context.device == "cpu" else 0.0)
    planned = context.times({method: _planning(a, b, method) for method in METHODS}, seconds=context.seconds / 2)
    del out
    rows, modes = Group(group), MODES[context.device]
    _add_size(rows, plans["slots"])
    for method, plan in plans.items():
        rows.timed(f"plan, {method}", planned[method])
        floor = context.limits.floor(_moved(plan, (left.values, right.values), 1), plan.flop)
        for mode in modes:
            label = f"multiply, {method}"
            rows.timed(labelled(label, mode), timings[label, mode], floor=floor)
    _add_batches(rows, plans, left, right, batch, context)
    for (label, mode), timing in timings.items():
        if label in peers:
            rows.timed(labelled(label, mode), timing, role="peer")
    for mode in modes:
        labels = {method: labelled(f"multiply, {method}", mode) for method in METHODS}
        fastest = rows.fastest(labels.values())
        for method, label in labels.items():
            for goal in GOALS[context.device]:
                # A peer that cannot run in a mode is compared in the first one; the targets are the fastest method's.
                peer_mode = mode if labelled(goal.label, mode) in rows else modes[0]
                name = goal.name if peer_mode == mode else labelled(goal.name, peer_mode)
                at_least = goal.at_least if fastest is not None and label == fastest.label else None
                rows.compare(f"{name} / {method}", labelled(goal.label, peer_mode), label, at_least=at_least)
    return [*rows.rows(), *missing]


def _timed(
    calls: Mapping[str, Call], capturable: Container[str], context: Context, **options: float
) -> dict[tuple[str, str], Timing]:
    """The timings of calls by label and mode; on CUDA, those that can be captured are also timed as graphs."""
    modes = MODES[context.device]
    keys = [(label, mode) for mode in modes for label in calls if mode != GRAPH or label in capturable]
    functions = {labelled(*key): in_mode(ready(calls[key[0]]), key[1]) for key in keys}
    timings = context.times(functions, **options)
    return {key: timings[labelled(*key)] for key in keys}


def _prepared(
    left: SparseJacobian, right: SparseJacobian, plan: ProductPlan, group: str, context: Context
) -> tuple[dict[str, Peer], list[Row]]:
    """The peers that are installed and compute the same product, and rows with the reasons against the others."""
    a, b = left.to_scipy(), right.to_scipy()
    expected = plan.pattern.to_scipy(plan.multiply(left.values, right.values)[:, 0].cpu().numpy())
    peers, missing = dict[str, Peer](), list[Row]()
    for label in PEERS[context.device]:
        peer = _checked(label, a, b, expected, group, context)
        if isinstance(peer, Row):
            missing.append(peer)
        else:
            peers[label] = peer
    return peers, missing


def _checked(label: str, a: Any, b: Any, expected: Any, group: str, context: Context) -> Peer | Row:
    """A peer for a product of two matrices of SciPy, or a row with what stands against it."""
    context.say(f"{label}: checking its product")
    try:
        peer = PEERS[context.device][label](a, b, context)
        difference = _difference(peer.to_scipy(peer.multiply()), expected)
    except Exception as error:
        return Row.missing(label, reason(error), group=group, role="peer")
    if difference > TOLERANCE:
        problem = f"its product differs from ours by {difference:.1e} of the largest entry"
        return Row.missing(label, problem, group=group, role="peer")
    return peer


def _difference(product: Any, expected: Any) -> float:
    """The largest difference between two matrices, as a share of the largest entry."""
    product.sort_indices()
    if np.array_equal(product.indptr, expected.indptr) and np.array_equal(product.indices, expected.indices):
        difference = np.abs(product.data - expected.data)
    else:
        difference = np.abs((product - expected).data)
    return float(difference.max(initial=0) / max(np.abs(expected.data).max(initial=0), np.finfo(np.float32).tiny))


def _add_batches(
    rows: Group,
    plans: dict[str, ProductPlan],
    left: SparseJacobian,
    right: SparseJacobian,
    batch: int,
    context: Context,
) -> None:
    """Add the product for several samples at once, by all methods; times are for one sample."""
    product = plans["slots"].pattern
    needed = 4 * batch * (left.pattern.nnz + right.pattern.nnz + product.nnz)
    if needed > _available(context.device) // 2:
        for method in plans:
            rows.missing(f"multiply, {method}, batch {batch}", f"a batch of {batch} needs {needed / 2**30:.1f} GiB")
        return
    a_values, b_values = (matrix.values.repeat(1, batch) for matrix in (left, right))
    out = a_values.new_empty((product.nnz, batch))
    timings = context.times(
        {f"{method}, batch {batch}": _multiplication(plan, a_values, b_values, out) for method, plan in plans.items()}
    )
    for method, plan in plans.items():
        floor = context.limits.floor(_moved(plan, (a_values, b_values), batch), plan.flop * batch) / batch
        label, single = f"multiply, {method}, batch {batch}, for each sample", f"multiply, {method}"
        rows.timed(label, timings[f"{method}, batch {batch}"], per=batch, floor=floor)
        at_least = 1.0 if method == "slots" else None
        rows.compare("batch 1 / this", labelled(single, MODES[context.device][0]), label, at_least=at_least)


def _stencil_rows(
    left: SparseJacobian, diagonal: SparseJacobian, right: SparseJacobian, group: str, batch: int, context: Context
) -> list[Row]:
    """Rows of ``left · diagonal · right`` by a stencil, by slots and by MKL; a batch's times are for one sample."""
    if Stencil.obstacle(left.pattern, right.pattern):
        return []
    stencil = Stencil(left.pattern, right.pattern)
    scale = plan_product(left.pattern, diagonal.pattern)
    slots = plan_product(scale.pattern, right.pattern, method="slots")
    rows = Group(group)
    for samples in (1, batch):
        labels = [f"{name}, batch {samples}" for name in ("stencil", "scale and slots")]
        needed = 4 * (samples * slots.pattern.nnz + stencil.size(samples))
        if needed > _available("cpu") // 2:
            for label in labels:
                rows.missing(label, f"it needs {needed / 2**30:.1f} GiB")
            continue
        d = diagonal.values.repeat(1, samples)
        scaled, product = (d.new_empty((plan.pattern.nnz, samples)) for plan in (scale, slots))
        grids = d.new_empty(stencil.size(samples))

        def by_slots(d: Any = d, scaled: Any = scaled, product: Any = product) -> object:
            return slots.multiply(scale.multiply(left.values, d, out=scaled), right.values, out=product)

        def by_stencil(d: Any = d, grids: Any = grids) -> object:
            return stencil.multiply(left.values, d, right.values, out=grids)

        calls: dict[str, Call] = dict(zip(labels, (by_stencil, by_slots), strict=True))
        if samples == 1:
            by_slots()
            factor, expected = (
                plan.pattern.to_scipy(values[:, 0].numpy()) for plan, values in ((scale, scaled), (slots, product))
            )
            peer = _checked(MKL_REUSE, factor, right.to_scipy(), expected, group, context)
            if isinstance(peer, Row):
                rows.add(peer)
            else:
                calls[MKL_REUSE] = peer.multiply
        timings = context.times(calls, pause=_PAUSE if MKL_REUSE in calls else 0.0)
        for label in labels:
            rows.timed(label, timings[label], per=samples)
        if MKL_REUSE in calls:
            rows.timed(MKL_REUSE, timings[MKL_REUSE], role="peer")
        goals = {labels[1]: 2.5, MKL_REUSE: 8.0} if samples == 1 else {}
        for label in (labels[1], *(name for name in calls if name == MKL_REUSE)):
            rows.compare(f"{label.split(',')[0]} / stencil", label, labels[0], at_least=goals.get(label))
    return rows.rows()


def _step(
    step: Step,
    name: str,
    group: str,
    jacobians: dict[int, SparseJacobian],
    winners: dict[int, torch.Tensor | None],
    context: Context,
) -> list[Row]:
    """Rows of one product of the schedule, ours and a peer's; `jacobians` gets the product, for later steps."""
    if step.left not in jacobians or step.right not in jacobians:
        return [Row.missing(f"{name}: multiply", "a factor was not made", group=group)]
    left, right = jacobians[step.left], jacobians[step.right]
    a, b = left.pattern, right.pattern
    plan, device, first = plan_product(a, b, winners=True), context.device, MODES[context.device][0]
    if plan.device_method != plan.method and device == "cuda":
        plan = plan_product(a, b, method=plan.device_method)
    needed = plan.nbytes + 8 * plan.pattern.nnz
    if needed > _available(device) // 2:
        return [Row.missing(f"{name}: multiply", f"it needs {needed / 2**30:.1f} GiB", group=group)]
    a_values = _operand(step.left, plan.selects_left, jacobians, winners)
    b_values = _operand(step.right, plan.selects_right, jacobians, winners)
    out = left.values.new_empty((plan.pattern.nnz, 1))
    goal = GOALS[device][0]
    planning, multiplying = f"{name}: plan, {plan.method}", f"{name}: multiply, {plan.method}"
    by_peer = f"{name}: {goal.label}"
    calls = {multiplying: _multiplication(plan, a_values, b_values, out)}
    if device == "cpu":
        calls[planning] = _planning(a, b, "auto")
    # A peer needs the product's indices and values twice while it sorts them.
    peer_needs = 2 * 8 * plan.pattern.nnz
    if peer_needs <= _available(device) // 2:
        calls[by_peer] = in_mode(
            lambda: PEERS[device][goal.label](left.to_scipy(), right.to_scipy(), context).multiply, first
        )
    timings = _timed(calls, {multiplying}, context, seconds=context.seconds / 5)
    if not timings[multiplying, first].problem:
        jacobians[step.out] = SparseJacobian(plan.pattern, out)
    rows = Group(group)
    if planning in calls:
        rows.timed(planning, timings[planning, first])
    floor = context.limits.floor(_moved(plan, (a_values, b_values), 1), plan.flop)
    labels = [labelled(multiplying, mode) for mode in MODES[device]]
    for label, mode in zip(labels, MODES[device], strict=True):
        note = f"{plan.flop:,} flop, {plan.pattern.nnz:,} entries"
        rows.timed(label, timings[multiplying, mode], floor=floor, note=note)
    if by_peer in calls:
        peer = rows.timed(labelled(by_peer, first), timings[by_peer, first], role="peer")
    else:
        peer = rows.missing(by_peer, f"it needs {peer_needs / 2**30:.1f} GiB", role="peer")
    for label in labels:
        rows.compare(f"{goal.name} / {plan.method}", peer.label, label)
    return rows.rows()


def _operand(
    value: int, selects: bool, jacobians: dict[int, SparseJacobian], winners: dict[int, torch.Tensor | None]
) -> torch.Tensor:
    """The values of a factor, or its winners if the plan selects by them."""
    operand = winners[value] if selects else jacobians[value].values
    assert operand is not None
    return operand


def _multiplication(plan: ProductPlan, a_values: torch.Tensor, b_values: torch.Tensor, out: torch.Tensor) -> Call:
    return lambda: plan.multiply(a_values, b_values, out=out)


def _planning(a: Pattern, b: Pattern, method: str) -> Call:
    return lambda: plan_product(a, b, method=method, cache=False)


def _moved(plan: ProductPlan, factors: Sequence[torch.Tensor], batch: int) -> int:
    """The least bytes that move: the factors and the plan's index arrays are read once, the product is written once."""
    return sum(values.nbytes for values in factors) + plan.nbytes + 4 * plan.pattern.nnz * batch


def _add_size(rows: Group, plan: ProductPlan) -> None:
    (m, k), n = plan.a.shape, plan.b.shape[1]
    note = f"{m:,} × {k:,} × {n:,}; {plan.a.nnz:,} and {plan.b.nnz:,} entries in, {plan.pattern.nnz:,} out"
    rows.value("multiply-adds", plan.flop // 2, "count", note=note)


def _available(device: str) -> int:
    """Bytes of unused memory of the host or, if less, of a CUDA device."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        free = 4 * 2**30
    return min(free, torch.cuda.mem_get_info()[0]) if device == "cuda" else free
