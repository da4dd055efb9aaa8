"""Registers, spills and shared memory of the CUDA kernels, as the compiler reports them without a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jacsparse import patterns, recurrence, spgemm  # noqa: F401  (importing them lists their kernels)
from jacsparse.runtime import KERNEL_FILES

from ._context import Context
from ._experiment import Grid
from ._figures import Bars, Panel, Picture
from ._nvrtc import compile_file
from ._rows import Group, Row, values_of, where


@dataclass(frozen=True)
class KernelResources(Grid):
    """The instance of each kernel that takes the most registers."""

    #: The architectures to compile for.
    architectures: tuple[str, ...] = ("sm_75", "sm_80", "sm_90")
    #: The files of kernels; all if empty.
    files: tuple[str, ...] = ()

    name = "kernel_resources"
    title = "Registers of the CUDA kernels"
    source = "no paper: what NVRTC reports"

    def cases(self, context: Context) -> Iterable[tuple[str, str]]:
        return itertools.product(self.architectures, self.files or sorted(KERNEL_FILES))

    def measure(self, case: tuple[str, str], context: Context) -> list[Row]:
        architecture, name = case
        context.say(f"{name} for {architecture}")
        rows = Group(f"{name}, {architecture}", data={"architecture": architecture})
        try:
            resources = compile_file(KERNEL_FILES[name], architecture)
        except ImportError as error:
            return [rows.missing(name, str(error), data={})]
        for kernel in dict.fromkeys(instance.partition("<")[0] for instance in resources):
            needs = {instance: each for instance, each in resources.items() if instance.partition("<")[0] == kernel}
            instance, most = max(needs.items(), key=lambda item: item[1].registers)
            spilled, shared = sum(each.spilled for each in needs.values()), max(each.shared for each in needs.values())
            note = f"{instance}, {len(needs)} instances; static shared memory at most {shared:,} bytes"
            rows.value(kernel, most.registers, "registers", note=note)
            rows.beside(kernel, "bytes spilled by all instances", spilled, at_most=0)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn = [row for row in rows if row.median is not None]
        names = list(dict.fromkeys(row.label for row in drawn))
        heights: dict[str, list[float | None]] = {}
        for architecture in values_of(drawn, "architecture"):
            registers = {row.label: row.median for row in where(drawn, architecture=architecture)}
            heights[architecture] = [registers.get(name) for name in names]
        panel = Panel([Bars(names, heights, lying=True)], x="registers of a thread, of 255", grid="x")
        return Picture(self.title, [panel], (8.0, 1.2 + 0.3 * max(4, len(names))))
