"""Kernels of max-pooling; rows are planes of a block."""

from __future__ import annotations

import numpy as np

from ..runtime import kernel


@kernel
def take_winners(first, last, x, y, winners, window, relu):
    """Set `y` to each window's maximum, and `winners` to its number there: the first one, or one that is no number.

    With `relu`, a maximum that is not positive is zero, and no position has won.
    """
    _, rows, columns, lanes = x.shape
    _, out_rows, out_columns, _ = y.shape
    for plane in range(first, last):
        for out_row in range(out_rows):
            for out_column in range(out_columns):
                best, winner = y[plane, out_row, out_column], winners[plane, out_row, out_column]
                best[:] = -np.inf
                winner[:] = 0
                empty = True
                for i in range(window[0]):
                    row = out_row * window[2] - window[4] + i * window[6]
                    if row < 0 or row >= rows:
                        continue
                    for j in range(window[1]):
                        column = out_column * window[3] - window[5] + j * window[7]
                        if column < 0 or column >= columns:
                            continue
                        number, values = i * window[1] + j, x[plane, row, column]
                        for lane in range(lanes):
                            value = values[lane]
                            # A later value that is no number wins, as in PyTorch.
                            wins = empty or value > best[lane] or value != value
                            best[lane] = value if wins else best[lane]
                            winner[lane] = number if wins else winner[lane]
                        empty = False
                if relu:
                    for lane in range(lanes):
                        through = not best[lane] <= 0
                        best[lane] = best[lane] if through else 0
                        winner[lane] = winner[lane] if through else window[0] * window[1]


@kernel
def pull_winners(first, last, x, y, winners, window):
    """Set `x` to the sums of the gradients `y` of the windows that each position won."""
    _, rows, columns, lanes = x.shape
    _, out_rows, out_columns, _ = y.shape
    for plane in range(first, last):
        x[plane] = 0
        for out_row in range(out_rows):
            for out_column in range(out_columns):
                gradient, winner = y[plane, out_row, out_column], winners[plane, out_row, out_column]
                for i in range(window[0]):
                    row = out_row * window[2] - window[4] + i * window[6]
                    if row < 0 or row >= rows:
                        continue
                    for j in range(window[1]):
                        column = out_column * window[3] - window[5] + j * window[7]
                        if column < 0 or column >= columns:
                            continue
                        number, sums = i * window[1] + j, x[plane, row, column]
                        for lane in range(lanes):
                            sums[lane] += gradient[lane] if winner[lane] == number else 0
