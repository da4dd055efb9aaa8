"""The layers of a network as records: what each holds, and its share of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .layer_flop import LayerFlop, OperatorWork, StepFlop

#: The name of the record that sums all operators which multiply by no weights.
OTHERS = "other operators"
#: What a record counts of its operators' weights and Jacobians.
_COUNTS = ("parameters", "nonzero", "weights", "zeros", "unmasked_zeros", "jacobian_nnz", "jacobian_nbytes")


def layer_records(
    operators: Sequence[OperatorWork], flop: Mapping[str, Sequence[StepFlop]]
) -> tuple[dict[str, Any], ...]:
    """A record for each module that multiplies, and one for all other operators.

    Parameters
    ----------
    operators : sequence of OperatorWork
        All operators, from the network's output to its input.
    flop : mapping
        By structure, the FLOP of each of these.
    """
    records: dict[str, dict[str, Any]] = {}
    for number in reversed(range(len(operators))):
        layer = operators[number].layer
        path = OTHERS if layer is None or not layer.forward else layer.path
        record = records.setdefault(path, dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS if isinstance(layer, LayerFlop) else ():
            # The Jacobians of operators that multiply by no weights are not stored as matrices.
            record[name] += getattr(layer, name) if path != OTHERS or "jacobian" not in name else 0
        for structure, works in flop.items():
            for quantity, value in zip(StepFlop._fields, works[number], strict=True):
                column = f"{structure}_{quantity}"
                record[column] = record.get(column, 0.0) + float(value)
    last = [OTHERS] if OTHERS in records else []
    return tuple(_finished(path, records[path], flop) for path in [*(p for p in records if p != OTHERS), *last])


def _finished(path: str, record: dict[str, Any], structures: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its name in front, and with sums and shares."""
    sums = {
        f"{structure}_step": sum(record[f"{structure}_{quantity}"] for quantity in StepFlop._fields)
        for structure in structures
    }
    share = record["zeros"] / record["weights"] if record["weights"] else 0.0
    return {"layer": path or "(the module)", "sparsity": share, **record, **sums}
