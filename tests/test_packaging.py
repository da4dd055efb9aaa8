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
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("jacsparse", "patterns", "spgemm", "models", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

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


def checkout(folder: Path) -> Path:
    """A copy of the sources, as a fresh clone has them."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in SOURCES:
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


@pytest.mark.parametrize("way", ["editable", "strict editable", "wheel"])
def test_installed(way: str, tmp_path: Path) -> None:
    source, python = checkout(tmp_path), environment(tmp_path)
    options = {
        "editable": ["--editable"],
        "strict editable": ["--config-settings", "editable_mode=strict", "--editable"],
    }
    pip(python, *options.get(way, []), source)
    if way == "wheel":
        shutil.rmtree(source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    home = use(python, elsewhere)
    assert ("checkout" in home) == (way != "wheel")
    command = [str(python.parent / "jacsparse"), "--version"]
    version = subprocess.run(command, cwd=elsewhere, capture_output=True, encoding="utf-8", check=True).stdout
    assert version.strip() == "0.1.0"


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
