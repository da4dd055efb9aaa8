"""Registers, spills and shared memory of the CUDA kernels, as the compiler reports them without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jacsparse import patterns, recurrence, spgemm  # noqa: F401  (importing them lists their kernels)
from jacsparse.runtime import KERNEL_FILES

from ._context import Context
from ._experiment import Comparison, Experiment, Group, Row
from ._figures import Bars, Panel, Picture
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

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn = [row for row in rows if row.median is not None]
        names = list(dict.fromkeys(row.label for row in drawn))
        heights: dict[str, list[float | None]] = {}
        for architecture in dict.fromkeys(row.data["architecture"] for row in drawn):
            registers = {row.label: row.median for row in drawn if row.data["architecture"] == architecture}
            heights[architecture] = [registers.get(name) for name in names]
        panel = Panel([Bars(names, heights, lying=True)], x="registers of a thread, of 255", grid="x")
        return Picture(self.title, [panel], (8.0, 1.2 + 0.3 * max(4, len(names))))


def _rows(resources: dict[str, Resources], group: str) -> list[Row]:
    rows = Group(group, data={"architecture": group.rpartition(", ")[2]})
    for kernel in dict.fromkeys(instance.partition("<")[0] for instance in resources):
        instances = {instance: needs for instance, needs in resources.items() if instance.partition("<")[0] == kernel}
        instance, most = max(instances.items(), key=lambda item: item[1].registers)
        spilled, shared = sum(needs.spilled for needs in instances.values()), max(n.shared for n in instances.values())
        note = f"{instance}, {len(instances)} instances; static shared memory at most {shared:,} bytes"
        compared = (Comparison("bytes spilled by all instances", spilled, at_most=0),)
        rows.value(kernel, most.registers, "registers", note=note, comparisons=compared)
    return rows.rows()
