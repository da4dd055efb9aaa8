"""What is kept on disk between runs: found again, limited, and no harm where it cannot be."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from jacsparse.runtime import SYMBOLIC, cached_arrays, disk_cache, shelves

#: Whose sources the results depend on.
PACKAGES = ("jacsparse.runtime",)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "1")
    monkeypatch.setattr(disk_cache, "SLOW", 0.0)
    monkeypatch.setattr(disk_cache, "READ", 1e12)
    return tmp_path / "symbolic"


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
        assert np.array_equal(cached_arrays("one", one, packages=PACKAGES)["number"], one.array)
        assert np.array_equal(cached_arrays("other", other, packages=PACKAGES)["number"], other.array)
    assert one.calls == other.calls == 1
    assert SYMBOLIC.usage()[0] == len(list(place.iterdir())) == 2
    for shelf in shelves():
        shelf.clear()
    assert SYMBOLIC.usage() == (0, 0)
    cached_arrays("one", one, packages=PACKAGES)
    assert one.calls == 2


def test_nothing_at_all_is_a_result_too() -> None:
    calls: list[int] = []
    for _ in range(2):
        assert cached_arrays("nothing", lambda: calls.append(1) or {}, packages=PACKAGES) == {}
    assert len(calls) == 1


def test_what_is_made_faster_than_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Maker(1)
    monkeypatch.setattr(disk_cache, "SLOW", 10.0)
    cached_arrays("quick", quick, packages=PACKAGES)
    monkeypatch.setattr(disk_cache, "SLOW", 0.0)
    monkeypatch.setattr(disk_cache, "READ", 1e-3)
    cached_arrays("quick", quick, packages=PACKAGES)
    assert quick.calls == 2 and SYMBOLIC.usage() == (0, 0)


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
    cached_arrays("seven", maker, packages=PACKAGES)
    (file,) = place.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert np.array_equal(cached_arrays("seven", maker, packages=PACKAGES)["number"], maker.array)
    assert maker.calls == 2


def test_the_ones_used_longest_ago_go(place: Path) -> None:
    # Three of them exceed the limit; one more than a quarter of it is not kept at all.
    makers = {name: Maker(number, 30_000) for number, name in enumerate("abcd")}
    for name in "abcd":
        cached_arrays(name, makers[name], packages=PACKAGES)
        for file in place.iterdir():
            os.utime(file, (time.time() - 1000, file.stat().st_mtime - 10))
        cached_arrays("a", makers["a"], packages=PACKAGES)
    cached_arrays("e", Maker(5, 30_000), packages=PACKAGES)
    assert SYMBOLIC.usage()[1] <= 2**20
    cached_arrays("a", makers["a"], packages=PACKAGES)
    assert makers["a"].calls == 1
    cached_arrays("b", makers["b"], packages=PACKAGES)
    assert makers["b"].calls == 2
    cached_arrays("large", large := Maker(6, 40_000), packages=PACKAGES)
    cached_arrays("large", large, packages=PACKAGES)
    assert large.calls == 2


def test_what_another_process_left_unfinished_goes_too(place: Path) -> None:
    place.mkdir()
    (place / ".left.npz").write_bytes(bytes(2**20))
    os.utime(place / ".left.npz", (0, 0))
    cached_arrays("one", Maker(1), packages=PACKAGES)
    assert [file.name[0] != "." for file in place.iterdir()] == [True]


@pytest.mark.parametrize("mib", ["0", "-1", "much", "1.5"])
def test_no_limit_but_a_natural_number(mib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", mib)
    maker = Maker(1)
    if mib == "0":
        cached_arrays("one", maker, packages=PACKAGES)
        cached_arrays("one", maker, packages=PACKAGES)
        assert maker.calls == 2
        return
    with pytest.raises(
        ValueError, match=f"JACSPARSE_CACHE_MIB is '{mib}'; expected MiB of symbolic results on disk, or 0"
    ):
        cached_arrays("one", maker, packages=PACKAGES)


def test_nowhere_to_keep_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path / "file" / "home"))
    assert np.array_equal(cached_arrays("one", Maker(1), packages=PACKAGES)["number"], np.ones(10))
    assert SYMBOLIC.usage() == (0, 0)
    for shelf in shelves():
        shelf.clear()


def _writes(number: int) -> bool:
    results = [cached_arrays(f"{key}", Maker(key, 20_000), packages=PACKAGES) for key in range(number % 3, 12)]
    return all((arrays["number"] == key).all() for arrays, key in zip(results, range(number % 3, 12), strict=True))


def test_many_processes_at_once() -> None:
    """They write the same keys, and more than the limit holds: each finds what it asked for."""
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        assert all(pool.map(_writes, range(24)))
    assert 0 < SYMBOLIC.usage()[1] <= 2**20


def test_other_sources_find_nothing_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "library")
    place = tmp_path / "library" / "rules_of_a_test"
    (place / "inner").mkdir(parents=True)
    names = ("__init__.py", "pooling.py", "inner/order.py")
    for name in names:
        (place / name).write_text(f"# {name}", encoding="utf-8")
    maker = Maker(3)

    def calls() -> int:
        disk_cache.sources_digest.cache_clear()
        cached_arrays("three", maker, packages=("rules_of_a_test",))
        return maker.calls

    assert [calls(), calls()] == [1, 1]
    for number, name in enumerate(names):
        (place / name).write_text("# changed", encoding="utf-8")
        assert calls() == number + 2
    disk_cache.sources_digest.cache_clear()
