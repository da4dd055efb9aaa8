"""How figures are laid out."""

from __future__ import annotations

from jacsparse.figures import new_figure


def test_panels_lie_in_rows_and_columns() -> None:
    figure, axes = new_figure(rows=2, columns=3)
    figure.draw_without_rendering()
    places = [[panel.get_position().get_points()[0] for panel in row] for row in axes]
    assert [len(row) for row in places] == [3, 3]
    assert places[0][0][0] == places[1][0][0] < places[0][1][0] and places[0][0][1] == places[0][1][1] > places[1][0][1]
