"""What is kept on disk between runs: found again, limited, and no harm where it cannot be."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from jacsparse.patterns import Pattern, _coloring, _runtime, _store
from torch import nn

import jacsparse
from tests.helpers import random_pattern


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "1")
    monkeypatch.setattr(_store, "SLOW", 0.0)
    monkeypatch.setattr(_store, "READ", 1e12)
    return tmp_path / "plans"


class Maker:
    """Makes an array of one number, and counts how often."""

    def __init__(self, number: int, size: int = 10) -> None:
        self.array, self.calls = np.full(size, number), 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"number": self.array}


def test_what_was_made_is_found_again(place: Path) -> None:
    one, other = Maker(1), Maker(2)
    for _ in range(3):
        assert np.array_equal(_store.remembered("one", one)["number"], one.array)
        assert np.array_equal(_store.remembered("other", other)["number"], other.array)
    assert one.calls == other.calls == 1
    assert _store.used("plans")[0] == len(list(place.iterdir())) == 2
    _store.clear()
    assert _store.used("plans") == (0, 0)
    _store.remembered("one", one)
    assert one.calls == 2


def test_nothing_at_all_is_a_result_too() -> None:
    calls: list[int] = []
    for _ in range(2):
        assert _store.remembered("nothing", lambda: calls.append(1) or {}) == {}
    assert len(calls) == 1


def test_what_is_made_faster_than_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Maker(1)
    monkeypatch.setattr(_store, "SLOW", 10.0)
    _store.remembered("quick", quick)
    monkeypatch.setattr(_store, "SLOW", 0.0)
    monkeypatch.setattr(_store, "READ", 1e-3)
    _store.remembered("quick", quick)
    assert quick.calls == 2 and _store.used("plans") == (0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content.replace((7).to_bytes(8, "little"), (8).to_bytes(8, "little")),
        lambda content: os.urandom(len(content)),
    ],
    ids=["cut short", "empty", "changed", "random"],
)
def test_a_damaged_file_is_made_again(place: Path, damage) -> None:
    maker = Maker(7)
    _store.remembered("seven", maker)
    (file,) = place.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert np.array_equal(_store.remembered("seven", maker)["number"], maker.array)
    assert maker.calls == 2


def test_the_ones_used_longest_ago_go(place: Path) -> None:
    # Three of them exceed the limit; one more than a quarter of it is not kept at all.
    makers = {name: Maker(number, 30_000) for number, name in enumerate("abcd")}
    for name in "abcd":
        _store.remembered(name, makers[name])
        for file in place.iterdir():
            os.utime(file, (time.time() - 1000, file.stat().st_mtime - 10))
        _store.remembered("a", makers["a"])
    _store.remembered("e", Maker(5, 30_000))
    assert _store.used("plans")[1] <= 2**20
    _store.remembered("a", makers["a"])
    assert makers["a"].calls == 1
    _store.remembered("b", makers["b"])
    assert makers["b"].calls == 2
    _store.remembered("large", large := Maker(6, 40_000))
    _store.remembered("large", large)
    assert large.calls == 2


def test_what_another_process_left_unfinished_goes_too(place: Path) -> None:
    place.mkdir()
    (place / ".left.npz").write_bytes(bytes(2**20))
    os.utime(place / ".left.npz", (0, 0))
    _store.remembered("one", Maker(1))
    assert [file.name[0] != "." for file in place.iterdir()] == [True]


@pytest.mark.parametrize("mib", ["0", "-1", "much", "1.5"])
def test_no_limit_but_a_natural_number(mib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", mib)
    maker = Maker(1)
    if mib == "0":
        _store.remembered("one", maker)
        _store.remembered("one", maker)
        assert maker.calls == 2
        return
    with pytest.raises(ValueError, match=f"JACSPARSE_CACHE_MIB is '{mib}'; expected MiB of plans on disk, or 0"):
        _store.remembered("one", maker)


def test_nowhere_to_keep_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path / "file" / "home"))
    assert np.array_equal(_store.remembered("one", Maker(1))["number"], np.ones(10))
    assert _store.used("plans") == (0, 0)
    _store.clear()


def _writes(number: int) -> bool:
    found = [_store.remembered(f"{key}", Maker(key, 20_000)) for key in range(number % 3, 12)]
    return all((arrays["number"] == key).all() for arrays, key in zip(found, range(number % 3, 12), strict=True))


def test_many_processes_at_once() -> None:
    """They write the same keys, and more than the limit holds: each finds what it asked for."""
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        assert all(pool.map(_writes, range(24)))
    assert 0 < _store.used("plans")[1] <= 2**20


def test_colours_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = random_pattern(30, 40, 0.1, 1)
    colors = _coloring.row_colors(pattern)
    monkeypatch.setattr(_coloring, "_greedy_colors", lambda _: pytest.fail("coloured again"))
    again = Pattern((30, 40), pattern.indptr, pattern.indices)
    assert np.array_equal(_coloring.row_colors(again), colors)


def test_colours_are_found_once_for_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    greedy = _coloring._greedy_colors
    monkeypatch.setattr(_coloring, "_greedy_colors", lambda pattern: calls.append(pattern) or greedy(pattern))
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "0")
    module = Products()
    for _ in range(3):
        jacsparse.jacobian(module, torch.randn(2, 5))
    # Of rows, and of columns.
    assert 0 < len(calls) <= 2


class Products(nn.Module):
    """An operator without a formula for its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumprod(1)


def test_another_rule_finds_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(3)
    _store.remembered("three", maker)
    monkeypatch.setattr(_store, "plan_sources", lambda: "others")
    _store.remembered("three", maker)
    assert maker.calls == 2


def test_sources_are_all_that_decide_what_is_in_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("patterns/_runtime.py", "patterns/_pooling.py", "spgemm/_symbolic.py", "jacsparse/_order.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(_runtime, "__file__", str(tmp_path / names[0]))
    digests = [_runtime._digest(_runtime._PLANS)]
    for name in names:
        (tmp_path / name).write_text("changed")
        digests.append(_runtime._digest(_runtime._PLANS))
    assert len(set(digests)) == 5 and all(len(digest) == 20 for digest in digests)
