"""FLOP accounting: a schedule's steps, run over counts of entries instead of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..patterns import Pattern
from ..schedule import COUNTED, Schedule, Step, balanced, by_level, check_workers, linear, resolve
from ..stages import Region, check_input, check_shape
from ..tracing import check_module, samples_of
from .counts import Counts, full_mask, input_step, multiply_mask
from .estimate import ENOUGH, CountEstimate, check_memory, estimate_count
from .layer_flop import OperatorWork, StepFlop
from .layers import layer_records
from .network import Network
from .report import BackPropagation, BaselineStep, FlopReport, FlopStep, ScheduleChoice
from .subject import Subject, chain_subject


def count_flop(
    module: nn.Module,
    input_shape: Sequence[int] | None = None,
    *,
    schedule: Schedule | str = COUNTED,
    structure: str = "guaranteed",
    inputs: Any = None,
    executed: bool | None = None,
    workers: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
    accept: Callable[[CountEstimate], bool] | None = None,
) -> FlopReport:
    """Count the FLOP of one sample's backward pass, step by step.

    Parameters
    ----------
    module : Module
        A module, whose samples may depend on each other, as by batch normalisation in training mode. An ``nn.RNN``,
        ``nn.GRU`` or ``nn.LSTM`` of one layer in one direction is counted as a chain of its steps. Of an output with
        named entries, as those of ``transformers``, the first of ``loss``, ``logits`` and ``last_hidden_state`` is
        counted, or the only one.
    input_shape : sequence of int, optional
        Shape of one sample, without the batch axis; ``(time, features)`` for a recurrent layer. It may be left out
        where `inputs` are given.
    schedule : Schedule or str
        The schedule whose steps are counted: by default that of the papers' analysis, and not ``auto`` as where
        schedules are executed, which is the report's baseline.
    structure : {"guaranteed", "observed"}
        ``guaranteed`` omits guaranteed zeros, which are zero on every input. ``observed`` omits all zeros of the
        samples in `inputs`, such as those of ReLU and pooling, and averages the counts, as in Figure 5.5.
    inputs : Tensor, sequence or mapping, optional
        The module's input, ``(batch, *input_shape)``; or all of its positional or keyword arguments, of which tensors
        have samples along their first axis. The observed structure is that of all samples, the guaranteed one that of
        the shapes. Gradients end at floating-point tensors, and at what embeddings make of integers, as of tokens.
    executed : bool, optional
        Whether to also count the FLOP that the scan executes, as `jacsparse.nn.Scan` does. By default, only for the
        guaranteed structure: for the observed structure, this means to plan the guaranteed products as well.
    workers : sequence of int
        For each number of workers, the report names the fastest schedule of ``linear``, ``balanced`` and `schedule`.
    progress : callable, optional
        Called after each product with the numbers of finished and of all products, over all samples.
    accept : callable, optional
        Called before counting starts, with an estimate of what it takes. Where it returns False, products of matrices
        are left out, and the schedule is ``linear``.

    Returns
    -------
    FlopReport
        The counts, which ``print`` shows as tables.

    Raises
    ------
    TypeError
        If `workers` is no sequence of integers, or an input is of a wrong kind, as a packed sequence.
    ValueError
        If the structure is unknown, if it needs inputs that are missing, empty or of another shape, if no embedding
        reads integers, or if a number of workers is less than 1.
    MemoryError
        If the machine has less memory than the indices of the schedule's products, or of observed Jacobians, take.
    UnsupportedOperatorError
        If an operator has no rule, or an output has no entry that is counted.

    Notes
    -----
    Thesis, sections 4.3 and 5.3. The gradient of the network's output is full; the others hold the entries that a
    product reaches.

    A stage that couples samples has no matrix: a vector goes through its operators. One that couples takes an operation
    for each element of the gradients that it reads and writes, a sample's share of them, and gives a full gradient.
    Observed samples are one batch then. What multiplies samples by each other is counted for a batch of three.

    Examples
    --------
    >>> report = count_flop(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,), schedule="linear")
    >>> [(step.kind, step.flop) for step in report.steps], report.input_gradient.flop
    ([('mv', 12.0), ('mv', 6.0)], 24.0)
    >>> [(row.structure, row.activations, row.weights) for row in report.backpropagation]
    [('dense', 18.0, 36.0), ('pruned', 18.0, 36.0)]

    Tokens are integers. The gradient ends at their embedding, which takes no products:

    >>> words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    >>> report = count_flop(words, inputs=torch.zeros(1, 5, dtype=torch.long), schedule="linear")
    >>> report.layers[0]["layer"], report.layers[0]["dense_step"]
    ('1', 360.0)
    >>> report.counted
    'Counted: the output for inputs (5). The gradient ends at the embeddings of inputs.'
    """
    if structure not in ("guaranteed", "observed"):
        raise ValueError(f"structure is {structure!r}; expected 'guaranteed' or 'observed'")
    workers = check_workers(workers, fewest=0)
    if structure == "guaranteed" and inputs is not None and input_shape is not None:
        raise ValueError(
            "inputs are given, but the guaranteed structure does not depend on them; pass structure='observed'"
        )
    if structure == "observed" and inputs is None:
        raise ValueError("structure='observed' needs inputs: a batch to observe")
    subject = _subject(module, input_shape, inputs)
    plan = resolve(schedule, len(subject.factors), subject)
    observed_only = structure == "observed" and not (executed or workers)
    runs = 1 if structure == "guaranteed" else subject.samples + (not observed_only)
    estimate = estimate_count(plan, subject.factors, runs, enough=ENOUGH)
    if accept is not None and not accept(estimate):
        plan = linear(plan.n)
    else:
        check_memory(f"counting the products of {plan.name} takes", estimate.nbytes, "pass schedule='linear'")
    numbers, total = itertools.count(1), runs * len(plan.products)

    def count_product() -> None:
        if progress is not None:
            progress(next(numbers), total)

    guaranteed = None if observed_only else Counts(plan, subject.factors).run(count_product)
    samples = [guaranteed] if guaranteed is not None and structure == "guaranteed" else []
    observed = []
    for factors, operands in () if structure == "guaranteed" else subject.observe():
        samples.append(Counts(plan, factors).run(count_product))
        observed.append(_backpropagated(subject, "observed", factors, operands)[:2])
    if executed is None:
        executed = structure == "guaranteed"
    by_name = not isinstance(schedule, Schedule)
    run_flop = guaranteed.executed(by_name=by_name) if guaranteed is not None and executed else None
    report = _report(plan, subject, samples, run_flop, observed)
    choices = _choices(subject, plan, guaranteed, workers)
    return replace(
        report,
        choices=choices,
        name=type(module).__name__,
        counted=subject.counted,
        nan_weights=nan_weights(module),
    )


def _subject(module: nn.Module, input_shape: Sequence[int] | None, inputs: Any) -> Subject:
    """What is counted of a module: a recurrent layer's steps, or the stages of a chain."""
    observed = inputs is not None
    if observed and input_shape is not None:
        check_input("inputs", inputs, check_shape(input_shape))
    elif input_shape is not None:
        inputs = samples_of(check_module(module), check_shape(input_shape))
    elif not observed:
        raise ValueError("input_shape is missing; give the shape of one sample, or inputs: what the module takes")
    network = Network(module, inputs)
    if not isinstance(module, nn.RNNBase) or network.takes_several:
        return chain_subject(network)
    from .recurrent_subject import is_sequence, sequence_subject

    if not is_sequence(module):
        return chain_subject(network)
    return sequence_subject(module, inputs.shape[1:], inputs if observed else None)


