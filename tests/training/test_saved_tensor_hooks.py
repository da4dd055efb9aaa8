"""Leapfrogging, scans and solvers under hooks of saved tensors, as those of a checkpoint, against the module itself."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jacsparse.patterns import UnsupportedOperatorError
from torch import nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import jacsparse
from jacsparse.tracing import check_hooks_are_told, saves_objects, without_saving_hooks
from tests.helpers import close, names_hooks

Runner = Callable[[nn.Module], nn.Module]
Call = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]

RUNNERS: dict[str, Runner] = {
    **{
        f"{count} threads": lambda module, count=count: jacsparse.nn.Leapfrog(module, threads=count)
        for count in (1, 2, 3, 4)
    },
    "linear": jacsparse.nn.Scan,
    "blelloch": lambda module: jacsparse.nn.Scan(module, schedule="blelloch"),
    "substitution": jacsparse.nn.Solve,
    "cyclic_reduction": lambda module: jacsparse.nn.Solve(module, method="cyclic_reduction"),
}
#: One of each kind; the others are alike, and take as long.
SOME_RUNNERS = [
    pytest.param(name, marks=[] if name in ("2 threads", "linear", "blelloch") else pytest.mark.full)
    for name in RUNNERS
]
#: Those whose backward pass is one pass of autograd where hooks are in force within the module.
ONE_PASS = [name for name in RUNNERS if name == "linear" or "threads" in name]


class Counted(nn.Module):
    """Counts the runs of a part."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.part, self.runs = nn.Sequential(*parts), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.part(x)


class Around(nn.Module):
    """A part that is called in some way, as by a checkpoint."""

    def __init__(self, call: Call, *parts: nn.Module) -> None:
        super().__init__()
        self.call, self.part = call, nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.part, x)


def checkpointed(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, x, use_reentrant=False)


