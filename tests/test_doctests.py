"""Every example in a docstring runs, and every block of the README and of the pages under docs/."""

from __future__ import annotations

import doctest
import functools
import importlib
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from jacsparse.patterns import RULES

import jacsparse
from benchmarks._registry import EXPERIMENTS
from jacsparse.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
#: The languages of blocks of code: what runs here as a doctest, commands, and changes to a user's own lines.
PYTHON, COMMANDS, CHANGES, DIRECTIVE = "python", "sh", "diff", "{"


def modules() -> list[str]:
    names = {"jacsparse"}
    for module in pkgutil.iter_modules([str(ROOT / "jacsparse")]):
        names.add(f"jacsparse.{module.name}")
    for package in sorted({*names, "jacsparse.patterns", "jacsparse.spgemm", "jacsparse.models"} - {"jacsparse"}):
        path = getattr(importlib.import_module(package), "__path__", [])
        names |= {package, *(module.name for module in pkgutil.walk_packages(path, f"{package}."))}
    examples = (path.stem for path in (ROOT / "benchmarks").glob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
    return sorted({*names, *(f"benchmarks.{module}" for module in examples)} - {"jacsparse.__main__"})


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: their language and their lines."""
    found = re.findall(r"^```([^\n`]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [(language.strip(), text) for language, text in found]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    """A page's blocks run one after the other, in one namespace."""
    torch.manual_seed(0)
    code = "\n".join(text for language, text in blocks(page) if language == PYTHON)
    test = doctest.DocTestParser().get_doctest(code, {}, page.stem, str(page), 0)
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test)
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_is_tested(page: Path) -> None:
    for language, text in blocks(page):
        assert language in (PYTHON, COMMANDS, CHANGES) or language.startswith(DIRECTIVE), f"{language!r}: {text}"
        if language == PYTHON:
            assert text.startswith(">>> "), text


def commands() -> list[str]:
    texts = [text for page in PAGES for language, text in blocks(page) if language == COMMANDS]
    return sorted({line.partition("  #")[0].strip() for text in texts for line in text.split("\n")} - {""})


@pytest.mark.parametrize("line", commands())
def test_commands_exist(line: str) -> None:
    """Each command of a page, with its options, is one of this project, or one that sets it up."""
    program, *words = line.split()
    if program in ("pip", "git"):
        return
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in words if "=" not in word} <= set(targets)
    elif program == "python":
        assert words[0] == "-m"
        package, *rest = words[1:]
        if package == "benchmarks":
            assert rest[0] in ("run", "report", "list", "pages")
            assert rest[0] != "run" or {word for word in rest[1:] if "_" in word} <= set(EXPERIMENTS)
        elif package != "jacsparse":
            assert (ROOT / (package.replace(".", "/") + ".py")).exists()
    elif "jacsparse" in words or program == "jacsparse":
        words = words[words.index("jacsparse") + 1 :] if "jacsparse" in words else words
        group = typer.main.get_command(app)
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    else:
        raise AssertionError(f"no command of this project: {line}")


@pytest.mark.parametrize("target", ["test-portable", "test-gpu"])
def test_files_that_make_names_exist(target: str) -> None:
    lines = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = re.findall(r"tests/[\w/]+\.(?:py|ini)", lines)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links and all(link.startswith("https://") or (ROOT / link).exists() for link in links)


def test_public_names_have_examples() -> None:
    for name in jacsparse.__all__:
        thing = getattr(jacsparse, name)
        assert getattr(thing, "__doc__", None), name


#: What says where to look in the code: whose names in backticks are to exist.
MAPS = ("CONTRIBUTING.md", *(f"jacsparse/{room}/__init__.py" for room in ("jacobians", "stages", "tracing")))


@functools.cache
def names_in_code() -> set[str]:
    """All names that the library defines, and those of its files and folders."""
    names = set[str]()
    for folder in ("jacsparse", "patterns", "spgemm", "models", "benchmarks", "docs", "tests", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            names |= {path.name, path.stem, *path.relative_to(ROOT).parts}
            if path.suffix in (".py", ".cu"):
                text = path.read_text(encoding="utf-8")
                # Not what a map itself names.
                text = text.split('"""', 2)[2] if path.relative_to(ROOT).as_posix() in MAPS else text
                names |= set(re.findall(r"\w+", text))
    return names | {path.name for path in ROOT.iterdir()}


@pytest.mark.parametrize("page", MAPS)
def test_maps_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text if page.endswith(".md") else text.split('"""')[1]
    quoted = [words for words in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text) if re.fullmatch(r"[\w./]+", words)]
    assert len(quoted) > 10
    unknown = {part for words in quoted for part in re.findall(r"\w+", words)} - names_in_code()
    assert not unknown


def test_maps_name_what_is_in_a_file() -> None:
    """The file of "`name` (`file.py`)" and "`name` in `file.py`" has the name, and the class of `Class.name`."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("jacsparse", "patterns", "spgemm", "models", "benchmarks", "tests", "docs")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".cu")
    }
    pairs = re.findall(r"`([\w.]+)` (?:\(|in )`([\w/]+\.(?:py|cu))`", text)
    assert len(pairs) > 40
    for name, file in pairs:
        of_name = [source for path, source in sources.items() if f"/{path}".endswith(f"/{file}")]
        assert any(re.search(rf"\b{part}\b", source) for source in of_name for part in name.split(".")[-1:]), (
            name,
            file,
        )
    classes = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert len(classes) > 20
    for owner, name in classes:
        bodies = [
            body
            for source in sources.values()
            for body in re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", source, re.DOTALL | re.MULTILINE)
        ]
        assert any(re.search(rf"\b{name}\b", body) for body in bodies), f"{owner}.{name}"
