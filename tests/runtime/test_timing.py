"""Times of calls that take turns, on machines that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from jacsparse.runtime import RunTime, run_times, timing

from ..helpers import made_up_runs


def nothing() -> None:
    pass


def test_the_fastest_of_runs_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = made_up_runs(monkeypatch, [0.030, 0.011, 0.010, 0.0102, 0.025], [0.002])
    slow, quick = run_times(nothing, nothing, most=0.05)
    assert (slow, quick) == (RunTime(0.010, 0.030, False), RunTime(0.002, 0.002, True)) and taken() == 6
    assert slow.spread == pytest.approx(2.0) and slow.over(quick) is None and not quick.clearly_below(slow)
    slow, quick = run_times(nothing, nothing)
    assert slow == RunTime(0.010, 0.0102, True) and slow.over(quick) == pytest.approx(5.0)
    assert quick.clearly_below(slow) and not slow.clearly_below(quick) and str(slow) == "10.000 ms ± 2 %"


def test_three_runs_that_were_stalled_alike_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [(0.016, 0.015)], [0.001])
    stalled, quick = run_times(nothing, nothing)
    assert stalled == RunTime(0.016, 0.016, False) and quick.is_stable
    assert not quick.clearly_below(stalled) and stalled.over(quick) is None
    assert str(stalled) == "16.000 ms busy"


def test_stalled_runs_do_not_count_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [(0.016, 0.015), (0.002, 0.0), (0.003, 0.0014), (0.0021, 0.00001)])
    (time,) = run_times(nothing)
    assert time == RunTime(0.002, 0.0021, True)


def test_repeats_end(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = made_up_runs(monkeypatch, [2.0, 3.0, 4.0])
    assert not run_times(nothing)[0].is_stable and taken() == 3
    taken = made_up_runs(monkeypatch, [1e-6])
    assert run_times(nothing)[0].is_stable and taken() == 100


@pytest.mark.parametrize(
    ("one", "other", "clear"),
    [
        ((1.0, 1.04, True), (1.2, 1.2, True), True),
        ((1.0, 1.04, True), (1.14, 1.19, True), False),
        ((1.0, 1.04, True), (9.0, 9.0, False), False),
        ((1.0, 9.0, False), (9.9, 9.9, True), False),
    ],
)
def test_clearly_below(one: tuple[float, float, bool], other: tuple[float, float, bool], clear: bool) -> None:
    assert RunTime(*one).clearly_below(RunTime(*other)) is clear


def test_waiting_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "_THREADS", tmp_path)
    for thread, text in (("1", "900 2000000000 3"), ("2", "1 500000000 1"), ("3", "damaged"), ("4", None)):
        (tmp_path / thread).mkdir()
        if text is not None:
            (tmp_path / thread / "schedstat").write_text(text, encoding="utf-8")
    assert timing._waited() == pytest.approx(2.5)
    monkeypatch.setattr(timing, "_THREADS", tmp_path / "nowhere")
    assert timing._waited() == 0