def to_the_end(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpointed(function, x)


def nested(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpointed(lambda y: checkpointed(function, 1.5 * y).sin(), x)


def on_cpu(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return function(x)


def hookless(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with disable_saved_tensors_hooks("no hooks here"):
        return function(x)


def layer(dropout: Callable[[float], nn.Module] = nn.Dropout) -> Counted:
    return Counted(nn.Linear(6, 6), dropout(0.4), nn.SiLU())


class RandomSlopes(nn.Module):
    """An operator that draws numbers and is not made of others."""

    def __init__(self, share: float) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(x, training=True)


def plain() -> nn.Module:
    return nn.Sequential(*[layer() for _ in range(5)])


def within() -> nn.Module:
    return nn.Sequential(layer(), Around(checkpointed, layer(), layer()), Around(checkpointed, layer(), layer()))


#: A module, and how it is called.
CASES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "around": (plain, checkpointed),
    "within": (within, lambda function, x: function(x)),
    "around and within": (within, checkpointed),
    "nested around": (plain, nested),
    "nested within": (
        lambda: nn.Sequential(layer(), Around(nested, layer(), layer()), layer()),
        lambda function, x: function(x),
    ),
    "to the end": (plain, to_the_end),
    "to the end within": (lambda: nn.Sequential(layer(), Around(to_the_end, layer())), lambda function, x: function(x)),
    "on the CPU": (plain, on_cpu),
    "on the CPU within": (lambda: nn.Sequential(layer(), Around(on_cpu, layer())), lambda function, x: function(x)),
    "without hooks": (plain, hookless),
    "weights in two parts": (
        lambda: nn.Sequential(*[parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(3)], layer()),
        checkpointed,
    ),
    "other dropouts": (lambda: nn.Sequential(layer(nn.AlphaDropout), layer(nn.FeatureAlphaDropout)), checkpointed),
    "random slopes": (
        lambda: nn.Sequential(Around(checkpointed, layer(), layer(RandomSlopes)), layer(RandomSlopes)),
        lambda function, x: function(x),
    ),
    "in place": (
        lambda: nn.Sequential(layer(lambda p: nn.Dropout(p, inplace=True)), nn.Linear(6, 6), nn.ReLU(inplace=True)),
        checkpointed,
    ),
}


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def once(call: Call, run: nn.Module, x: torch.Tensor) -> None:
    loss(call(run, x)).backward()


def backward_twice(call: Call, run: nn.Module, x: torch.Tensor) -> None:
    y = loss(call(run, x))
    y.backward(retain_graph=True)
    y.backward()


def forward_twice(call: Call, run: nn.Module, x: torch.Tensor) -> None:
    (loss(call(run, x)) + loss(call(run, 2 * x))).backward()


def backward_in_a_checkpoint(call: Call, run: nn.Module, x: torch.Tensor) -> None:
    def step(y: torch.Tensor) -> torch.Tensor:
        z = call(run, y)
        (gradient,) = torch.autograd.grad(loss(z), y, retain_graph=True)
        return z + gradient

    once(checkpointed, step, x)  # type: ignore[arg-type]


def backward_without_hooks(call: Call, run: nn.Module, x: torch.Tensor) -> None:
    y = loss(call(run, x))
    with disable_saved_tensors_hooks("no hooks here"):
        y.backward()


def runs_of(module: nn.Module) -> list[int]:
    """How often each part has run since the last call."""
    parts = [part for part in module.modules() if isinstance(part, Counted)]
    runs = [part.runs for part in parts]
    for part in parts:
        part.runs = 0
    return runs


def results(
    seed: int, module: nn.Module, run: nn.Module, call: Call, passes: Callable[[Call, nn.Module, torch.Tensor], None]
) -> tuple[list[torch.Tensor | None], torch.Tensor, list[int]]:
    """All gradients, the state of the generator afterwards, and the runs of each part."""
    module.zero_grad()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    torch.manual_seed(seed)
    passes(call, run, x)
    return [x.grad, *(parameter.grad for parameter in module.parameters())], torch.get_rng_state(), runs_of(module)


def check(
    runner: str, case: str, seed: int, passes: Callable[[Call, nn.Module, torch.Tensor], None] = once
) -> tuple[list[int], list[int]]:
    """Gradients and random numbers are those of the module itself; the runs of each part, of both."""
    build, call = CASES[case]
    torch.manual_seed(seed)
    module = build()
    expected, state, runs = results(seed, module, module, call, passes)
    ours, state_after, our_runs = results(seed, module, RUNNERS[runner](module), call, passes)
    for gradient, reference in zip(ours, expected, strict=True):
        assert gradient is not None and reference is not None
        close(gradient, reference, 1e-4)
    assert torch.equal(state, state_after)
    return our_runs, runs


@pytest.mark.parametrize("seeds", [2, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_random_numbers(case: str, runner: str, seeds: int) -> None:
    for seed in range(seeds):
        check(runner, case, seed)


@pytest.mark.parametrize(
    ("case", "passes"),
    [
        *itertools.product(
            ("around", "around and within", "on the CPU", "weights in two parts"),
            (backward_twice, forward_twice, backward_in_a_checkpoint),
        ),
        # A checkpoint needs hooks to run anew.
        ("on the CPU", backward_without_hooks),
        ("without hooks", backward_without_hooks),
    ],
)
@pytest.mark.parametrize("runner", ["1 threads", "3 threads", "linear", "blelloch", "substitution"])
def test_several_passes(case: str, runner: str, passes: Callable[[Call, nn.Module, torch.Tensor], None]) -> None:
    check(runner, case, 0, passes)


@names_hooks
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_checkpoint_around_runs_its_part_anew_once(runner: str) -> None:
    # PyTorch stops where nothing is left to save.
    assert check(runner, "around", 0) == ([2] * 5, [2] * 5)
    assert check(runner, "around", 0, backward_twice)[0] == [3] * 5


@pytest.mark.parametrize("runner", ONE_PASS)
def test_a_checkpoint_within_runs_its_part_anew_once(runner: str) -> None:
    ours, expected = check(runner, "within", 0)
    assert ours == expected == [1, 2, 2, 2, 2]


@names_hooks
@pytest.mark.parametrize("runner", SOME_RUNNERS)
def test_a_checkpoint_lets_go_of_the_run(runner: str) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    module = plain()
    module[2].register_forward_hook(lambda _, args, output: alive.append(weakref.ref(output)))
    y = checkpointed(RUNNERS[runner](module), torch.randn(3, 6, requires_grad=True))
    gc.collect()
    assert [reference() for reference in alive] == [None]
    loss(y).backward()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@names_hooks
@pytest.mark.parametrize("call", [checkpointed, hookless, lambda function, x: function(x)])
def test_threads_go_back_through_the_run_of_a_checkpoint(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    original = jacsparse.training.leapfrog._Task.run

    def noted(task: Any) -> None:
        names.append(threading.current_thread().name)
        original(task)

    monkeypatch.setattr(jacsparse.training.leapfrog._Task, "run", noted)
    loss(call(jacsparse.nn.Leapfrog(plain(), threads=2), torch.randn(3, 6))).backward()
    assert len(names) == 2 and all(name.startswith("leapfrog") for name in names)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_hooks_are_called_once_for_each_tensor_and_by_the_caller(threads: int) -> None:
    def hooked(run: nn.Module) -> tuple[list[Any], int, set[int]]:
        packed, unpacked, callers = [], [], set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            # A hook may round what is saved: gradients are then those of the rounded tensors.
            return tensor.detach().bfloat16() if tensor.is_floating_point() else tensor

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            unpacked.append(tensor)
            callers.add(threading.get_ident())
            return tensor.float() if tensor.is_floating_point() else tensor

        with saved_tensors_hooks(pack, unpack):
            y = run(torch.linspace(-1, 1, 18, requires_grad=True).reshape(3, 6))
        y.sum().backward()
        return [parameter.grad for parameter in run.parameters()], len(unpacked), callers

    torch.manual_seed(0)
    module = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(6, 6), nn.SiLU())])
    expected, count, _ = hooked(module)
    module.zero_grad()
    ours, our_count, callers = hooked(jacsparse.nn.Leapfrog(module, threads=threads))
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
    assert our_count == count and callers == {threading.get_ident()}


@pytest.mark.parametrize("place", range(0, 8, 2))
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_weight_changed_where_that_is_allowed(runner: str, place: int) -> None:
    torch.manual_seed(place)
    module = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(6, 6), nn.Tanh())])
    x, start = torch.randn(3, 6), [parameter.detach().clone() for parameter in module.parameters()]

    def changed(run: nn.Module) -> list[torch.Tensor | None]:
        leaf = x.clone().requires_grad_()
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), start, strict=True):
                parameter.copy_(value)
        module.zero_grad()
        with allow_mutation_on_saved_tensors():
            y = loss(run(leaf))
            with torch.no_grad():
                module[place].weight.mul_(2)
            y.backward()
        return [leaf.grad, *(parameter.grad for parameter in module.parameters())]

    expected = changed(module)
    # Products of Jacobians read the weights themselves. Those of a scan are of the second and the third matrix alone.
    refused = runner not in ONE_PASS and (runner != "blelloch" or place in (2, 4))
    with pytest.raises(RuntimeError, match="changed in place") if refused else contextlib.nullcontext():
        for gradient, reference in zip(changed(RUNNERS[runner](module)), expected, strict=True):
            assert gradient is not None and reference is not None
            close(gradient, reference, 1e-5)


