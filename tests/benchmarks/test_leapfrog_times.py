"""The paper's prediction of leapfrogging, and that of its Algorithm 1."""

from benchmarks._leapfrog_times import leapfrog_critical_path, leapfrog_saving


def test_published_savings() -> None:
    assert leapfrog_saving(0, 0, 1, threads=8) == 0.875
    assert [leapfrog_saving(1, 2, 3, threads=k) for k in (1, 2, 4)] == [0, 0.25, 0.375]
    # Algorithm 1 as printed covers the layers 2 to 15 of 16.
    assert round(1 - leapfrog_critical_path(14, threads=8) / 14, 2) == 0.43
    assert leapfrog_critical_path(5, threads=1) == 5 == leapfrog_critical_path(5, threads=99)
