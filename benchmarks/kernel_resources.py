"""Registers, spills and shared memory of the CUDA kernels, as the compiler reports them without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jacsparse import patterns, recurrence, spgemm  # noqa: F401  (importing them lists their kernels)
from jacsparse.runtime import KERNEL_FILES

from ._context import Context
from ._experiment import Comparison, Experiment, Row
from ._nvrtc import Resources, compile_file

__all__ = ["KernelResources"]


@dataclass(frozen=True)
class KernelResources(Experiment):
    """The instance of each kernel that takes the most registers."""

    #: The architectures to compile for.
    architectures: tuple[str, ...] = ("sm_75", "sm_80", "sm_90")
    #: The files of kernels; all if empty.
    files: tuple[str, ...] = ()

    name = "kernel_resources"
    title = "Registers of the CUDA kernels"
    source = "no paper: what NVRTC reports"

    def run(self, context: Context) -> list[Row]:
        rows: list[Row] = []
        for architecture in self.architectures:
            for name in self.files or sorted(KERNEL_FILES):
                context.say(f"{name} for {architecture}")
                group = f"{name}, {architecture}"
                try:
                    resources = compile_file(KERNEL_FILES[name], architecture)
                except ImportError as error:
                    rows.append(Row.missing(name, str(error), group=group))
                    continue
                rows += _rows(resources, group)
        return rows

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse.figures import BLUE, GREEN, ORANGE, new_figure, save_figure

        drawn = [row for row in rows if row.median is not None]
        names = list(dict.fromkeys(row.label for row in drawn))
        groups = list(dict.fromkeys(row.data["architecture"] for row in drawn))
        figure, axes = new_figure(8.0, 1.2 + 0.3 * max(4, len(names)))
        for number, (group, colour) in enumerate(zip(groups, (BLUE, ORANGE, GREEN), strict=False)):
            registers = {row.label: row.median or 0.0 for row in drawn if row.data["architecture"] == group}
            places = [place + 0.27 * (number - (len(groups) - 1) / 2) for place in range(len(names))]
            axes.barh(places, [registers.get(name, 0.0) for name in names], 0.25, color=colour, label=group)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set(xlabel="registers of a thread, of 255", xlim=(0, 255))
        axes.set_title(self.title, fontsize=10)
        axes.grid(axis="x", alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
        save_figure(figure, path)


def _rows(resources: dict[str, Resources], group: str) -> list[Row]:
    rows = []
    for kernel in dict.fromkeys(instance.partition("<")[0] for instance in resources):
        instances = {instance: needs for instance, needs in resources.items() if instance.partition("<")[0] == kernel}
        instance, most = max(instances.items(), key=lambda item: item[1].registers)
        spilled = sum(needs.spilled for needs in instances.values())
        rows.append(
            Row.of_value(
                kernel,
                most.registers,
                "registers",
                group=group,
                note=f"{instance}, {len(instances)} instances; static shared memory at most "
                f"{max(needs.shared for needs in instances.values()):,} bytes",
                comparisons=(Comparison("bytes spilled by all instances", spilled, at_most=0),),
                data={"architecture": group.rpartition(", ")[2]},
            )
        )
    return rows
