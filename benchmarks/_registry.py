"""The experiments by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from ._experiment import Experiment

#: The files of experiments, in the order of the report.
_FILES = (
    *("jacobian_generation", "spgemm", "flop_analysis", "whole_jacobian", "sparse_jacobian", "sparse_networks"),
    *("dense_rivals", "sparse_kernels", "discretised_equations", "stiff_equations", "solving"),
    *("whole_programs", "triangular_solvers", "triangular_costs", "leapfrog", "ddg_convergence", "ddg_scaling"),
    *("ddg_theory", "simulation", "rank_scan"),
    *("lenet_convergence", "rnn_sensitivity", "recurrent_shapes", "gru_breakdown"),
    *("parallel_forward", "layer_calls", "chunk_sweep", "recurrent_convergence", "written_loops", "host_path"),
)


def _experiments() -> Iterator[Experiment]:
    """The experiments of each file, in the order in which they are defined."""
    for file in _FILES:
        module = importlib.import_module(f".{file}", __package__)
        for kind in vars(module).values():
            is_here = isinstance(kind, type) and issubclass(kind, Experiment) and kind.__module__ == module.__name__
            if is_here and not inspect.isabstract(kind):
                yield kind()


EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _experiments()}