def _choices(
    subject: Subject, plan: Schedule, counts: Counts | None, workers: Sequence[int]
) -> tuple[ScheduleChoice, ...]:
    """The schedule that is done first, for each number of workers."""
    if not workers:
        return ()
    assert counts is not None
    # FLOP of the steps and entries of the matrices, without patterns: those of all schedules could fill the memory.
    costs = {plan.name: (counts.over_full_vectors(), counts.sizes())}

    def choice(number: int) -> ScheduleChoice:
        schedules = {"linear": linear(plan.n), plan.name: plan, f"balanced:{number}": balanced(subject, number)}
        for name, schedule in schedules.items():
            if name not in costs:
                count = Counts(schedule, subject.factors).run()
                costs[name] = count.over_full_vectors(), count.sizes()
        times = {name: schedule.makespan(costs[name][0], number) for name, schedule in schedules.items()}
        work = {name: math.fsum(costs[name][0]) for name in schedules}
        space = {name: schedule.complexity(number, costs[name][1]).space for name, schedule in schedules.items()}
        # The first of several equal ones is linear.
        best = min(times, key=lambda name: (times[name], work[name]))
        return ScheduleChoice(number, best, times, work, space)

    return tuple(map(choice, workers))


def _backpropagated(
    subject: Subject,
    structure: str,
    factors: Sequence[Pattern | Region],
    operands: Sequence[Mapping[int, np.ndarray]] | None = None,
) -> tuple[BackPropagation, list[StepFlop], bool]:
    """Back-propagation over counts, as the ``linear`` schedule goes, and a training step's work of each operator.

    Last, whether the gradient of the input has an entry. Without `operands`, operands are full.
    """
    mask = full_mask(factors)
    weight_pairs, edge_pairs, work = 0, [], list[StepFlop]()
    for number in reversed(range(len(factors))):
        operator, read = subject.operators[number], dict[int, int]()
        pairs, mask = multiply_mask(factors[number], mask, read)
        sums = {edge: int(rows.sum()) for edge, rows in pairs.items()}
        edge_pairs.append(sum(sums.values()))
        trained = dict.fromkeys(operator.entrywise, 0)
        for edge in operator.entrywise:
            if operands is None:
                trained[edge] = sums.get(edge, 0)
            elif edge in pairs:
                trained[edge] = int(pairs[edge][operands[number][edge]].sum())
        weight_pairs += sum(trained.values())
        seen = None if operands is None else operands[number]
        work += [_work(each, factors[number], pairs, sums, read, trained, seen) for each in reversed(operator.work)]
    *between, first = edge_pairs or [0]
    other_weights = subject.weights.get(structure, 0.0)
    weights = None if other_weights is None else other_weights + 2.0 * weight_pairs
    return BackPropagation(structure, 2.0 * sum(between), 2.0 * first, weights), work, bool(mask.any())


