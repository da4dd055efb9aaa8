"""What the library uses of PyTorch's private parts is there, in the version that is installed."""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jacsparse.patterns import gradients_of
from torch import nn
from torch.autograd.graph import get_gradient_edge

from jacsparse.runtime import torch_versions

ROOT = Path(__file__).parent.parent.parent


def dotted(node: ast.AST) -> str:
    """The names that an expression chains, as in ``torch._C._autograd``; empty where it chains other things."""
    if isinstance(node, ast.Attribute):
        return f"{head}.{node.attr}" if (head := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_of_torch() -> Iterator[str]:
    """The names of PyTorch that the library's modules import or read."""
    for folder in ("jacsparse", "patterns", "spgemm", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)
                elif isinstance(node, ast.Attribute):
                    yield dotted(node)


PRIVATE = sorted({name for name in names_of_torch() if name.startswith("torch.") and "._" in name})
#: In PyTorch built for CUDA alone.
OF_CUDA = {f"torch._C._cuda_{name}" for name in ("getCurrentRawStream", "getDevice", "isCurrentStreamCapturing")}


def test_private_names_are_found() -> None:
    assert {"torch._C._current_graph_task_id", "torch.utils._pytree.tree_leaves", *OF_CUDA} <= set(PRIVATE)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_is_there(name: str) -> None:
    if name in OF_CUDA and not torch.backends.cuda.is_built():
        pytest.skip("this PyTorch is not built for CUDA")
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return


def test_a_process_group_ends_while_its_last_call_is_freed() -> None:
    for _ in range(200):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_gather_object([None], list(range(50)))
        torch_versions.destroy_process_groups()
    assert not dist.is_initialized()


def test_asking_what_compiles_frames_takes_no_references() -> None:
    def ask() -> None:
        torch_versions.compiler_of_frames()
        with torch_versions.without_compiling:
            pass

    importlib.import_module("torch._dynamo")
    ask()
    before = sys.getrefcount(None)
    for _ in range(1000):
        ask()
    assert abs(sys.getrefcount(None) - before) < 100


def test_threads_that_run_uncompiled_leave_the_compiler_as_it_was() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    plus_one = torch.compile(lambda x: x + 1, backend=backend)
    # As two threads do: the one that begins first ends first.
    first, second = torch_versions.without_compiling, torch_versions.without_compiling
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    plus_one(torch.zeros(2))
    assert not compiled
    second.__exit__(None, None, None)
    plus_one(torch.zeros(2))
    assert compiled


def plain_mode() -> torch_versions.DispatchMode:
    return torch_versions.DispatchMode(lambda overload, types, args, kwargs: overload(*args, **kwargs))


def test_modes_in_two_threads_leave_the_compiler_as_it_was() -> None:
    compiled, entered, left = [], threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    def between() -> None:
        with plain_mode():
            entered.set()
            assert left.wait(60)

    with plain_mode():
        thread = threading.Thread(target=between)
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join()
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert compiled


@pytest.mark.parametrize("axes", [2, 3])
def test_a_backward_pass_that_has_a_derivative_is_told_from_one_that_has_none(axes: int) -> None:
    x = torch.randn(1, 1, *[2] * axes, dtype=torch.float64, requires_grad=True)
    grid = torch.rand(1, *[1, 1, 2][-axes:], axes, dtype=torch.float64)

    def twice() -> torch.Tensor:
        y = nn.functional.grid_sample(x, grid, align_corners=False)
        gradient = torch.zeros_like(y, requires_grad=True)
        (pulled,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        return torch.autograd.grad(pulled, gradient, torch.ones_like(pulled))[0]

    if torch_versions.grid_sampler_is_differentiable_twice(axes):
        # The samples of ones, as sampling is linear.
        torch.testing.assert_close(
            twice(), nn.functional.grid_sample(torch.ones_like(x), grid, align_corners=False).detach()
        )
    else:
        with pytest.raises(RuntimeError, match=rf"derivative for aten::grid_sampler_{axes}d_backward is not"):
            twice()


@pytest.mark.parametrize("at", [lambda tensor: tensor, get_gradient_edge], ids=["tensors", "edges"])
def test_gradients_by_the_engine_itself(at: Callable[[torch.Tensor], Any]) -> None:
    x, unread = torch.randn(3, requires_grad=True), torch.ones(1, requires_grad=True)
    hidden = x.sin()
    y, g = hidden.exp() + x, torch.randn(3)
    expected = torch.autograd.grad(y, [hidden, x], g, retain_graph=True)
    *actual, none = gradients_of(at(y), [at(hidden), at(x), at(unread)], g, retain_graph=True)
    assert all(map(torch.equal, actual, expected)) and none is None and x.grad is None
    gradients_of(y, [x], g)
    with pytest.raises(RuntimeError, match="second time"):
        gradients_of(y, [x], g)