@pytest.mark.parametrize("runner", SOME_RUNNERS)
def test_without_hooks_the_run_ends_with_the_backward_pass(runner: str) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    module = plain()
    module[2].register_forward_hook(lambda _, args, output: alive.append(weakref.ref(output)))
    for call in (hookless, on_cpu, lambda function, x: function(x)):
        alive.clear()
        y = loss(call(RUNNERS[runner](module), torch.randn(3, 6)))
        assert alive[0]() is not None
        y.backward()
        gc.collect()
        assert alive[0]() is None
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


def test_leapfrog_backward_and_checkpoints() -> None:
    torch.manual_seed(0)
    module, x = within().eval(), torch.randn(3, 6)
    leaf = x.clone().requires_grad_()
    module(leaf).backward(torch.ones(3, 6))
    expected = [leaf.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    ours = [jacsparse.leapfrog_backward(module, x, torch.ones(3, 6), threads=3)]
    ours += [parameter.grad for parameter in module.parameters()]
    for gradient, reference in zip(ours, expected, strict=True):
        assert gradient is not None and reference is not None
        close(gradient, reference, 1e-5)


def forget_names_of_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    any_hooks = importlib.import_module("jacsparse.tracing.autograd_nodes")._any_hooks
    for file in ("autograd_nodes", "capture"):
        monkeypatch.setattr(f"jacsparse.tracing.{file}.innermost_hooks", any_hooks)


@pytest.mark.parametrize("runner", ["1 threads", "3 threads", "linear", "blelloch", "substitution"])
@pytest.mark.parametrize("case", ["around", "within", "around and within", "on the CPU", "without hooks"])
def test_without_the_names_of_hooks(case: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch before 2.8, which does not tell whose the innermost hooks are."""
    forget_names_of_hooks(monkeypatch)
    for seed in range(3):
        check(runner, case, seed)


def test_across_ranks_hooks_are_to_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_names_of_hooks(monkeypatch)
    check_hooks_are_told("nn.Scan across ranks")
    with (
        save_on_cpu(),
        pytest.raises(UnsupportedOperatorError, match=r"nn\.Scan across ranks within hooks .* PyTorch 2\.8"),
    ):
        check_hooks_are_told("nn.Scan across ranks")


@names_hooks
def test_which_hooks_give_back_the_object() -> None:
    assert saves_objects()
    with save_on_cpu():
        assert not saves_objects()
        with without_saving_hooks():
            assert saves_objects()
    with disable_saved_tensors_hooks("no hooks here"), without_saving_hooks():
        assert saves_objects()
    states: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    checkpointed(lambda x: (states.append(saves_objects()), x.exp())[1], x).sum().backward()
    assert states == [True, True]
