"""What a process sees: light imports, compiled kernels kept, read-only homes, forks and data loaders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.registry import cpu_target
from torch import nn

import jacsparse
from jacsparse.runtime import announced_where_long, kernels, on_this_thread
from jacsparse.runtime import threads as runtime_threads

ROOT = Path(__file__).parent.parent.parent

PRODUCT = """
    import numpy as np, torch, jacsparse
    from jacsparse.spgemm import slots
    rng = np.random.default_rng(0)
    a = jacsparse.jacobian_pattern(torch.nn.Conv2d(2, 3, 3), (2, 8, 8))
    plan = jacsparse.plan_product(a.T, a)
    values = plan.multiply(rng.standard_normal(a.nnz), rng.standard_normal(a.nnz))
"""


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints, with the checkout on its path."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light() -> None:
    loaded = run("""
        import sys, jacsparse, jacsparse.models
        print(*sorted({"torch", "numba", "cupy", "matplotlib", "scipy", "sklearn"} & set(sys.modules)))
        jacsparse.schedule.blelloch(21, 2)
        print("numba" in sys.modules)
        jacsparse.nn.GRU(2, 3)
        print("torch._dynamo" in sys.modules)
        assert set(jacsparse.models.__all__) <= set(dir(jacsparse.models))
        for name in jacsparse.models.__all__:
            getattr(jacsparse.models, name)
        print(*sorted({"sklearn", "matplotlib", "rich"} & set(sys.modules)))
    """)
    assert loaded.split() == ["False", "False"]


@pytest.mark.full
def test_conversions_warn_of_nothing() -> None:
    code = "import jacsparse, torch; print(jacsparse.jacobian(torch.sin, torch.ones(3)).to_torch().layout)"
    assert run(code, PYTHONWARNINGS="error::UserWarning").split() == ["torch.sparse_csr"]


def test_help_loads_no_library() -> None:
    code = """
        import sys
        sys.argv = ["jacsparse", "--help"]
        from jacsparse.__main__ import main
        try:
            main()
        except SystemExit:
            pass
        print("LOADED", *({"torch", "numba", "numpy", "matplotlib", "cupy"} & set(sys.modules)))
    """
    assert run(code).splitlines()[-1] == "LOADED"


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = (
        PRODUCT
        + """
    misses = 0
    for module in (slots, jacsparse.spgemm.symbolic, jacsparse.patterns.convolution):
        for thing in vars(module).values():
            misses += sum(getattr(getattr(thing, "stats", None), "cache_misses", {}).values())
    print(misses)
    """
    )
    environment = {"JACSPARSE_CACHE_DIR": str(tmp_path / "cache")}
    assert int(run(code, **environment)) > 3
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb?")}
    assert int(run(code, **environment)) == 0
    assert files and {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb?")} == files


def _double(first: int, last: int, x: np.ndarray) -> None:
    x[first:last] *= 2


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_kernels_are_compiled_again(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_cache", lambda _: tmp_path)

    def hits() -> int:
        """How often a new process would find the kernel in the cache."""
        kernel, x = kernels.kernel(_double), np.ones(3)
        kernel(0, 2, x)
        assert x.tolist() == [2, 2, 1]
        return sum(kernel.stats.cache_hits.values())

    assert [hits(), hits()] == [0, 1]
    (path,) = tmp_path.rglob(f"*.{suffix}")
    path.write_bytes(path.read_bytes()[:20])
    assert [hits(), hits()] == [0, 1]


def test_compilation_is_announced_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernels, "kernel_cache", lambda _: tmp_path)
    caplog.set_level("INFO", "jacsparse")
    for terminal in (False, True):
        kernels._announce_compilation.cache_clear()
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        for path in tmp_path.rglob("*.nb?"):
            path.unlink()
        for dtype in (np.float64, np.float32):
            kernels.kernel(_double)(0, 2, np.ones(3, dtype))
    (record,) = caplog.records
    assert record.levelname == "WARNING", "it is shown where nobody has set up logging"
    assert record.message.startswith("compiling kernels for this processor, once: later processes find them in ")
    assert capsys.readouterr().err == f"jacsparse: {record.message}\n"
    kernels._announce_compilation.cache_clear()
    kernels.kernel(_double)(0, 2, np.ones(3))
    # Found on disk.
    assert len(caplog.records) == 1


def test_what_takes_long_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jacsparse")
    with announced_where_long("short", seconds=60):
        pass
    with announced_where_long("long", seconds=0.01), announced_where_long("a part of it", seconds=0.01):
        time.sleep(0.2)
    with pytest.raises(ZeroDivisionError), announced_where_long("fails", seconds=60):
        raise ZeroDivisionError
    assert [record.message for record in caplog.records] == ["long"]


def test_preparations_and_plans_tell_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class At(threading.Timer):
        """What is told after a second is told at once."""

        def __init__(self, seconds: float, function: Callable[[str], None], lines: list[str]) -> None:
            super().__init__(seconds, function, lines)
            said.extend(lines)

    said = list[str]()
    monkeypatch.setattr("jacsparse.runtime.messages.threading.Timer", At)
    network = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(5)))
    x = torch.randn(2, 2, 6, 6)
    jacsparse.prepare_jacobian(network, x)
    assert said == ["preparing the Jacobian of Sequential at torch.float32 (2, 2, 6, 6), once: later calls replay it"]
    said.clear()
    scan = jacsparse.nn.Scan(network, schedule="blelloch")
    for _ in range(2):
        scan(x).sum().backward()
    assert said == [
        "planning the products of Sequential by blelloch, which are kept",
        "finding the places of 15,488 multiply-adds, which are kept",
    ]
    pattern = jacsparse.jacobian_pattern(nn.Conv2d(1, 1, 2), (1, 4, 4))
    said.clear()
    jacsparse.plan_product(pattern.T, pattern)
    assert said == ["planning a product of 16 × 9 × 16, which is kept"]


def test_one_thread_alone() -> None:
    seen, before = list[int](), torch.get_num_threads()
    torch.set_num_threads(3)
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    try:
        with pytest.raises(ZeroDivisionError), on_this_thread():
            seen.append(torch.get_num_threads())
            other.start()
            other.join()
            raise ZeroDivisionError
        assert [*seen, torch.get_num_threads()] == [1, 3, 3]
    finally:
        torch.set_num_threads(before)


def test_a_disk_that_is_full() -> None:
    class Full:
        def _load_overload(self, *_: object) -> None:
            return None

        def save_overload(self, *_: object) -> None:
            raise OSError("no space left on device")

        def flush(self) -> None:
            raise AssertionError

    cache = Full()
    kernels._forgive(cache)
    assert cache.load_overload((), cpu_target.target_context) is cache.save_overload() is None


def test_an_edited_kernel_gets_a_fresh_cache(tmp_path: Path) -> None:
    for folder in ("jacsparse", "patterns", "spgemm"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        sys.path.remove("") if "" in sys.path else None
        from jacsparse.runtime import __file__ as home, kernel_cache
        assert home.startswith({str(tmp_path)!r}), home
        print(*(kernel_cache(f"jacsparse.{{name}}") for name in ("patterns", "spgemm", "recurrence")))
    """
    environment = {"JACSPARSE_CACHE_DIR": str(tmp_path / "cache")}
    before = run(code, **environment).split()
    with (tmp_path / "spgemm" / "lanes.py").open("a", encoding="utf-8") as file:
        file.write("\n# edited\n")
    after = run(code, **environment).split()
    assert [one != other for one, other in zip(before, after, strict=True)] == [False, True, False]


