"""Comparisons of solvers: the figures, the paper's estimates beside them, and how they are shown."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jacsparse.models import prune_weights
from torch import nn

from jacsparse import solvers
from jacsparse.flop import Effort
from jacsparse.solvers import SOLVERS, BlockBidiagonal, Jacobi, Richardson, compare
from jacsparse.solvers import comparison as comparison_module


def network(layers: int, units: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(units, units), nn.Tanh())]).double()


def compared(layers: int = 16, units: int = 8, samples: int = 4, **options: object) -> solvers.SolverComparison:
    x = torch.randn(samples, units, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return compare(network(layers, units), x, **{"seconds": 0.0, "workers": (1, 16), **options})  # type: ignore[arg-type]


def test_figures() -> None:
    comparison = compared()
    rows = {row.method: row for row in comparison.rows}
    assert list(rows) == [name for name in SOLVERS if name != "richardson"]
    assert rows["substitution"].steps == 16 and rows["cyclic_reduction"].steps == 5
    assert rows["hybrid"].seconds is None and "no groups" in rows["hybrid"].remark
    assert rows["jacobi"].iterations is not None and rows["jacobi"].iterations <= 16
    for row in comparison.rows:
        if row.solved:
            assert row.multiply_adds_until_done is not None
            assert row.multiply_adds_until_done[1] == row.multiply_adds >= row.multiply_adds_until_done[16]
    assert (
        "samples r = 4 >= the widest layer's units n = 8, or l / log2 l = 4.0 >= n for l = 16 layers: they would not"
        in comparison.criterion
    )


def test_the_conclusion_names_the_solver_with_the_fewest_multiply_adds() -> None:
    comparison = compared(workers=tuple(2**power for power in range(21)))
    best = [
        min((row.multiply_adds_until_done[p], row.label) for row in comparison.rows if row.multiply_adds_until_done)[0]
        for p in comparison.workers
    ]
    until_done = {row.label: row.multiply_adds_until_done for row in comparison.rows}
    places = [*comparison.fewest, (2**21, "")]
    for (begin, label), (end, _) in itertools.pairwise(places):
        for p, fewest in zip(comparison.workers, best, strict=True):
            if begin <= p < end:
                assert until_done[label][p] == fewest
    assert "Fewest multiply-adds until done: substitution, which is back-propagation, from " in comparison.conclusion
    alone = compared(methods=["substitution"])
    assert alone.conclusion == (
        "There is nothing to compare with: the one method is substitution, which is back-propagation."
    )
    both = compared(methods=["substitution", "bicgstab"])
    assert both.conclusion.endswith("back-propagation, for any number of workers up to 1,048,576.")
    assert comparison.conclusion.endswith(", if workers share each result's elements and messages take no time.")
    assert alone.conclusion in str(alone).replace("\n", " ")


def test_one_layer_has_no_logarithm() -> None:
    comparison = compare(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(2, 3), seconds=0.0)
    assert comparison.layers == 1 and comparison.criterion.startswith("With one layer") and "log" not in str(comparison)


@pytest.mark.parametrize(("fraction", "samples"), [(0.0, 1), (0.9, 1), (0.9, 3)])
def test_memory_of_a_solution_is_estimated(fraction: float, samples: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(60, 60), nn.Tanh())])
    if fraction:
        prune_weights(module, fraction)
    told: dict[str, Effort] = {}
    arguments: dict[str, Any] = {"methods": ["scan"], "seconds": 0.0}

    def accept(name: str, estimate: Effort) -> bool:
        told[type(estimate).__name__] = estimate
        return True

    (row,) = compare(module, torch.randn(samples, 60), accept=accept, **arguments).rows
    assert row.seconds is not None and [*told] == ["CountEstimate", "SolutionEstimate"]
    estimate = told["SolutionEstimate"]
    assert 0 < estimate.seconds < 1 and not estimate.is_long
    # Values as float32, and at most two bytes for each pair that is planned.
    assert row.entries and row.multiply_adds
    assert 0 <= estimate.nbytes - 4 * row.entries <= 2 * row.multiply_adds / samples
    assert (estimate.nbytes > 4 * row.entries) == bool(fraction)


def test_recurrent_networks_and_methods_by_name() -> None:
    rnn, x = nn.RNN(2, 3, 2), torch.randn(9, 2, 2)
    recurrent = compare(rnn, x, workers=(1,), seconds=0.0)
    assert {row.method for row in recurrent.rows if row.solved} == set(SOLVERS) - {"scan", "richardson"}
    rows = compare(rnn, x, methods=["jacobi", Richardson(omega=0.9, limit=200)], seconds=0.0).rows
    assert [row.label for row in rows] == ["jacobi", "richardson limit=200 omega=0.9"]
    for arguments, message in (
        ({"workers": (0,)}, r"workers is \(0,\)"),
        ({"methods": "jacobi"}, "methods is 'jacobi'; expected a sequence"),
        ({"methods": []}, r"methods is \[\]; expected a sequence"),
        ({"methods": ["gauss"]}, "method is 'gauss'; expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(rnn, x, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has shape \(9, 2, 5\); expected three axes, the last of 2 features"):
        compare(rnn, torch.randn(9, 2, 5))
    with pytest.raises(ValueError, match=r"0: an input of shape \(5,\) does not fit Linear"):
        compare(network(2, 4).float(), torch.randn(3, 5))


def test_an_iteration_of_bicgstab_is_two_steps() -> None:
    jacobi, bicgstab = compared(methods=["jacobi", "bicgstab"]).rows
    # A sweep finds that nothing changes, and another one is the first residual.
    assert jacobi.steps == (jacobi.iterations or 0) + 1
    assert bicgstab.steps == (bicgstab.iterations or 0) * 2 + 2


def test_what_does_not_settle_has_no_times(tmp_path: Path) -> None:
    comparison = compared(methods=[Jacobi(limit=3)])
    (row,) = comparison.rows
    assert row.seconds is None and not row.solved and row.remark == "did not settle in 3 iterations"
    assert "Iterative" not in comparison.criterion and all(each.equation < 46 for each in comparison.estimates)
    with pytest.raises(ValueError, match="no solver solved the system \\(jacobi limit=3: did not settle"):
        comparison.plot(tmp_path / "empty.png")
    assert not list(tmp_path.iterdir())


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_module, "MOST", 10_000)
    substitution, scan, jacobi = compared(methods=["substitution", "scan", Jacobi(limit=3)]).rows
    assert substitution.seconds is not None and scan.seconds is None and scan.solved
    assert scan.remark.startswith("not timed") and jacobi.remark.startswith("did not settle")


def test_an_infinite_solution_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    system = BlockBidiagonal([torch.full((1, 1), 1e30)] * 2, [torch.ones(1, 1)] * 3)
    monkeypatch.setattr(comparison_module, "stretches_of", lambda *_: ([system], []))
    (row,) = compare(network(1, 1).float(), torch.ones(1, 1), methods=["substitution"], seconds=0.0).rows
    assert row.seconds is None and not row.solved and row.remark == "its solution is not finite"


def test_buffers_and_random_numbers_are_left_alone() -> None:
    normalised = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
    before = {name: tensor.clone() for name, tensor in normalised.state_dict().items()}
    compare(normalised, torch.randn(3, 5), seconds=0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in normalised.state_dict().items())
    dropping = nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 2))
    state = torch.get_rng_state()
    compare(dropping, torch.ones(3, 5), methods=["substitution"], seconds=0.0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("l", "n", "r"), [(3, 4, 1), (5, 7, 3), (15, 6, 1), (15, 6, 4), (8, 5, 2)])
def test_estimates_of_the_paper(l: int, n: int, r: int) -> None:  # noqa: E741
    every = compared(l, n, r, methods=["jacobi", "bicgstab"])
    iterations = {row.method: row.iterations or 0 for row in every.rows}
    rows = {(each.equation, each.method): each for each in every.estimates}
    excess = {key: each.counted - each.paper for key, each in rows.items()}
    assert excess[42, "substitution"] == 0
    # Of the first guess; and BiCGStab's iterations do not scale the last block row, whose product is zero.
    assert excess[46, "jacobi"] == l * n * r and excess[47, "jacobi"] == pytest.approx(n * r)
    assert excess[46, "bicgstab"] == l * n * r - 2 * iterations["bicgstab"] * n * r
    assert ((43, "cyclic_reduction depth=1") in rows) == (l % 2 == 1)
    if l % 2:
        # The products of weights count for each sample; scaled blocks, and right-hand sides of each, come to them.
        products = (r - 1) * (l - 1) * n**3
        assert excess[43, "cyclic_reduction depth=1"] == products + (2 * l - 1) * n**2 * r - (l - 1) * n**2 + n * r
    strides = [2**level for level in range(math.ceil(math.log2(l + 1)))]
    products = r * n**3 * sum(max(0, l + 1 - 2 * stride) for stride in strides) / l
    others = r * sum(2 * (l + 1 - stride) * n**2 + (l + 1) * n for stride in strides) / l + r * n
    assert products <= rows[45, "cyclic_reduction"].counted <= products + others


def test_estimates_are_for_equally_wide_dense_layers() -> None:
    uneven = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    assert compare(uneven, torch.randn(2, 3), methods=["jacobi"], seconds=0.0).estimates == ()
    assert compare(nn.RNN(3, 3), torch.randn(4, 2, 3), methods=["jacobi"], seconds=0.0).estimates == ()


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = str(compared(workers=tuple(2**power for power in range(0, 21, 2))))
    assert "…" not in printed and max(map(len, printed.splitlines())) <= columns
    for word in ("cyclic_reduction", "1,048,576 workers", "equation", "are not seconds", "their steps (η)"):
        assert word in " ".join(printed.split())


def test_what_is_written(tmp_path: Path) -> None:
    comparison = replace(compared(methods=["substitution"]), settings={"seed": 7})
    comparison.save_json(tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert (figures["name"], figures["dtype"], figures["device"]) == ("Sequential", "float64", "cpu")
    assert (figures["input_shape"], figures["samples"], figures["workers"]) == ([4, 8], 4, [1, 16])
    assert figures["versions"]["torch"] == torch.__version__ and figures["threads"] == torch.get_num_threads()
    assert figures["settings"] == {"seed": 7} and {each["equation"] for each in figures["estimates"]} == {42, 45}
    assert "not seconds" in figures["words"]["work"]
    comparison.plot(tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert repr(comparison) == "<SolverComparison of Sequential: substitution>"


def test_stretches_between_stages_that_couple_samples_are_solved_in_turn() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()
    comparison = compare(net, torch.randn(5, 4, dtype=torch.float64), seconds=0.0)
    rows = {row.method: row for row in comparison.rows}
    assert comparison.layers == 4
    # Two stretches of two layers, and the normalisation between them, which takes an element in and one out.
    assert rows["substitution"].steps == 2 + 1 + 2
    assert rows["cyclic_reduction"].steps == 2 + 1 + 2
    products = 5 * (4 * 6 + 6 * 6 + 6 * 6 + 6 * 3)
    scaling = 5 * 2 * 6
    assert rows["substitution"].multiply_adds == products + scaling + 5 * 6
    assert [row.method for row in comparison.rows if not row.solved] == ["hybrid"]
    with pytest.raises(ValueError, match="has no stage with a matrix"):
        compare(nn.Sequential(nn.BatchNorm1d(4)), torch.randn(5, 4))
