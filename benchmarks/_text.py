"""Texts of figures for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._rows import Comparison, Row

COLUMNS = ("what", "median", "quartiles", "fastest", "runs", "floor", "compared")


def amount(value: float | None, unit: str) -> str:
    """A figure with its unit, to three digits; times in a unit of suitable size."""
    if value is None:
        return ""
    if unit == "s":
        for name, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
            if abs(value) >= scale or name == "ns":
                return f"{_digits(value / scale)} {name}"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    """At least three digits, and all digits of a whole number; five decimals just below one, as of sparsities."""
    if 0.99 < abs(value) < 1:
        return f"{value:.5f}"
    if float(value).is_integer() or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def comparison_text(comparison: Comparison) -> str:
    """A ratio of medians, that of the fastest runs, the target and the published ratio."""
    text = f"{comparison.text}: {ratio_text(comparison.ratio)}"
    remarks = []
    if comparison.fastest is not None:
        remarks.append(f"fastest {ratio_text(comparison.fastest)}")
    for sign, target in (("≥", comparison.at_least), ("≤", comparison.at_most)):
        if target is not None:
            remarks.append(f"target {sign} {ratio_text(target)}: {'met' if comparison.met else 'missed'}")
    if comparison.published is not None:
        remarks.append(f"published {ratio_text(comparison.published)}")
    return f"{text} ({', '.join(remarks)})" if remarks else text


def ratio_text(value: float) -> str:
    """A ratio, to three digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, one for each of `COLUMNS`."""
    if row.not_measured:
        return (row.label, "not measured", "", "", "", "", _joined(row.not_measured, row.note))
    quartiles = "" if row.lower is None else f"{amount(row.lower, row.unit)} – {amount(row.upper, row.unit)}"
    compared = "; ".join(comparison_text(comparison) for comparison in row.comparisons)
    return (
        row.label if row.quantity == "time" else f"{row.label} ({row.quantity})",
        amount(row.median, row.unit),
        quartiles,
        amount(row.fastest, row.unit),
        f"{row.runs:,}",
        amount(row.floor, row.unit),
        _joined(compared, row.note),
    )


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def table_head(names: Sequence[str]) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [table_line(names), table_line(["---"] * len(names))]


def table_line(texts: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(text.replace('|', '∣') for text in texts)} |"
