"""Loops of fused operations as CUDA kernels, one for each level of dependence."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..runtime import THREADS, KernelFile, blocks, c_type, index_dtype, row_starts
from .loops import OUT, FusedLoop, Place
from .operand import is_number
from .printer import Printer, constant

#: The memory of where points are, of all loops; and that of a number which is set where a result is not finite.
TABLES, INFINITE = "tables", "infinite"

#: The name of a variable, and its dtype; or a number, and None.
_Value = tuple[Any, torch.dtype | None]


class DeviceCode:
    """CUDA kernels of loops without tiles.

    A call takes a table of tensors: `memories` in their order, then a number that is set where a result is not finite.

    Parameters
    ----------
    loops : sequence of FusedLoop
        The loops.
    dtype : dtype
        Of the results.
    count : int
        More than any place in a memory.
    device : torch.device
        Where the kernels run.
    """

    def __init__(self, loops: Sequence[FusedLoop], dtype: torch.dtype, count: int, device: torch.device) -> None:
        self._dtype = dtype
        self.memories: list[Any] = [TABLES]
        self._tables, self._size = list[np.ndarray](), 0
        levels: dict[int, list[FusedLoop]] = defaultdict(list)
        for loop in loops:
            levels[loop.level].append(loop)
        kernels = [self._kernel(number, levels[level]) for number, level in enumerate(sorted(levels))]
        index = index_dtype(max(count, self._size) + THREADS, 0, 0)
        #: The tables of places, which are a memory too.
        self.runs = {TABLES: np.concatenate([*self._tables, np.zeros(1, np.int64)]).astype(index)}
        types = f"{c_type(dtype)}, {c_type(torch.from_numpy(self.runs[TABLES]).dtype)}"
        instances = tuple(f"level_{number}<{types}>" for number in range(len(kernels)))
        file = _file("".join(text for text, *_ in kernels), instances)
        places = [*self.memories, INFINITE]
        self._launches = [
            (file.record(instance, (grid,), (THREADS,), device=device), itemgetter(*map(places.index, memories)))
            for instance, (_, grid, memories) in zip(file.instances, kernels, strict=True)
        ]

    def run(self, table: Any) -> None:
        """Launch the kernels with a table of tensors."""
        for launch, arguments in self._launches:
            launch(*arguments(table))

    def _kernel(self, number: int, loops: Sequence[FusedLoop]) -> tuple[str, int, list[Any]]:
        """The kernel of a level, its number of blocks, and the memories that are its arguments."""
        places = [each for loop in loops for each in loop.expressions if isinstance(each, Place)]
        stores = [place for loop in loops for _, place in loop.stores]
        kinds = {place.memory: f"const {self._in_memory(place.dtype)}* __restrict__" for place in places}
        kinds |= {place.memory: f"{self._in_memory(place.dtype)}*" for place in stores}
        self.memories += [each for each in kinds if each not in self.memories]
        names = {memory: f"m{self.memories.index(memory)}" for memory in kinds}
        parameters = ["const Index* __restrict__ tables", *(f"{kind} {names[each]}" for each, kind in kinds.items())]
        lines, grid = list[str](), 0
        for loop in loops:
            first, grid = grid, grid + blocks(loop.points)
            lines += [
                f"  {'else ' * bool(first)}if (blockIdx.x < {grid}) {{",
                f"    const Index point = Index(blockIdx.x - {first}) * {THREADS} + threadIdx.x;",
                f"    if (point < {loop.points}) {{",
                *(f"      {line}" for line in self._point(loop, names)),
                "    }",
                "  }",
            ]
        text = _KERNEL.format(
            number=number, threads=THREADS, parameters=", ".join([*parameters, "int* infinite"]), lines="\n".join(lines)
        )
        return text, grid, [TABLES, *kinds, INFINITE]

    def _point(self, loop: FusedLoop, names: dict[Any, str]) -> list[str]:
        """The statements that compute a point of a loop."""
        lines, values = self._places(loop), list[_Value]()
        for each in loop.expressions:
            if not isinstance(each, (Place, tuple)):
                values.append((each, None))
                continue
            dtype = each.dtype if isinstance(each, Place) else each[0].dtype
            text = _at(each, names) if isinstance(each, Place) else self._computed(each, values)
            lines.append(f"const {self._type(dtype)} v{len(values)} = {text};")
            values.append((f"v{len(values)}", dtype))
        for number, place in loop.stores:
            value = self._converted(values[number], place.dtype)
            is_known = is_number(value)
            lines.append(f"{_at(place, names)} = {constant(value, self._type(place.dtype)) if is_known else value};")
            if place.memory == OUT and not is_known:
                lines.append(f"finite = finite && isfinite({value});")
        return lines

    def _places(self, loop: FusedLoop) -> list[str]:
        """The statements that find a point's places, one of each sequence."""
        first, count, starts = self._size, loop.runs.shape[1], loop.runs[1:]
        if loop.strides is not None and count == 1:
            pairs = enumerate(zip(starts[:, 0].tolist(), loop.strides, strict=True))
            return [f"const Index p{n} = {start} + {stride} * point;" for n, (start, stride) in pairs]
        lines, run, steps = list[str](), "point", [""] * len(starts)
        if loop.strides is not None:
            starts = np.concatenate([row_starts(loop.runs[0], np.int64)[None, :-1], starts])
            lines.append(f"const Index run = run_of(tables + {first}, Index({count}), point);")
            lines.append(f"const Index step = point - tables[{first} + run];")
            run, steps, first = "run", [f" + {stride} * step" for stride in loop.strides], first + count
        self._tables.append(starts.reshape(-1))
        self._size += starts.size
        return [
            *lines,
            *(f"const Index p{n} = tables[{first + n * count} + {run}]{step};" for n, step in enumerate(steps)),
        ]

    def _computed(self, expression: Any, values: Sequence[_Value]) -> str:
        """What an operation computes of the values of other expressions."""
        operation, operands = expression
        reads = zip(operands, operation.reads, strict=True)
        printer = Printer(self._type(operation.computed_in))
        return printer.expression(operation, [self._converted(values[number], dtype) for number, dtype in reads])

    def _converted(self, known: _Value, to: torch.dtype) -> Any:
        """A value in another dtype; a number as it is."""
        value, dtype = known
        if dtype is None:
            return bool(value) if to == torch.bool else value
        if dtype == to:
            return value
        return f"({value} != 0)" if to == torch.bool else f"{self._type(to)}({value})"

    def _type(self, dtype: torch.dtype) -> str:
        """The type of a variable."""
        if dtype == torch.bool:
            return "bool"
        return "T" if dtype == self._dtype else c_type(dtype)

    def _in_memory(self, dtype: torch.dtype) -> str:
        return c_type(torch.uint8) if dtype == torch.bool else self._type(dtype)


def _at(place: Place, names: dict[Any, str]) -> str:
    return f"{names[place.memory]}[p{place.sequence}{place.distance:+}]"


@functools.lru_cache(maxsize=64)
def _file(source: str, instances: tuple[str, ...]) -> KernelFile:
    """The kernels of a text: equal ones are compiled once."""
    return KernelFile(Path(__file__).parent / "loops.cu", instances, "", {"levels.cuh": lambda: source})


_KERNEL = """\
template <typename T, typename Index>
__global__ void __launch_bounds__({threads}, 1) level_{number}({parameters}) {{
  bool finite = true;
{lines}
  if (!finite) atomicExch(infinite, 1);
}}
"""
