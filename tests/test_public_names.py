"""The public names: each has one page, and a signature that does not change by accident.

``python -m tests.test_public_names`` writes the list of signatures anew; a change of one belongs into the CHANGELOG.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pydoc
import re
from pathlib import Path
from typing import Any

import torch

import jacsparse

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).parent / "reference" / "public_names.txt"
#: What rooms export for other rooms of the library, and not for users.
INTERNAL = {
    "distributed": """
        JACOBIANS MATRICES VECTORS Incoming RankGroup RankScan Ranks interconnect_of ranks_of""",
    "models": "Progress SOUNDS progress_bar",
    "patterns": """
        CONSTANT Layout MOVEMENTS REGISTERED RULES Rule Sources Use WHOLE any_nonzero_at
        are_values_registered as_html batch_last compressed_values entries_of_rows gathered gradient_of gradients_of
        holds_numbers input_gradients is_pointwise note_infinite pattern_figure pattern_of_rows picture plot_pattern
        requiring_gradient row_colors row_sums rows_alike rows_at remedy_for rule_for rule_of""",
    "recurrence": """
        ASKED CELLS Choice NODES Nodes PRICES Prices Problem Recurrence RecurrenceSize SOLVERS Saved Sequences Solver
        Weights cell_on parse""",
    "schedule": """
        COUNTED EXCHANGES Names blocked by_level check_exchange check_workers fastest_on run
        taken_in""",
    "simulation": "AcrossRanks GPipe TRAINING_METHODS",
    "solvers": "Propagator SOLVERS solver_of",
    "spgemm": """
        FACTORIZATIONS FactorPlan KEYS METHODS Method PACKED PLAN_CACHE Product RowGroups StripProduct check_limit
        counts fresh_keys matvec meeting multiply_adds planned product_meeting product_pattern spread
        sum_pattern unchecked_jacobian""",
    "training": "Leapfrogger check_threads in_eval_mode",
}


def pages() -> list[str]:
    """The names of the reference, without ``jacsparse.``; one for each line of its lists."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    return [name for text in texts for name in re.findall(r"^   jacsparse\.([\w.]+)$", text, re.MULTILINE)]


def find(name: str) -> Any:
    thing: Any = jacsparse
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def signature(thing: Any) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(thing)))
    except (TypeError, ValueError):
        return ""


def signatures() -> list[str]:
    """A line for each public name, and one for each public method and property of a class."""
    lines = []
    for name in sorted(pages()):
        thing = find(name)
        lines.append(f"{name}{signature(thing) if callable(thing) else ''}")
        if not inspect.isclass(thing):
            continue
        members = {}
        for base in reversed(thing.__mro__):
            if base.__module__.startswith("jacsparse"):
                members.update({member: value for member, value in vars(base).items() if not member.startswith("_")})
        for member, value in sorted(members.items()):
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if inspect.isfunction(function):
                lines.append(f"    {name}.{member}{signature(function)}")
            elif hasattr(value, "__get__"):
                lines.append(f"    {name}.{member}")
    return lines


def test_each_public_name_has_one_page() -> None:
    listed = pages()
    assert len(listed) == len(set(listed)), "a name is listed twice"
    assert set(jacsparse.__all__) <= set(listed)
    for room in [name for name in dir(jacsparse) if inspect.ismodule(getattr(jacsparse, name))]:
        exported = set(importlib.import_module(f"jacsparse.{room}").__all__)
        shown = {name.removeprefix(f"{room}.") for name in listed if name.startswith(f"{room}.")}
        elsewhere = {name.rpartition(".")[2] for name in listed} - shown
        internal = set(INTERNAL.get(room, "").split())
        assert not internal & shown and internal <= exported, room
        assert exported - internal - shown - elsewhere == set(), f"{room}: give these a page, or list them as internal"


def test_each_thing_has_one_page() -> None:
    things: dict[int, str] = {}
    for name in pages():
        thing = find(name)
        assert inspect.getdoc(thing), name
        if callable(thing):
            assert id(thing) not in things, f"{name} is {things.get(id(thing))}"
            things[id(thing)] = name


def test_signatures_are_those_of_the_list() -> None:
    assert signatures() == LIST.read_text(encoding="utf-8").splitlines(), __doc__


def test_what_dir_and_help_show() -> None:
    rooms = {name for name in dir(jacsparse) if inspect.ismodule(getattr(jacsparse, name))}
    assert set(dir(jacsparse)) == {*jacsparse.__all__, *rooms, "__version__"}
    output = io.StringIO()
    pydoc.Helper(output=output).help(jacsparse)
    text = output.getvalue()
    functions = text[text.index("\nFUNCTIONS\n") : text.index("\nVERSION\n")]
    classes = text[text.index("\nCLASSES\n") : text.index("\nFUNCTIONS\n")]
    shown = set(re.findall(r"^    (\w+)\(", functions, re.MULTILINE)) | set(
        re.findall(r"^    class (\w+)\(", classes, re.MULTILINE)
    )
    assert shown == set(jacsparse.__all__)
    assert "\nDATA\n" not in text


def test_modules_are_modules() -> None:
    for name in ("Scan", "Solve", "Leapfrog", "GRU", "LSTM", "RNN", "SparseConv2d", "SparseLinear"):
        assert issubclass(getattr(jacsparse.nn, name), torch.nn.Module)


if __name__ == "__main__":
    LIST.write_text("\n".join(signatures()) + "\n", encoding="utf-8")
