"""The time to count the FLOP of pruned VGG-11, step by step, and the thesis' Figure 5.5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

import jacsparse
from jacsparse import FlopReport

from ._context import Context
from ._experiment import Experiment
from ._rows import Comparison, Group, Row
from ._workloads import Trained, retrained_vgg11

#: The entries of a report that its picture shows; stored reports may lack others.
_DRAWN = ("schedule", "structure", "samples", "steps", "input_gradient", "baseline")


@dataclass(frozen=True)
class FlopAnalysis(Experiment):
    """A network that was pruned and retrained, ``blelloch:2``; each run makes chain, patterns and counts anew."""

    #: Makes the network; its argument shows lines about the progress.
    build: Callable[[Callable[[str], None]], Trained] = retrained_vgg11

    name = "flop_analysis"
    title = "Static FLOP analysis of pruned VGG-11"
    source = "thesis, Figure 5.5, on scikit-learn's digits, or with --data on CIFAR-10"

    def on(self, data: str) -> FlopAnalysis:
        return replace(self, build=partial(retrained_vgg11, data_name=data))

    def run(self, context: Context) -> list[Row]:
        module, inputs, accuracy = self.build(context.say)
        shape = inputs.shape[1:]

        def observed(samples: int = 1) -> FlopReport:
            return jacsparse.count_flop(module, shape, structure="observed", inputs=inputs[:samples])

        def guaranteed() -> FlopReport:
            return jacsparse.count_flop(module, shape, executed=False)

        counted = observed(len(inputs))
        timings = context.times({"observed": observed, "guaranteed": guaranteed}, seconds=3 * context.seconds)
        rows, note = Group(""), "kernels compiled; chain, patterns and counts made anew"
        ours, other = (f"analysis, {structure} structure" for structure in timings)
        rows.timed(ours, timings["observed"], note=note, data=counted.to_dict())
        rows.timed(other, timings["guaranteed"], note=note)
        rows.compare("observed / guaranteed", ours, other, at=ours, at_most=1)
        rows.missing("the authors' own analysis", "no package of it; 6.6 s when run once on two cores", role="peer")
        network = Group("The network")
        for phase, share in accuracy.items():
            network.value(f"test samples right, {phase}", share, "accuracy")
        return [*rows.rows(), *(_total(report) for report in (counted, guaranteed())), *network.rows()]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        content = {name: rows[0].data[name] for name in _DRAWN}
        msgspec.convert(content, FlopReport).plot(path)


def _total(report: FlopReport) -> Row:
    baselines = ", ".join(f"{each.structure} {each.activations:,.0f}" for each in report.backpropagation)
    note = f"critical path {report.critical_path:,.0f}; back-propagation {baselines}"
    live = sum(step.live for step in report.steps)
    label = f"{report.schedule}, {report.structure} structure, {live} live steps"
    path = report.critical_path
    ratios = tuple(
        Comparison(f"critical path / {each.structure} back-propagation", path / each.activations)
        for each in report.backpropagation
        if each.activations
    )
    return Row.of_value(label, report.total, "flop", group="What was counted", note=note, comparisons=ratios)
