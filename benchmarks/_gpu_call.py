"""What ten minutes of a GPU can tell, in one command: phases in processes of their own, each with a time limit.

There are three such calls: whether the kernels are right, recurrent layers, and products with what is made of them.

A phase that fails, hangs or loses the device takes no other with it, and what it measured before is written.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from ._calls import MODES
from ._gpu_phases import Compiling, Ending, KernelTests, Measuring, Notebook, Phase, Running, Versions
from ._rows import reason
from .chunk_sweep import ChunkSweep
from .discretised_equations import DiscretisedEquations
from .gru_breakdown import GruBreakdown
from .jacobian_generation import JacobianGeneration
from .layer_calls import LayerCalls
from .rnn_sensitivity import RnnSensitivity
from .spgemm import Spgemm
from .whole_jacobian import WholeJacobian

#: Seconds of the whole call; of a phase's process beyond the phase's time; and the fewest for which a phase begins.
TOTAL, _GRACE, _LEAST = 530.0, 10.0, 5.0
#: The tests of what is launched, in layers alone and all of them, and those under Compute Sanitizer.
_LAYERS = ("small_layer", "recurrent", "linear_recurrence", "levels", "own_cells")
_ALL = (*_LAYERS, "products", "values", "compiled_jacobians", "scans", "device")
_SANITIZED = ("compute_sanitizer",)


class CallName(StrEnum):
    """What ten minutes of a GPU are asked."""

    tests = "tests"
    layers = "layers"
    jacobians = "jacobians"


def _tests(name: str, seconds: float, tests: Sequence[str]) -> Phase:
    files = [f"tests/cuda/test_{test}.py" for test in tests]
    return KernelTests(name=name, seconds=seconds, files=files)


def _layers() -> list[Phase]:
    breakdown, eager = GruBreakdown(), (MODES["cuda"][0],)
    exact = replace(breakdown, sets=breakdown.sets[-1:], batches=(64,), schedules=("chunked",))
    return [
        Versions(name="versions", seconds=40),
        Compiling(name="compiling", seconds=60),
        _tests("tests", 60, _LAYERS),
        Measuring(name="layers", seconds=160, experiment=LayerCalls()),
        Measuring(name="exact scan", seconds=40, experiment=exact),
        Measuring(name="chunks", seconds=90, experiment=ChunkSweep(), function=0.1),
        Measuring(name="Figure 5.2, eager", seconds=120, experiment=RnnSensitivity(), function=0.15, modes=eager),
        Measuring(name="Figure 5.4, eager", seconds=120, experiment=breakdown, function=0.15, modes=eager),
    ]  # fmt: skip


def _jacobians() -> list[Phase]:
    return [
        Versions(name="versions", seconds=40),
        Measuring(name="products", seconds=90, experiment=Spgemm()),
        Measuring(name="networks", seconds=160, experiment=WholeJacobian(), function=0.2),
        Measuring(name="equations", seconds=160, experiment=DiscretisedEquations(), function=0.1),
        Measuring(name="operators", seconds=60, experiment=JacobianGeneration(), function=0.2),
    ]


def phases(call: CallName) -> list[Phase]:
    """The phases of a call, the most telling first."""
    if call is CallName.layers:
        return _layers()
    if call is CallName.jacobians:
        return _jacobians()
    return [
        Versions(name="versions", seconds=40),
        _tests("tests", 200, _ALL),
        _tests("sanitizer", 280, _SANITIZED),
    ]


#: Runs a phase, given what it needs.
Start: TypeAlias = "Callable[[Phase, Running], Ending]"


def here(phase: Phase, running: Running) -> Ending:
    """Run a phase in this process."""
    try:
        return phase.run(running)
    except Exception as error:
        running.say(f"{phase.name} failed: {reason(error)}", *traceback.format_exc().splitlines())
        return Ending(failed=True)


def in_a_process(phase: Phase, running: Running) -> Ending:
    """Run a phase in a process of its own, which is ended where it takes too long."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(phase, running, sender), name=phase.name)
    process.start()
    sender.close()
    try:
        # It may end without a word.
        if receiver.poll(max(0.0, running.end - time.monotonic())):
            outcome: Ending = receiver.recv()
            process.join(_GRACE)
            return outcome
        running.say(f"{phase.name}: it did not end in time, and was ended")
    except EOFError:
        process.join(_GRACE)
        running.say(f"{phase.name}: its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return Ending(failed=True)


def _run(phase: Phase, running: Running, sender: Any) -> None:
    sender.send(here(phase, running))


def gpu_call(folder: Path, planned: Sequence[Phase], *, total: float = TOTAL, start: Start = in_a_process) -> bool:
    """Run phases one after another, until their time is over; whether all of them went well.

    Parameters
    ----------
    folder : Path
        Where results and the log are written.
    planned : sequence of Phase
        The phases.
    total : float
        The most seconds that they may take together.
    start : callable
        Runs a phase.
    """
    begin, well, suspects = time.monotonic(), True, list[str]()
    notebook, waiting = Notebook(folder, begin), list(planned)
    while waiting:
        phase = waiting.pop(0)
        now = time.monotonic()
        until = min(now + phase.seconds, begin + total - _GRACE / 2)
        end = min(until + _GRACE, begin + total)
        if until - now < _LEAST and until < now + phase.seconds:
            notebook.say(f"{phase.name}: left out, the time is over")
            continue
        notebook.say(f"{phase.name}: at most {until - now:.0f} s")
        outcome = start(phase, Running(notebook, until, end, waiting, suspects))
        well, suspects = well and not outcome.failed, [*suspects, *outcome.suspects]
        if outcome.rest is not None:
            left = phase.seconds - (time.monotonic() - now)
            waiting.insert(0, replace(outcome.rest, seconds=left))
    notebook.say(f"all is in {folder}")
    return well
