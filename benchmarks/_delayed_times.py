"""How long an iteration of delayed gradients takes, from the times of its modules (Huo et al., 2018, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence


def published_time(forward: float, backward: float, modules: int) -> float:
    """Table 1: the forward pass in sequence, the backward pass on all of K devices, ``T_F + T_B / K``.

    Examples
    --------
    >>> [round(published_time(0.32, 0.68, modules), 3) for modules in (1, 2, 3, 4)]
    [1.0, 0.66, 0.547, 0.49]
    """
    return forward + backward / modules


def simulated_times(
    forward: Sequence[float], backward: Sequence[float], *, transfer: float = 0.0, iterations: int = 50
) -> list[float]:
    """When each iteration's last module ends, where a process for each module starts as soon as it can.

    A module's forward pass waits for the activations of the one before, and its backward pass for the gradient that
    the one behind made in the iteration before. No module waits for the end of an iteration, so that the forward passes
    of one overlap the backward passes of the last: in the long run an iteration takes as long as the slowest module.

    Parameters
    ----------
    forward, backward : sequence of float
        Seconds of each module's forward and backward pass with its update.
    transfer : float
        Seconds of a message between modules.
    iterations : int
        How many to simulate.

    Raises
    ------
    ValueError
        Where the numbers of modules differ, or there are none.

    Examples
    --------
    >>> times = simulated_times([0.16, 0.16], [0.34, 0.34])
    >>> round(times[-1] - times[-2], 3)
    0.5
    """
    count = len(forward)
    if not count or len(backward) != count:
        raise ValueError(f"there are {count} forward and {len(backward)} backward times; expected one for each module")
    free, sent, ends = [0.0] * count, [0.0] * count, []
    for _ in range(iterations):
        came, gradients = 0.0, list(sent)
        for k in range(count):
            came = max(free[k], came) + forward[k]
            begin = came if k == count - 1 else max(came, gradients[k + 1] + transfer)
            free[k] = sent[k] = begin + backward[k]
            came += transfer
        ends.append(free[-1])
    return ends
