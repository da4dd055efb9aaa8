"""Every example in a docstring, and those of the README, run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jacsparse.patterns import RULES

import jacsparse

README = Path(__file__).parent.parent / "README.md"


def modules() -> list[str]:
    names = {"jacsparse"}
    for module in pkgutil.iter_modules([str(README.parent / "jacsparse")]):
        names.add(f"jacsparse.{module.name}")
    for package in sorted({*names, "jacsparse.patterns", "jacsparse.spgemm", "jacsparse.models"} - {"jacsparse"}):
        path = getattr(importlib.import_module(package), "__path__", [])
        names |= {package, *(module.name for module in pkgutil.walk_packages(path, f"{package}."))}
    return sorted(names - {"jacsparse.__main__"})


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    """Examples register rules, whose functions find no globals when the example has run."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_readme() -> None:
    torch.manual_seed(0)
    assert doctest.testfile(str(README), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_public_names_have_examples() -> None:
    for name in jacsparse.__all__:
        thing = getattr(jacsparse, name)
        assert getattr(thing, "__doc__", None), name
