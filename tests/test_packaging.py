"""The ways to install: each makes the same package, and none shadows a user's own modules."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from jacsparse._version import __version__

ROOT = Path(__file__).parent.parent
#: What tests, benchmarks and pages need beside the package.
BESIDE = (
    "benchmarks", "docs", "examples", "tests", ".ci", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt",
    "MANIFEST.in",
)  # fmt: skip
SOURCES = (
    "jacsparse",
    "patterns",
    "spgemm",
    "models",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
#: Installs links to files: type checkers find those, but not the import hook of another editable install.
STRICT = ("--config-settings", "editable_mode=strict")

USE = """
    import torch, jacsparse, jacsparse.models
    from jacsparse import patterns, spgemm
    assert jacsparse.jacobian_pattern(torch.nn.ReLU(), (3,)).nnz == 3
    assert jacsparse.count_flop(jacsparse.models.build("lenet5"), (3, 32, 32), schedule="linear").total > 0
    for name in ("patterns", "spgemm", "models"):
        try:
            __import__(name)
        except ImportError:
            continue
        raise AssertionError(f"a bare {name} can be imported")
    print(jacsparse.__file__)
"""


def checkout(folder: Path, names: tuple[str, ...] = SOURCES) -> Path:
    """A copy of the sources, as a fresh clone has them."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, copy / name)
    return copy


def environment(folder: Path) -> Path:
    """A virtual environment that sees this one's dependencies, but not its jacsparse; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout.strip()
    # A path of a .pth file has its packages seen, but not its own .pth files: not an editable jacsparse there.
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def pip(python: Path, *arguments: object) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    subprocess.run([*command, "--no-deps", "--no-build-isolation", *map(str, arguments)], check=True)


def use(python: Path | str, folder: Path) -> str:
    """Run `USE` in `folder`; where jacsparse came from."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", textwrap.dedent(USE)]
    result = subprocess.run(command, cwd=folder, env=clean, capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "way", ["wheel", *(pytest.param(way, marks=pytest.mark.full) for way in ("editable", "strict editable"))]
)
def test_installed(way: str, tmp_path: Path) -> None:
    source, python = checkout(tmp_path), environment(tmp_path)
    options = {"editable": ["--editable"], "strict editable": [*STRICT, "--editable"]}
    pip(python, *options.get(way, []), source)
    if way == "wheel":
        shutil.rmtree(source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    home = use(python, elsewhere)
    assert ("checkout" in home) == (way != "wheel")
    command = [str(python.parent / "jacsparse"), "--version"]
    version = subprocess.run(command, cwd=elsewhere, capture_output=True, encoding="utf-8", check=True).stdout
    assert version.strip() == __version__


def test_plain_checkout(tmp_path: Path) -> None:
    source = checkout(tmp_path)
    code = USE.partition("    for name in")[0] + "    print(jacsparse.__file__)"
    result = subprocess.run(
        [str(environment(tmp_path)), "-c", textwrap.dedent(code)],
        cwd=source,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).parent == source / "jacsparse"


def test_what_is_imported_is_declared() -> None:
    """All packages of others that modules of the library import when they are imported themselves, or later."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    declared = metadata["options"]["install_requires"] + "".join(metadata["options.extras_require"].values())
    names = {name.lower() for name in re.findall(r"^\s*([A-Za-z][\w-]*)", declared, re.MULTILINE)}
    # Distributions whose packages have other names; and what declared ones bring and show in their own interface.
    known = {"sklearn": "scikit-learn", "cupy": "cupy-cuda12x", "cupyx": "cupy-cuda12x", "llvmlite": "numba"}
    known |= {"mpl_toolkits": "matplotlib"}
    imported = set()
    for folder in ("jacsparse", "patterns", "spgemm", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    imported.add(node.module.partition(".")[0])
    others = imported - sys.stdlib_module_names - {"jacsparse"}
    assert {known.get(name, name) for name in others} <= names and "matplotlib" in others


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a source distribution and a wheel."""
    folder = tmp_path_factory.mktemp("distributions")
    source, built = checkout(folder, (*SOURCES, *BESIDE)), folder / "dist"
    code = f"from setuptools import build_meta as b; b.build_sdist({str(built)!r}); b.build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    yield built


def test_a_source_distribution_holds_what_tests_need(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    parts = [ROOT / name for name in (*SOURCES, *BESIDE)]
    paths = [path for part in parts for path in ([part] if part.is_file() else part.rglob("*")) if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts}
    assert {name for name in expected if not name.endswith(".pyc")} <= names


def test_a_package_index_takes_both(distributions: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions.iterdir())]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 0 and result.stdout.count("PASSED") == 2, result.stdout + result.stderr


@pytest.mark.parametrize("address", ["", "https://example.org/jacsparse/blob/main"])
def test_the_page_of_a_package_index(address: str) -> None:
    """The README renders as an index shows it, with its table and its blocks of code; no link on it is relative."""
    from readme_renderer import markdown

    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    environment = {**os.environ, "JACSPARSE_ADDRESS": address, "PYTHONIOENCODING": "utf-8"}
    text = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=True).stdout
    page = markdown.render(text)
    assert page is not None
    assert page.count("<table") == 1 and page.count("<pre") >= 6 and "```" not in page
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert links and all(link.startswith(("https://", "#")) for link in links)
    assert ("<img" in page) == bool(address) and "[Which one?]" not in page and "Which one?" in page


USER = """
    import torch

    import jacsparse
    from jacsparse import patterns
    from jacsparse.schedule import blelloch

    x = torch.ones(2, 3, 3)
    J = jacsparse.jacobian(torch.sin, x)
    structure: patterns.Structure = J.pattern.structure
    layer = jacsparse.nn.GRU(3, 4)
    output, last = layer.forward(x)
    report: jacsparse.FlopReport = jacsparse.count_flop(torch.nn.ReLU(), (3,), schedule=blelloch(1))
    solution: torch.Tensor = J.vjp("no tensor")
"""


@pytest.mark.full  # mypy reads all of PyTorch: twenty seconds each
@pytest.mark.parametrize("way", ["wheel", "strict editable", "links"])
def test_types(way: str, distributions: Path, tmp_path: Path) -> None:
    """Strict mypy finds the package's types, and the script's one error."""
    python = environment(tmp_path)
    packages = Path(next(python.parent.parent.glob("lib/python*/site-packages")))
    if way == "wheel":
        pip(python, *distributions.glob("*.whl"))
    elif way == "strict editable":
        pip(python, *STRICT, "--editable", checkout(tmp_path))
    else:
        links = tmp_path / "links" / "jacsparse"
        links.mkdir(parents=True)
        folders = [ROOT / name for name in ("patterns", "spgemm", "models")]
        for path in [*(ROOT / "jacsparse").iterdir(), *folders]:
            (links / path.name).symlink_to(path)
        (packages / "links.pth").write_text(f"{links.parent}\n", encoding="utf-8")
    (tmp_path / "user.py").write_text(textwrap.dedent(USER), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "user.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert re.findall(r"error: .*", result.stdout) == [
        'error: Argument 1 to "vjp" of "SparseJacobian" has incompatible type "str"; expected "Tensor"  [arg-type]'
    ], result.stdout
