"""Comparisons of solvers: the figures, the paper's estimates beside them, and how they are shown."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jacsparse.models import prune_weights
from torch import nn

from jacsparse import UnsupportedOperatorError, solvers
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
        if row.multiply_adds_until_done is not None:
            assert row.multiply_adds_until_done[1] == row.multiply_adds >= row.multiply_adds_until_done[16]


def test_the_conclusion_names_the_solver_with_the_fewest_multiply_adds() -> None:
    comparison = compared(workers=tuple(2**power for power in range(21)))
    best = [
        min((row.multiply_adds_until_done[p], row.method) for row in comparison.rows if row.multiply_adds_until_done)[0]
        for p in comparison.workers
    ]
    until_done = {row.method: row.multiply_adds_until_done for row in comparison.rows}
    places = [*comparison.fewest, (2**21, "")]
    for (begin, label), (end, _) in itertools.pairwise(places):
        for p, fewest in zip(comparison.workers, best, strict=True):
            if begin <= p < end:
                assert until_done[label][p] == fewest
    start = "Fewest multiply-adds until done, for up to 1,048,576 workers: substitution, which is back-propagation"
    assert comparison.conclusion.startswith(f"{start}, from ")
    assert compared(methods=["substitution", "bicgstab"]).conclusion == f"{start}."
    assert start in " ".join(str(comparison).split())


def test_what_takes_long_is_left_out_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = network(16, 8), torch.randn(4, 8, dtype=torch.float64)
    prune_weights(module, 0.5)
    monkeypatch.setattr("jacsparse.flop.estimate.LONG", 0.0)
    rows = {row.method: row for row in compare(module, x, seconds=0.0).rows}
    for name in ("scan", "cyclic_reduction"):
        assert rows[name].steps is None and rows[name].remark.endswith("; ask for it by name")
    assert rows["substitution"].seconds is not None
    (row,) = compare(module, x, seconds=0.0, methods=["scan"]).rows
    assert row.seconds is not None and not row.remark


def test_recurrent_networks_and_methods_by_name() -> None:
    rnn, x = nn.RNN(2, 3, 2), torch.randn(9, 2, 2)
    recurrent = compare(rnn, x, workers=(1,), seconds=0.0)
    assert {row.method for row in recurrent.rows if row.multiply_adds_until_done} == set(SOLVERS) - {
        "scan",
        "richardson",
    }
    rows = compare(rnn, x, methods=["jacobi", Richardson(omega=0.9, limit=200)], seconds=0.0).rows
    assert [row.method for row in rows] == ["jacobi", "richardson"]
    for arguments, message in (
        ({"workers": (0,)}, r"workers is \(0,\)"),
        ({"methods": "jacobi"}, "methods is 'jacobi'; expected a sequence"),
        ({"methods": []}, r"methods is \[\]; expected a sequence"),
        ({"methods": ["gauss"]}, "method is 'gauss'; expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(rnn, x, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has shape \(9, 2, 5\); expected a padded batch, \(time, batch, 2\)"):
        compare(rnn, torch.randn(9, 2, 5))
    with pytest.raises(ValueError, match=r"0: an input of shape \(5,\) does not fit Linear"):
        compare(network(2, 4).float(), torch.randn(3, 5))


def test_an_iteration_of_bicgstab_is_two_steps() -> None:
    jacobi, bicgstab = compared(methods=["jacobi", "bicgstab"]).rows
    # A sweep finds that nothing changes, and another one is the first residual.
    assert jacobi.steps == (jacobi.iterations or 0) + 1
    assert bicgstab.steps == (bicgstab.iterations or 0) * 2 + 2


def test_what_does_not_settle_has_no_times() -> None:
    comparison = compared(methods=[Jacobi(limit=3)])
    (row,) = comparison.rows
    assert row.seconds is None and row.multiply_adds_until_done is None
    assert row.remark == "did not settle in 3 iterations" and comparison.conclusion == "No solver settled."
    assert "jacobi: did not settle" in str(comparison)


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_module, "MOST", 10_000)
    substitution, scan, jacobi = compared(methods=["substitution", "scan", Jacobi(limit=3)]).rows
    assert substitution.seconds is not None and scan.seconds is None and scan.multiply_adds_until_done
    assert scan.remark.startswith("not timed") and jacobi.remark.startswith("did not settle")


def test_an_infinite_solution_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    system = BlockBidiagonal([torch.full((1, 1), 1e30)] * 2, [torch.ones(1, 1)] * 3)
    monkeypatch.setattr(comparison_module, "propagation", lambda *_: SimpleNamespace(system=system))
    (row,) = compare(network(1, 1).float(), torch.ones(1, 1), methods=["substitution"], seconds=0.0).rows
    assert row.seconds is None and row.remark == "its solution is not finite"


def test_buffers_and_random_numbers_are_left_alone() -> None:
    normalised = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
    before = {name: tensor.clone() for name, tensor in normalised.state_dict().items()}
    compare(normalised.eval(), torch.randn(3, 5), seconds=0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in normalised.state_dict().items())
    dropping = nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 2))
    state = torch.get_rng_state()
    compare(dropping, torch.ones(3, 5), methods=["substitution"], seconds=0.0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = str(compared(workers=tuple(2**power for power in range(0, 21, 2))))
    assert "…" not in printed and max(map(len, printed.splitlines())) <= columns
    for word in ("cyclic_reduction", "1,048,576 workers", "multiply-adds of all products"):
        assert word in " ".join(printed.split())


def test_what_is_written(tmp_path: Path) -> None:
    comparison = replace(compared(methods=["substitution"]), settings={"seed": 7})
    comparison.save_json(tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert (figures["name"], figures["samples"], figures["workers"]) == ("Sequential", 4, [1, 16])
    assert figures["versions"]["torch"] == torch.__version__ and figures["settings"] == {"seed": 7}
    assert repr(comparison) == "<SolverComparison of Sequential: substitution>"


def test_modules_without_a_system() -> None:
    with pytest.raises(ValueError, match="has no stage with a matrix"):
        compare(nn.Sequential(nn.Tanh()), torch.randn(5, 4))
    normalised = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    with pytest.raises(UnsupportedOperatorError, match="batch normalisation in training mode couples the samples"):
        compare(normalised, torch.randn(5, 4))