def _work(
    work: OperatorWork,
    factor: Pattern | Region,
    pairs: Mapping[int, np.ndarray],
    sums: Mapping[int, int],
    read: Mapping[int, int],
    trained: Mapping[int, int],
    operands: Mapping[int, np.ndarray] | None,
) -> StepFlop:
    """The FLOP of an operator where zeros are left out.

    `pairs` are those of each row of each edge, `sums` their sums, `read` the elements of gradients that edges read,
    `trained` the pairs of the weights' gradients.
    """
    layer = work.layer
    if work.entrywise:
        assert layer is not None
        (edge,) = work.edges
        forward = float(layer.forward_sparse)
        if operands is not None and edge in operands:
            pattern = factor.edges[edge][2] if isinstance(factor, Region) else factor
            forward = 2.0 * int(pattern.structure.row_counts()[operands[edge]].sum())
        return StepFlop(forward, 2.0 * sum(sums.get(n, 0) for n in work.needed), 2.0 * trained.get(edge, 0))
    if layer is not None and layer.forward:
        # Products without an entry for each multiply-add, and recurrent layers.
        weights = layer.weight_gradient_sparse
        return StepFlop(layer.forward_sparse, layer.backward_sparse - weights, weights)
    backward = sum(
        int(np.count_nonzero(pairs[edge])) + min(read.get(edge, 0), most)
        for edge, most in zip(work.needed, work.reads, strict=True)
        if edge in pairs
    )
    return StepFlop(work.dense.forward, backward, 0.0)


def _dense(subject: Subject) -> BackPropagation:
    """Back-propagation as PyTorch executes it."""
    executed = [operator.executed for operator in subject.operators] or [0.0]
    weights = math.fsum(layer.weight_gradient for layer in subject.layers)
    return BackPropagation("dense", math.fsum(executed[1:]), float(executed[0]), weights)


def _mean(samples: Sequence[BackPropagation]) -> BackPropagation:
    weights = [sample.weights for sample in samples if sample.weights is not None]
    return BackPropagation(
        samples[0].structure,
        float(np.mean([sample.activations for sample in samples])),
        float(np.mean([sample.input_gradient for sample in samples])),
        float(np.mean(weights)) if weights else None,
    )


