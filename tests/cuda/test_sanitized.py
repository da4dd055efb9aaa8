"""Launches of every kernel, recorded and run again: under sanitizers, and in other orders of threads and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jacsparse.runtime import KERNEL_FILES
from tests.cuda.fibers import ORDERS, sanitized
from tests.cuda.harness import emulated
from tests.cuda.replay import replay
from tests.cuda.sets import LONG, SETS

#: Sets whose launches are replayed by one process: those of the same files of kernels, which are compiled once for all.
TOGETHER = (
    ("values", "products", "selections"),
    ("recurrent", "small layers"),
    ("chunks", "linear", "levels"),
    ("fused loops",),
)
#: Those that take long: ThreadSanitizer half a minute where there are many fibers.
SLOW = [*((kind, (name,)) for kind in ("address", "thread") for name in LONG), ("thread", TOGETHER[2])]
REPLAYED = [
    pytest.param(*each, id=f"{each[0]}-{', '.join(each[1])}", marks=pytest.mark.full if each in SLOW else ())
    for each in itertools.product(("address", "thread"), (*TOGETHER, *((name,) for name in LONG)))
]
NAMES = [*SETS, *(pytest.param(name, marks=pytest.mark.full) for name in LONG)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the launches of a set."""
    folders: dict[str, Path] = {}

    def record(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("launches")
            with emulated(folder):
                (SETS | LONG)[name]()
            folders[name] = folder
        return folders[name]

    return record


def test_sanitizers_get_every_set() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(SETS)


@pytest.mark.parametrize(("kind", "names"), REPLAYED)
def test_sanitizers_find_nothing(kind: str, names: tuple[str, ...], recorded: Callable[[str], Path]) -> None:
    result = sanitized(kind, ["-m", "tests.cuda.replay", *(str(recorded(name)) for name in names)])
    assert result.returncode == 0 and "replayed" in result.stdout, result.stdout[-4000:]


@pytest.mark.parametrize("name", NAMES)
def test_the_order_changes_no_bit(name: str, recorded: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for path in sorted(recorded(name).glob("*.npz")):
        left = []
        for order in ORDERS:
            monkeypatch.setenv("FIBER_ORDER", order)
            left.append([array.tobytes() for array in replay(path)])
        assert left.count(left[0]) == len(ORDERS), f"{path.name}: {np.load(path)['instance']}"


def test_every_kernel_is_launched(recorded: Callable[[str], Path]) -> None:
    paths = [path for name in SETS for path in recorded(name).glob("*.npz")]
    loaded = [np.load(path) for path in paths]
    seen = {(f"{each['kernels']}.cu", str(each["instance"]).partition("<")[0]) for each in loaded}
    listed = [(name, instance) for name, file in KERNEL_FILES.items() for instance in file.instances]
    # Those of fused loops are listed nowhere.
    assert {each for each in seen if each[0] in KERNEL_FILES} == {
        (name, instance.partition("<")[0]) for name, instance in listed
    }
