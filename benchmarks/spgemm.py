"""Pruned VGG-11's products of two sparse matrices, planned ahead, against SciPy, MKL, cuSPARSE and others."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import jacsparse
from jacsparse import Pattern, ProductPlan, SparseJacobian, chain, plan_product
from jacsparse.schedule import Step, resolve

from ._calls import GRAPH, MODES, Call, in_mode, labelled, ready
from ._context import Context
from ._experiment import Experiment
from ._figures import Picture, times_picture
from ._peers import GOALS, PEERS, Peer
from ._rows import Group, Row, reason
from ._workloads import pruned_vgg11

#: On each device, what `auto` takes for two sparse factors first; `slots` has no kernel for GPUs.
METHODS = {"cpu": ("slots", "rowwise", "merge"), "cuda": ("merge", "rowwise")}
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
        rows = Group(f"All products of {self.schedule}, batch 1")
        for step, counted in zip(resolve(self.schedule, len(jacobians)).products, report.steps, strict=True):
            if step.kind == "mm" and step.live:
                _add_step(rows, step, f"{counted.left} · {counted.right}", jacobians, winners, context)
        return rows.rows()


def _one_product(left: SparseJacobian, right: SparseJacobian, group: str, batch: int, context: Context) -> list[Row]:
    a, b, rows, modes = left.pattern, right.pattern, Group(group), MODES[context.device]
    methods = METHODS[context.device]
    plans = {method: plan_product(a, b, method=method) for method in methods}
    plan, values = plans[methods[0]], (left.values, right.values)
    (m, k), n = a.shape, b.shape[1]
    note = f"{m:,} × {k:,} × {n:,}; {a.nnz:,} and {b.nnz:,} entries in, {plan.pattern.nnz:,} out"
    rows.value("multiply-adds", plan.flop // 2, "count", note=note)
    expected = plan.pattern.to_scipy(plan.multiply(*values)[:, 0].cpu().numpy())
    peers, missing = dict[str, Peer](), Group(group)
    for label in PEERS[context.device]:
        if peer := _checked(missing, label, left.to_scipy(), right.to_scipy(), expected, context):
            peers[label] = peer
    out = left.values.new_empty((plan.pattern.nnz, 1))
    calls = {f"multiply, {method}": _multiplication(plan, *values, out) for method, plan in plans.items()}
    capturable = {*calls, *(label for label, peer in peers.items() if peer.capturable)}
    ours = {method: {mode: labelled(f"multiply, {method}", mode) for mode in modes} for method in methods}
    floors = {
        label: context.limits.floor(_moved(plan, values, 1), plan.flop)
        for method, plan in plans.items()
        for label in ours[method].values()
    }
    planned = {f"plan and first multiply, {each}": _planning(a, b, each, values) for each in methods}
    rows.in_turns(context, planned, seconds=context.seconds / 2)
    calls |= {label: peer.multiply for label, peer in peers.items()}
    in_modes, pause = _in_modes(calls, capturable, context.device), _PAUSE if context.device == "cpu" else 0.0
    roles = {label: "ours" if label in floors else "peer" for label in in_modes}
    rows.in_turns(context, in_modes, pause=pause, floor=floors, role=roles)
    del out
    for mode in modes:
        fastest = rows.fastest(labels[mode] for labels in ours.values())
        for method, label in ((method, labels[mode]) for method, labels in ours.items()):
            for goal in GOALS[context.device]:
                # A peer that cannot run in a mode is compared in the first one; the targets are the fastest method's.
                peer_mode = mode if labelled(goal.label, mode) in rows else modes[0]
                name = goal.name if peer_mode == mode else labelled(goal.name, peer_mode)
                at_least = goal.at_least if fastest is not None and label == fastest.label else None
                rows.compare(f"{name} / {method}", labelled(goal.label, peer_mode), label, at_least=at_least)
    _add_batches(rows, plans, left, right, batch, context)
    return [*rows.rows(), *missing.rows()]


def _in_modes(calls: Mapping[str, Call], capturable: Container[str], device: str) -> dict[str, Call]:
    """The calls in each mode of a device: on CUDA, those that can be captured also as graphs."""
    return {
        labelled(label, mode): in_mode(ready(call), mode)
        for mode in MODES[device]
        for label, call in calls.items()
        if mode != GRAPH or label in capturable
    }


def _checked(rows: Group, label: str, a: Any, b: Any, expected: Any, context: Context) -> Peer | None:
    """A peer for a product of two matrices of SciPy; None where something stands against it, which a row then says."""
    context.say(f"{label}: checking its product")
    try:
        peer = PEERS[context.device][label](a, b, context)
        difference = _difference(peer.to_scipy(peer.multiply()), expected)
    except Exception as error:
        problem = reason(error)
    else:
        if difference <= TOLERANCE:
            return peer
        problem = f"its product differs from ours by {difference:.1e} of the largest entry"
    rows.missing(label, problem, role="peer")
    return None


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
    methods = METHODS[context.device]
    product = plans[methods[0]].pattern
    problem = _too_large(4 * batch * (left.pattern.nnz + right.pattern.nnz + product.nnz), context.device)
    if problem:
        for method in plans:
            rows.missing(f"multiply, {method}, batch {batch}", problem)
        return
    values = left.values.repeat(1, batch), right.values.repeat(1, batch)
    out = values[0].new_empty((product.nnz, batch))
    by_label = {f"multiply, {method}, batch {batch}, for each sample": plan for method, plan in plans.items()}
    calls = {label: _multiplication(plan, *values, out) for label, plan in by_label.items()}
    floors = {
        label: context.limits.floor(_moved(plan, values, batch), plan.flop * batch) / batch
        for label, plan in by_label.items()
    }
    rows.in_turns(context, calls, per=batch, floor=floors)
    for method, label in zip(plans, by_label, strict=True):
        single = labelled(f"multiply, {method}", MODES[context.device][0])
        rows.compare("batch 1 / this", single, label, at_least=1.0 if method == methods[0] else None)


def _add_step(
    rows: Group,
    step: Step,
    name: str,
    jacobians: dict[int, SparseJacobian],
    winners: dict[int, torch.Tensor | None],
    context: Context,
) -> None:
    """Add one product of the schedule, ours and a peer's; `jacobians` gets the product, for later steps."""
    if step.left not in jacobians or step.right not in jacobians:
        rows.missing(f"{name}: multiply", "a factor was not made")
        return
    left, right = jacobians[step.left], jacobians[step.right]
    a, b = left.pattern, right.pattern
    plan, device, modes = plan_product(a, b, winners=True), context.device, MODES[context.device]
    if plan.device_method != plan.method and device == "cuda":
        plan = plan_product(a, b, method=plan.device_method)
    if problem := _too_large(plan.nbytes + 8 * plan.pattern.nnz, device):
        rows.missing(f"{name}: multiply", problem)
        return
    a_values = _operand(step.left, plan.selects_left, jacobians, winners)
    b_values = _operand(step.right, plan.selects_right, jacobians, winners)
    out, goal = left.values.new_empty((plan.pattern.nnz, 1)), GOALS[device][0]
    multiplying, by_peer = f"{name}: multiply, {plan.method}", labelled(f"{name}: {goal.label}", modes[0])
    ours = [labelled(multiplying, mode) for mode in modes]
    calls = dict[str, Call]()
    if device == "cpu":
        planning = _planning(a, b, "auto", (left.values, right.values))
        calls[f"{name}: plan and first multiply, {plan.method}"] = planning
    calls |= _in_modes({multiplying: _multiplication(plan, a_values, b_values, out)}, {multiplying}, device)
    # A peer needs the product's indices and values twice while it sorts them.
    peer_problem = _too_large(2 * 8 * plan.pattern.nnz, device)
    if not peer_problem:
        calls[by_peer] = in_mode(
            lambda: PEERS[device][goal.label](left.to_scipy(), right.to_scipy(), context).multiply, modes[0]
        )
    floors = dict.fromkeys(ours, context.limits.floor(_moved(plan, (a_values, b_values), 1), plan.flop))
    notes = dict.fromkeys(ours, f"{plan.flop:,} flop, {plan.pattern.nnz:,} entries")
    rows.in_turns(context, calls, seconds=context.seconds / 5, floor=floors, note=notes, role={by_peer: "peer"})
    if peer_problem:
        rows.missing(by_peer, peer_problem, role="peer")
    if not rows[ours[0]].not_measured:
        jacobians[step.out] = SparseJacobian(plan.pattern, out)
    for label in ours:
        rows.compare(f"{goal.name} / {plan.method}", by_peer, label)