@pytest.mark.parametrize("variable", ["JACSPARSE_CACHE_DIR", pytest.param("HOME", marks=pytest.mark.full)])
def test_nowhere_to_keep_kernels(variable: str, tmp_path: Path) -> None:
    """A path under a file cannot be made, even by root."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    environment = {variable: str(tmp_path / "file" / "home"), "XDG_CACHE_HOME": ""}
    code = (
        PRODUCT
        + """
    from jacsparse.runtime import kernel_cache
    print(kernel_cache("jacsparse.spgemm"), values.shape == (plan.pattern.nnz,))
    """
    )
    if variable == "HOME":
        environment["JACSPARSE_CACHE_DIR"] = ""
    assert run(code, **environment).split() == ["None", "True"]


@pytest.mark.parametrize("kind", ["openmp", "plain"])
def test_an_error_in_a_helping_thread_is_raised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "plain":
        monkeypatch.setattr(runtime_threads, "_openmp", lambda: None)
    elif runtime_threads._openmp() is None:
        pytest.skip("PyTorch's OpenMP runtime has no GOMP_parallel")
    together, names = threading.Barrier(2, timeout=10), []

    def task() -> None:
        together.wait()
        names.append(threading.get_ident())
        if threading.get_ident() != main:
            raise ValueError("of a helper")

    main = threading.get_ident()
    with pytest.raises(ValueError, match="of a helper"):
        runtime_threads._on_each(2, task)
    assert len(set(names)) == 2


def test_children_compute() -> None:
    """The workers of a data loader, and a child that is forked where kernels run on several threads."""
    code = (
        PRODUCT
        + """
    import os
    from torch.utils.data import DataLoader, Dataset

    class Products(Dataset):
        def __len__(self): return 8
        def __getitem__(self, number):
            x = np.random.default_rng(number).standard_normal(a.nnz)
            return plan.multiply(x, x)

    alone = torch.stack([torch.from_numpy(Products()[n]) for n in range(8)])
    loaded = torch.cat(list(DataLoader(Products(), batch_size=4, num_workers=2)))
    print(torch.equal(alone, loaded))

    torch.set_num_threads(2)
    from jacsparse.runtime import threads
    threads.SERIAL_WORK = 0
    big = jacsparse.jacobian_pattern(torch.nn.Conv2d(4, 8, 3), (4, 16, 16))
    large = jacsparse.plan_product(big.T, big)
    x = rng.standard_normal(big.nnz)
    expected = large.multiply(x, x)
    child = os.fork()
    if child == 0:
        same = np.array_equal(large.multiply(x, x), expected)
        os._exit(0 if same else 1)
    print(os.waitpid(child, 0)[1])
    """
    )
    assert run(code).split() == ["True", "0"]
