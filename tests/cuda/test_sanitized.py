"""Launches of every kernel, recorded and run again under sanitizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from jacsparse.patterns import Diagonal, Full, Pattern
from jacsparse.patterns._cuda import FILES
from jacsparse.spgemm import matvec, plan_product
from torch import nn

import jacsparse
from tests.cuda.fibers import sanitized
from tests.cuda.harness import emulated
from tests.cuda.test_products import random_pattern, values_of


def values() -> None:
    for module, shape in (
        (nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4)),
        (nn.ReLU(), (5,)),
        (nn.MaxPool2d(2), (1, 4, 4)),
        (nn.AvgPool2d(2), (1, 4, 4)),
    ):
        for batch in (1, 33):
            jacsparse.jacobian(module, torch.randn(batch, *shape))


def products() -> None:
    a, b = random_pattern(7, 5, 0.4, 1), random_pattern(5, 9, 0.4, 2)
    diagonal, full = Pattern.of(Diagonal(5)), Pattern.of(Full(5, 3))
    cases = [(a, b, method) for method in ("merge", "slots", "rowwise")]
    cases += [(a, diagonal, "scale"), (diagonal, b, "scale"), (a, full, "dense"), (Pattern.of(Full(3, 5)), b, "dense")]
    for left, right, method in cases:
        plan = plan_product(left, right, method=method)
        for batches in ((1, 1), (2, 1), (1, 33)):
            operands = (
                values_of(one, batch, torch.float32, 0) for one, batch in zip((left, right), batches, strict=True)
            )
            plan.multiply(*operands)
    long = random_pattern(2, 90, 0.9, 3)
    plan_product(long, long.T, method="merge").multiply(*(values_of(p, 1, torch.float64, 0) for p in (long, long.T)))
    for batch in (1, 33):
        matvec(a, values_of(a, 1, torch.float32, 0), torch.randn(5, batch))


def selections() -> None:
    chain = jacsparse.chain(nn.MaxPool2d(2, 1), (1, 4, 4))
    (record,) = chain.run(torch.randn(3, 1, 4, 4))
    winners, selecting = record.stage.rule.selection(record._call(slice(None))), chain.stages[0].pattern
    rows, windows = selecting.shape
    for left in (True, False):
        other = random_pattern(*((windows, 4) if left else (4, rows)), 0.4, 6)
        plan = plan_product(*((selecting, other) if left else (other, selecting)), method="select")
        given = values_of(other, 3, torch.float32, 7)
        plan.multiply(*((winners, given) if left else (given, winners)))


def recurrent() -> None:
    for layer in (jacsparse.nn.RNN, jacsparse.nn.GRU, jacsparse.nn.LSTM):
        for size in (5, 33):
            layer(2, size, bidirectional=True)(torch.randn(3, 2, 2))[0].sum().backward()


SETS: dict[str, Callable[[], None]] = {
    "values": values,
    "products": products,
    "selections": selections,
    "recurrent": recurrent,
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("launches")
    for name, run in SETS.items():
        (folder / name).mkdir()
        with emulated(folder / name):
            run()
    sources = {
        name: {"name": file.path.stem, "source": file.source, "instances": file.instances}
        for name, file in FILES.items()
    }
    (folder / "sources.json").write_text(json.dumps(sources))
    yield folder


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_nothing_is_found(kind: str, name: str, launches: Path) -> None:
    arguments = ["-m", "tests.cuda.replay", str(launches / name), str(launches / "sources.json")]
    result = sanitized(kind, arguments)
    assert result.returncode == 0 and "replayed" in result.stdout, result.stdout[-4000:]


def test_every_kernel_is_launched(launches: Path) -> None:
    import numpy as np

    seen = {str(np.load(path)["instance"]).partition("<")[0] for path in launches.glob("*/*.npz")}
    assert seen == {instance.partition("<")[0] for file in FILES.values() for instance in file.instances}