def _operand(
    value: int, selects: bool, jacobians: dict[int, SparseJacobian], winners: dict[int, torch.Tensor | None]
) -> torch.Tensor:
    """The values of a factor, or its winners if the plan selects by them."""
    operand = winners[value] if selects else jacobians[value].values
    assert operand is not None
    return operand


def _multiplication(plan: ProductPlan, a_values: torch.Tensor, b_values: torch.Tensor, out: torch.Tensor) -> Call:
    return lambda: plan.multiply(a_values, b_values, out=out)


def _planning(a: Pattern, b: Pattern, method: str, values: tuple[torch.Tensor, torch.Tensor]) -> Call:
    """A new plan and its first product, which makes index arrays too."""
    return lambda: plan_product(a, b, method=method, cache=False).multiply(*values)


def _moved(plan: ProductPlan, factors: Sequence[torch.Tensor], batch: int) -> int:
    """The least bytes that move: the factors and the plan's index arrays are read once, the product is written once."""
    return sum(values.nbytes for values in factors) + plan.nbytes + 4 * plan.pattern.nnz * batch


def _too_large(nbytes: int, device: str) -> str:
    """Why arrays of so many bytes are not made, or nothing where they fit half of the memory."""
    return f"it needs {nbytes / 2**30:.1f} GiB" if nbytes > _available(device) // 2 else ""


def _available(device: str) -> int:
    """Bytes of unused memory of the host or, if less, of a CUDA device."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        free = 4 * 2**30
    return min(free, torch.cuda.mem_get_info()[0]) if device == "cuda" else free
