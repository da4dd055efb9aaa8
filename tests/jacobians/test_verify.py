"""Verification within a memory limit, and Jacobians that fit no machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from jacsparse.patterns import RULES, Convolution, Diagonal, Full, Pattern
from torch import nn

import jacsparse


class Net(nn.Module):
    """Convolution, normalisation, attention and layers, of two samples or more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.last(torch.cat([mixed, tokens], 1)).softmax(-1)


@pytest.fixture
def net() -> nn.Module:
    return Net().double().eval()


@pytest.mark.parametrize("batch", [1, 3])
def test_large_matrices_are_compared_in_parts(net: nn.Module, batch: int) -> None:
    x = torch.randn(batch, 3, 6, 6, dtype=torch.float64)
    whole = jacsparse.verify(net, x)
    assert all(check.parts == 1 for check in whole.checks)
    limited = jacsparse.verify(net, x, memory_limit=700_000)
    assert [check.shape for check in limited.checks] == [check.shape for check in whole.checks]
    in_parts = {check.operator: check.parts for check in limited.checks if check.parts > 1}
    assert bool(in_parts) == (batch > 1)
    assert not any(check.exact for check in limited.checks if check.parts > 1)
    for parts in in_parts.values():
        assert f"3 random vectors in {parts} parts, difference" in str(limited)


def test_samples_are_parts_too() -> None:
    actual = jacsparse.verify(nn.Tanh(), torch.randn(5, 100), memory_limit=500)
    assert actual.checks[0].parts == 5 and not actual.checks[0].exact and not actual.failed


def test_a_wrong_sample_is_named() -> None:
    before = RULES["pointwise"]

    def wrong(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
        values = (1 - call.output.flatten(1) ** 2).T.contiguous()
        values[777, len(call.input) // 2] += 0.5
        return values

    RULES["aten.tanh"] = before
    try:
        jacsparse.register_rule(
            "aten.tanh", pattern=lambda call: Pattern.of(Diagonal(call.in_size)), values=wrong, replace=True
        )
        for limit in (None, 10_000):
            x = torch.randn(3, 1000, dtype=torch.float64)
            with pytest.raises(jacsparse.VerificationError, match=r"sample \d: ∂y\[777\]/∂x\[777\] is .*, autograd"):
                jacsparse.verify(nn.Tanh(), x, memory_limit=limit)
    finally:
        del RULES["aten.tanh"]


def test_wrong_values_at_zeros_are_found() -> None:
    RULES["aten.exp"] = RULES["pointwise"]
    try:
        jacsparse.register_rule(
            "aten.exp",
            pattern=lambda call: Pattern.of(Diagonal(call.in_size)),
            values=lambda call, pattern: 3 * call.output.flatten(1).T.contiguous(),
            replace=True,
        )
        with pytest.raises(jacsparse.VerificationError, match="is 3, autograd 1"):
            jacsparse.verify(torch.exp, torch.zeros(3, dtype=torch.float64))
    finally:
        del RULES["aten.exp"]


def test_the_matrix_of_a_sample_is_refused_beyond_the_limit() -> None:
    with pytest.raises(ValueError, match=r"^MaxPool2d: the Jacobian of .*, 4 × 16, takes .* a larger memory_limit"):
        jacsparse.verify(nn.MaxPool2d(2), torch.randn(1, 1, 4, 4), memory_limit=10)
    with pytest.raises(ValueError, match="memory_limit is -1"):
        jacsparse.verify(nn.Tanh(), torch.randn(1, 3), memory_limit=-1)


def test_small_modules_are_compared_by_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    assert jacsparse.verify(module, x).checks[-1].jacobian
    right = jacsparse.Chain.products

    def wrong(self: jacsparse.Chain, *arguments: object) -> jacsparse.SparseJacobian:
        actual = right(self, *arguments)
        return jacsparse.SparseJacobian(actual.pattern, actual.values * 2)

    monkeypatch.setattr(jacsparse.Chain, "products", wrong)
    with pytest.raises(jacsparse.VerificationError, match="by products, the gradient of x"):
        jacsparse.verify(module, x)


def test_no_number_is_no_small_difference() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().sqrt()

    with pytest.raises(jacsparse.VerificationError, match=r"difference inf"):
        jacsparse.verify(Root(), torch.tensor([[1.0, -1.0]]))


def test_a_jacobian_that_fits_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacsparse.stages.chains.machine_memory", lambda device: 2**16)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(2, 3, 20, 20)
    with pytest.raises(MemoryError, match=r"^Sequential: its Jacobian, 2,048 × 1,200 with about .* jacsparse\.vjp"):
        jacsparse.jacobian(layers, x)
    with pytest.raises(MemoryError, match=r"^Conv2d: its Jacobian, 2,592 × 1,200 with about 7\.0e\+04 entries"):
        jacsparse.jacobian(layers[0], x)
    # Nearly all of a diagonal is zero.
    assert jacsparse.jacobian(nn.ReLU(), x).pattern.nnz == 1200


PEAK = """
import resource, torch, jacsparse
torch.set_num_threads(1)
jacsparse.verify(torch.nn.Sequential(torch.nn.Linear(3, 3)), torch.randn(1, 3))
module, x = torch.nn.Softmax(-1), torch.randn(80, 2, 1024)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = jacsparse.verify(module, x, memory_limit=2**26)
assert found.checks[0].parts > 2 and not found.failed
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_of_verification_is_bounded() -> None:
    """The matrices of all samples, of 2 million entries each, take 640 MiB."""
    ran = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 300


def test_planning_enumerates_no_large_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one a few of whose many weights happen to be zero."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 2)
    )
    with torch.no_grad():
        module[0].weight[0, 0, 0, 0] = 0
    chain = jacsparse.chain(module, (3, 8, 8))
    structure = chain.stages[0].transposed_pattern.structure
    assert isinstance(structure, Convolution) and structure.mask_bits is not None

    def refuse(self: Convolution) -> None:
        raise AssertionError("a convolution's indices are asked for")

    monkeypatch.setattr(Convolution, "csr", refuse)
    assert str(chain.order)
    assert chain.transposed_pattern == Pattern.of(Full(192, 2))


@pytest.mark.parametrize(
    "call",
    [lambda net: jacsparse.verify(net, torch.randn(3, 5)), lambda net: jacsparse.jacobian_pattern(net, (5,))],
    ids=["verify", "jacobian_pattern"],
)
def test_statistics_are_as_before(call) -> None:
    # Batch normalisation writes to them without a new version of the tensors.
    normalised = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="training mode"):
        call(normalised)
    assert not normalised[0].running_mean.any() and (normalised[0].running_var == 1).all()


class Counting(nn.Module):
    """A product with the number of its calls, which it counts before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x**3 * self.calls


def test_a_module_that_reads_a_buffer_it_has_changed() -> None:
    module = Counting()
    assert not jacsparse.verify(module, torch.rand(2, 3, dtype=torch.float64)).failed
    assert module.calls == 0


@pytest.mark.parametrize(
    "f",
    [lambda x: torch.ones_like(x), lambda x: x[:0], lambda x: torch.cat([x.detach(), x[:0]]), lambda x: x],
    ids=["a constant", "no element", "no path", "the argument"],
)
def test_functions_with_nothing_to_compare(f) -> None:
    assert not jacsparse.verify(f, torch.randn(4, dtype=torch.float64)).failed
