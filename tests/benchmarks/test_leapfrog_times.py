"""The paper's prediction of leapfrogging, and that of its Algorithm 1."""

from benchmarks.leapfrog import leapfrog_critical_path, leapfrog_saving, leapfrog_seconds


def test_published_savings() -> None:
    assert leapfrog_saving(0, 0, 1, threads=8) == 0.875
    assert [leapfrog_saving(1, 2, 3, threads=k) for k in (1, 2, 4)] == [0, 0.25, 0.375]
    # Algorithm 1 as printed covers the layers 2 to 15 of 16.
    assert round(1 - leapfrog_critical_path(14, threads=8) / 14, 2) == 0.43
    assert leapfrog_critical_path(5, threads=1) == 5 == leapfrog_critical_path(5, threads=99)


def test_seconds_are_those_of_the_slowest_worker() -> None:
    """Every worker carries the errors back to its last layer, and computes the gradients of every k-th."""
    for layers in (1, 4, 7, 16):
        for threads in range(1, 20):
            ends = []
            for worker in range(min(threads, layers)):
                time, own = 0.0, [layer for layer in range(layers) if layer % threads == worker]
                for layer in range(own[-1] + 1):
                    time += 2.0 + 3.0 * (layer in own)
                ends.append(time)
            assert leapfrog_seconds(2.0, 3.0, layers, threads) == max(ends)
    assert leapfrog_seconds(2.0, 3.0, 9, threads=1) == 9 * 5