def _report(
    plan: Schedule,
    subject: Subject,
    samples: Sequence[Counts],
    executed: Mapping[int, float] | None,
    observed: Sequence[tuple[BackPropagation, list[StepFlop]]],
) -> FlopReport:
    """The report of the counts of all samples; `executed` has the FLOP of the steps that the scan executes."""
    factors = samples[0].factors

    def flop_step(step: Step, phase: str) -> FlopStep:
        counts = [sample.steps[step.out] for sample in samples]

        def mean(field: str) -> float:
            return float(np.mean([getattr(count, field) for count in counts]))

        # The stages whose matrices the factors begin and end with.
        m, k, n = (plan.n - place for place in (*plan.spans[step.left][::-1], plan.spans[step.right][0]))
        return FlopStep(
            level=step.level,
            phase=phase,
            kind=step.kind,
            left=_name(plan, step.left),
            right=_name(plan, step.right),
            m=factors[m].shape[0],
            k=factors[k].shape[1],
            n=1 if step.kind == "mv" else factors[n].shape[1],
            flop=2.0 * mean("pairs"),
            executed=None if executed is None else executed.get(step.out, 0.0),
            nnz=mean("nnz"),
            live=step.live,
            left_nnz=mean("left_nnz"),
            right_nnz=mean("right_nnz"),
            couples=plan.n - step.left in subject.coupling,
        )

    steps = [flop_step(step, step.phase) for step in plan.products]
    last = flop_step(input_step(plan), "input") if plan.n else None
    pruned, pruned_work, reaches_input = _backpropagated(subject, "pruned", subject.factors)
    backpropagation = [_dense(subject), pruned]
    operators = [each for operator in reversed(subject.operators) for each in reversed(operator.work)]
    work = {"dense": [each.dense for each in operators], "pruned": pruned_work}
    if observed:
        backpropagation.append(_mean([each for each, _ in observed]))
        if backpropagation[-1].weights is not None:
            work["observed"] = [_mean_work(samples) for samples in zip(*(each for _, each in observed), strict=True)]
    return FlopReport(
        plan.name,
        "observed" if observed else "guaranteed",
        len(observed),
        tuple(_critical(steps)),
        last,
        tuple(_baseline(subject, [counts.factors for counts in samples])),
        subject.layers,
        layer_records(operators, work),
        backpropagation=tuple(backpropagation),
        pays_from=_pays_from(plan, [step.flop for step in steps if step.live], backpropagation[-1]),
        constant=not reaches_input and bool(subject.factors) and not subject.recurrent,
    )


def _mean_work(samples: Sequence[StepFlop]) -> StepFlop:
    return StepFlop(*(float(np.mean(figures)) for figures in zip(*samples, strict=True)))


def _pays_from(plan: Schedule, flop: Sequence[float], linear: BackPropagation) -> int | None:
    """The least power of two of workers with which a schedule is done before back-propagation; None for none."""
    if all(step.kind == "mv" for step in plan.steps):
        return None
    most = max(1, len(flop))
    candidates = [2**power for power in range(most.bit_length() + 1)]
    if plan.makespan(flop, candidates[-1]) >= linear.activations:
        return None
    return next(workers for workers in candidates if plan.makespan(flop, workers) < linear.activations)


def _critical(steps: Sequence[FlopStep]) -> Iterable[FlopStep]:
    """The steps, with those of the critical path marked: the largest of those that do not wait for each other."""
    largest = {id(max(group, key=lambda step: step.flop)) for group in by_level(step for step in steps if step.live)}
    return (replace(step, critical=id(step) in largest) for step in steps)


def _name(plan: Schedule, value: int) -> str:
    """The name of a value: for a matrix, the stages that it spans, from 1; for a vector, the gradient of x_i."""
    first, last = plan.spans[value]
    low, high = plan.n + 1 - last, plan.n + 1 - first
    if first == 0:
        return f"∇x{low - 1}"
    return f"J{low}ᵀ" if low == high else f"J{low}-{high}ᵀ"


def _baseline(subject: Subject, observed: Sequence[Sequence[Pattern | Region]]) -> Iterable[BaselineStep]:
    for number in reversed(range(len(subject.operators))):
        operator = subject.operators[number]
        mean = float(np.mean([operator.gradient_flop(factors[number]) for factors in observed]))
        shape = subject.factors[number].shape
        yield BaselineStep(operator.path, operator.name, *shape, mean, number > 0, operator.unpruned)


def nan_weights(module: torch.nn.Module) -> dict[str, int]:
    """How many weights of each module are NaN, by the module's path, without those that a pruning mask leaves out."""
    counts, seen = dict[str, int](), set[int]()
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.is_floating_point() or parameter.is_meta:
                continue
            seen.add(id(parameter))
            if not parameter.detach().sum().isnan():
                # A sum is NaN where a summand is, and also of infinities of both signs.
                continue
            missing = parameter.detach().isnan()
            mask = getattr(part, f"{name.removesuffix('_orig')}_mask", None)
            if name.endswith("_orig") and isinstance(mask, torch.Tensor) and bool(missing.any()):
                missing &= mask != 0
            count = int(missing.count_nonzero())
            if count:
                counts[path] = counts.get(path, 0) + count
    return counts
