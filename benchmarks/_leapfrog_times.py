"""Predicted times of leapfrogging: the paper's, that of its Algorithm 1, and that of what runs."""

from __future__ import annotations

from jacsparse.training import check_threads


def leapfrog_saving(forward: float, errors: float, gradients: float, threads: int) -> float:
    """The share of a pass, forward and back, that the paper says leapfrogging saves (equation 10).

    It leaves out what no worker shares: the prologue of Algorithm 1, and the layers that k does not divide.

    Parameters
    ----------
    forward, errors, gradients : float
        Seconds of a layer's equations 2, 5 and 7: f1, f2 and f3.
    threads : int
        The number k of threads.

    Examples
    --------
    >>> round(leapfrog_saving(1, 1, 1, threads=8), 3)
    0.292
    >>> leapfrog_saving(0, 0, 1, threads=8)                             # of the gradients' time alone
    0.875
    """
    return (1 - 1 / check_threads(threads)) * gradients / (forward + errors + gradients)


def leapfrog_critical_path(layers: int, threads: int) -> int:
    """The number of layers whose gradients Algorithm 1 computes one after another.

    These are k - 1 layers of the parent's prologue, and then each k-th one of the others: shortest near k = √layers.

    Parameters
    ----------
    layers : int
        Layers whose gradients are computed. As printed, the algorithm does so for the layers 2 to L - 1 of L.
    threads : int
        The number k of threads.

    Examples
    --------
    >>> round(1 - leapfrog_critical_path(16 - 2, threads=8) / (16 - 2), 2)       # of f3, where equation 10 says 0.88
    0.43
    >>> [leapfrog_critical_path(256, threads) for threads in (4, 8, 16, 32, 64)]
    [67, 39, 31, 39, 67]
    """
    prologue = min(layers, check_threads(threads) - 1)
    return prologue + -(-(layers - prologue) // threads)


def leapfrog_seconds(errors: float, gradients: float, layers: int, threads: int) -> float:
    """Seconds of `jacsparse.leapfrog_backward` on equal layers, each worker with a core of its own.

    A worker takes the errors back to its last layer, and that of the first layer through all of them.

    Examples
    --------
    >>> leapfrog_seconds(1.0, 1.0, 16, threads=8)                       # of 32; the recursion of errors is not shared
    18.0
    """
    workers = (range(worker, layers, check_threads(threads)) for worker in range(min(threads, layers)))
    return max((part[-1] + 1) * errors + len(part) * gradients for part in workers)
