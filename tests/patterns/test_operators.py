"""Every operator's pattern and values against autograd, in float64, on drawn configurations."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Blocks, Convolution, Full, Pattern, Pooling
from jacsparse.patterns.rules import RULES, rule_of
from jacsparse.patterns.structure import Csr
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import jacsparse
from jacsparse.stages import Edge, Record, forward_pass, pull_back_all
from tests.helpers import autograd_jacobian, by_products
from tests.patterns.operators import OPERATORS, Apply, adaptive_pools, average_pools, convolutions, linears, max_pools

seeds = st.integers(0, 2**31 - 1)

#: Of each operator; each is traced once or three times.
DRAWS = 200 if os.environ.get("JACSPARSE_TESTS") == "full" else 5

#: What PyTorch makes of others in some uses, or always.
COMPOSED = {"aten.max", "aten.min", "aten.relu6", "aten.rrelu", "aten.selu", "aten.square"}

#: Rules of operators that others are made of, or that only a GPU has; those that draw are tested by themselves below.
APART = {
    *("aten._native_batch_norm_legit", "aten.cudnn_batch_norm", "aten._fused_rms_norm", "aten.native_dropout"),
    *(f"aten._scaled_dot_product_{how}_attention" for how in ("flash", "efficient", "cudnn")),
    "aten._scaled_dot_product_fused_attention_overrideable",
    "pointwise",
}
#: By which operator's draws the rule of another is reached.
REACHED = {
    "aten._prelu_kernel": "aten.prelu",
    "aten._safe_softmax": "aten.scaled_dot_product_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu": "aten.scaled_dot_product_attention",
    "aten.log_sigmoid_forward": "aten.log_sigmoid",
    "aten.native_batch_norm": "aten.batch_norm",
    "aten.rrelu_with_noise": "aten.rrelu",
}


def fits(module: nn.Module, shape: tuple[int, ...], batch: int = 1) -> bool:
    """Whether PyTorch takes such a batch, and gives it a gradient."""
    try:
        module(torch.zeros((1, *shape), dtype=torch.float64))
        module(torch.zeros((batch, *shape), dtype=torch.float64))
    except (RuntimeError, ValueError, IndexError):
        return False
    pool = getattr(module, "inner", module)
    if not isinstance(pool, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)):
        return True
    # A dilated window may lie wholly in the padding; PyTorch's backward then writes outside its tensor.
    return bool(torch.isfinite(pool(torch.zeros((1, *shape)) - 1)).all())


class Traced(nn.Module):
    """The same operator, in a module that is traced."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def drawn_input(shape: tuple[int, ...], batch: int, seed: int) -> torch.Tensor:
    """Normal numbers, rounded for some seeds, so that ties and zeros occur."""
    x = torch.randn((batch, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.round() if seed % 3 == 0 else x


def pulled_back(records: list[Record], batch: int, outputs: int) -> torch.Tensor:
    """All rows of the Jacobian at each sample by the operators' own backward: ``(outputs, batch, inputs)``."""
    columns = torch.eye(outputs, dtype=torch.float64)[:, :, None]
    actual = pull_back_all(records, columns) if records else columns.expand(-1, -1, batch)
    return actual.permute(1, 2, 0)


def check_values(module: nn.Module, x: torch.Tensor) -> jacsparse.Chain:
    """All that is asked of an operator's Jacobian, and of its transpose, at each sample."""
    jacobian = jacsparse.jacobian(module, x)
    samples = x if len(x) else x.new_zeros((1, *x.shape[1:]))
    chain, (_, records) = forward_pass(module, samples)
    products = chain.products(records, samples)
    pattern = jacsparse.jacobian_pattern(module, x.shape[1:])
    assert jacobian.pattern == pattern and jacobian.batch in (1, len(x))
    rows = pulled_back(records, max(1, len(x)), pattern.shape[0])
    transposed = records[0].transposed_jacobian() if len(records) == 1 else products.T
    inside = torch.from_numpy(pattern.to_scipy().toarray())
    for number, sample in enumerate(x):
        expected = autograd_jacobian(module, sample)
        actual = jacobian.todense(number)
        assert not (expected[~inside] != 0).any(), "an entry is missing from the pattern"
        # Some derivatives are small differences of numbers around one.
        limit = 1e-12 * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
        assert ((actual - expected).abs() <= limit).all()
        assert ((rows[:, number] - expected).abs() <= limit).all()
        of_products = products.todense(number)
        assert ((of_products - expected).abs() <= limit).all()
        difference = (transposed.todense(number) - of_products.T).abs()
        # Blocks are made by one formula, but not in the same order of operations.
        in_blocks = isinstance(pattern.structure, (Blocks, Full))
        assert (difference <= 0.01 * limit).all() if in_blocks else not difference.any()
    for record in records:
        check_records(record)
    return chain


def check_records(record: Record) -> None:
    """The rules of a record's edges read no more than they say."""
    for edge in record.stage.edges:
        check_reads(record, edge)


def check_reads(record: Record, edge: Edge) -> None:
    """A rule reads no elements of a tensor that it does not name: these may have been overwritten since."""
    call, reads = record.call(edge), edge.rule.reads_of(edge.call)
    others = {name: torch.full_like(getattr(call, name), torch.nan) for name in {"input", "output"} - {*reads}}
    values = edge.rule.transposed_values(replace(call, **others), edge.transposed_pattern)
    assert torch.equal(values.nan_to_num(), record.transposed_values(edge).nan_to_num())


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=DRAWS)
@given(data=st.data())
def test_operator_equals_autograd(operator: str, data: st.DataObject) -> None:
    module, shape = data.draw(OPERATORS[operator])
    batch = data.draw(st.sampled_from([1, 1, 3, 0]))
    assume(fits(module, shape, batch))
    traced = Traced(module) if data.draw(st.booleans()) else module
    x = drawn_input(shape, batch, data.draw(seeds))
    names = [edge.call.operator for stage in check_values(traced, x) for edge in stage.edges]
    # What is made of others is seen as those, and what moves nothing is no stage.
    assert operator in names or not names or rule_of(operator) is None or operator in COMPOSED


def test_every_rule_is_drawn() -> None:
    assert set(RULES) - APART - REACHED.keys() <= set(OPERATORS)


@pytest.mark.parametrize("rule", REACHED)
@settings(max_examples=20)
@given(data=st.data())
def test_rules_of_what_operators_are_made_of(rule: str, data: st.DataObject) -> None:
    module, shape = data.draw(OPERATORS[REACHED[rule]])
    assume(fits(module, shape, 3))
    names = {edge.call.operator for stage in jacsparse.chain(module, shape) for edge in stage.edges}
    _SEEN.setdefault(rule, set()).update(names)


_SEEN: dict[str, set[str]] = {}


def test_those_rules_are_reached() -> None:
    for rule in REACHED:
        assert rule not in _SEEN or rule in _SEEN[rule]


@given(convolutions() | linears(), st.floats(0, 1), st.booleans(), seeds)
def test_pruned_weights_leave_no_entry(
    case: tuple[nn.Module, tuple[int, ...]], share: float, mask: bool, seed: int
) -> None:
    module, shape = case
    assume(fits(module, shape))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(module.weight.shape, generator=generator) >= share
    if mask:
        prune.custom_from_mask(module, "weight", chosen)
    else:
        with torch.no_grad():
            module.weight.mul_(chosen)
    pattern = jacsparse.jacobian_pattern(module, shape)
    # All kept weights differ from zero: the pattern is exactly what autograd finds.
    expected = autograd_jacobian(module, drawn_input(shape, 1, 1)[0])
    assert torch.equal(torch.from_numpy(pattern.to_scipy().toarray()), expected != 0)
    assert pattern.nnz == int((expected != 0).sum())
    check_values(module, drawn_input(shape, 2, seed))
    unpruned = jacsparse.jacobian_pattern(module, shape, pruned=False)
    assert unpruned.nnz >= pattern.nnz and unpruned.to_scipy().multiply(pattern.to_scipy()).nnz == pattern.nnz


@given(convolutions() | average_pools().filter(lambda case: case[0].divisor_override is None) | adaptive_pools("Avg"))
def test_pattern_of_linear_operators_is_tight(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = case
    assume(fits(module, shape))
    expected = autograd_jacobian(module, torch.zeros(shape, dtype=torch.float64)) != 0
    assert torch.equal(torch.from_numpy(jacsparse.jacobian_pattern(module, shape).to_scipy().toarray()), expected)


@given(max_pools())
def test_max_pooling_pattern_is_tight(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = case
    assume(fits(module, shape))
    size = int(torch.tensor(shape).prod())
    # One spike for each position: every window that holds it passes its gradient there.
    spikes = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    reached = torch.stack([autograd_jacobian(module, spike)[:, number] for number, spike in enumerate(spikes)], dim=1)
    assert torch.equal(torch.from_numpy(jacsparse.jacobian_pattern(module, shape).to_scipy().toarray()), reached != 0)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout1d, (9, 3)),
        (nn.Dropout2d, (9, 3, 2)),
        (nn.Dropout3d, (9, 3, 2, 1)),
        (nn.AlphaDropout, (9, 3)),
        (nn.FeatureAlphaDropout, (9, 3)),
    ],
)
def test_active_dropout_of_other_kinds(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    (record,) = jacsparse.chain(kind(0.5), shape).run(torch.randn(3, *shape, dtype=torch.float64))
    (expected,) = torch.autograd.grad(record.output.sum(), record.input, retain_graph=True)
    results = record.transposed_jacobian().values
    assert torch.equal(results, expected.reshape(3, -1).T) and len(results.unique()) == 2


def test_active_dropout_has_the_jacobian_of_its_own_draw() -> None:
    module = nn.Dropout(0.5)
    (record,) = jacsparse.chain(module, (40,)).run(torch.zeros(3, 40, dtype=torch.float64))
    (expected,) = torch.autograd.grad(
        record.output, record.input, torch.ones(3, 40, dtype=torch.float64), retain_graph=True
    )
    assert torch.equal(record.transposed_jacobian().values, expected.T)
    assert {0.0, 2.0} == set(expected.flatten().tolist())


def test_a_constant_nan_is_nothing_of_the_input() -> None:
    module = Apply(lambda x: functional.pad(x, (1, 1), value=torch.nan) * 1.0)
    pattern = jacsparse.jacobian_pattern(module, (2,))
    assert pattern.to_scipy().toarray().tolist() == [[False, False], [True, False], [False, True], [False, False]]


def test_no_element_comes_from_beyond_the_input() -> None:
    with pytest.raises(ValueError, match=r"sources\[1\] is 2; columns run from 0 to 1"):
        Csr.from_sources(np.array([0, 2]), 2)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_convolution_of_samples_without_channels(kind: type[nn.Module]) -> None:
    module = kind(1, 2, 3)
    shape = (6,) * len(module.kernel_size)
    with pytest.raises(ValueError, match=rf"^0: an input of shape .* does not fit {kind.__name__}.* 1 channels"):
        jacsparse.jacobian_pattern(nn.Sequential(module), shape)
    # A batch of one is a picture of one channel to it.
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="does not have them along its first axis"):
        jacsparse.jacobian(module, torch.zeros(1, *shape))


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("function", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_pattern_of_running_operators_is_a_triangle(function: Callable[..., torch.Tensor], axis: int) -> None:
    size = (2, 3, 2)[axis - 1]
    module = Apply(lambda x: function(x, axis))
    assert jacsparse.jacobian_pattern(module, (2, 3, 2)).nnz == 12 // size * size * (size + 1) // 2


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("shape", "groups"), [((4, 3), 2), ((3, 1), 3), ((6, 2, 2), 1)])
def test_statistics_of_groups(shape: tuple[int, ...], groups: int, number: int) -> None:
    sizes = (shape[0], int(torch.tensor(shape[1:]).prod()), groups)
    module = Apply(lambda x: torch.native_group_norm(x, None, None, len(x), *sizes, 0.1)[number])
    x = drawn_input(shape, 3, 1)
    jacobian = jacsparse.jacobian(module, x)
    assert jacobian.pattern.nnz == x[0].numel()
    # PyTorch's backward pass takes them for constants, unless the normalised input has a gradient too.
    for column, step in enumerate(1e-6 * torch.eye(x[0].numel(), dtype=x.dtype)):
        step = step.reshape(shape)
        expected = (module(x + step) - module(x - step)) / 2e-6
        for sample in range(len(x)):
            assert (jacobian.todense(sample)[:, column] - expected[sample]).abs().max() <= 1e-8
    transposed = jacsparse.chain(module, shape).run(x)[0].transposed_jacobian()
    assert torch.equal(transposed.todense(1), by_products(module, x).todense(1).T)


def test_sum_over_nothing() -> None:
    check_values(Apply(lambda x: x[:, :0].sum(1, keepdim=True) + x), drawn_input((4,), 2, 1))


def test_relu_passes_a_nan_as_autograd_does() -> None:
    x = torch.tensor([[float("nan"), 1.0, -1.0, 0.0, -0.0, float("inf")]], dtype=torch.float64)
    assert torch.equal(jacsparse.jacobian(nn.ReLU(), x).todense(), autograd_jacobian(nn.ReLU(), x[0]))


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_values_have_the_batch_innermost(batch: int) -> None:
    x = torch.randn(batch, 2, 5, 4)
    for module, shared in ((nn.Conv2d(2, 3, 2), True), (nn.ReLU(), False), (nn.MaxPool2d(2), False)):
        jacobian = jacsparse.jacobian(module, x)
        assert jacobian.values.shape == (jacobian.pattern.nnz, 1 if shared else batch)
        assert jacobian.values.is_contiguous() and jacobian.values.dtype == x.dtype


def test_max_pooling_with_a_window_in_the_padding_alone() -> None:
    module = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, stride=1, padding=1, dilation=3))
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"^1: a window .* lies wholly in the padding"):
        jacsparse.jacobian_pattern(module, (1, 2, 2))


def test_empty_batch() -> None:
    x = torch.zeros(0, 2, 4, 4)
    assert jacsparse.jacobian(nn.ReLU(), x).values.shape == (32, 0)
    assert jacsparse.jacobian(nn.MaxPool2d(2), x).values.shape == (32, 0)
    assert jacsparse.jacobian(nn.Conv2d(2, 2, 1), x).values.shape == (64, 1)


@given(convolutions() | max_pools())
def test_structure_knows_counts_and_digest_without_indices(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = case
    # What is padded on one side more than on the other is padded first.
    assume(fits(module, shape) and module.padding != "same")
    pattern = jacsparse.jacobian_pattern(module, shape)
    assert isinstance(pattern.structure, (Convolution, Pooling))
    for structure, matrix in (
        (pattern.structure, pattern.to_scipy()),
        (pattern.T.structure, pattern.to_scipy().T.tocsr()),
    ):
        assert structure.nnz == matrix.nnz and structure.shape == matrix.shape
        assert structure.row_counts().tolist() == matrix.sum(axis=1, dtype=int).tolist()
        assert structure.column_counts().tolist() == matrix.sum(axis=0, dtype=int).tolist()
        indptr, indices = structure.csr()
        assert Pattern(structure.shape, indptr, indices) == Pattern.from_scipy(matrix)
    assert pattern.digest == jacsparse.jacobian_pattern(module, shape).digest != pattern.T.digest


@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_of_the_input_is_moved(batch: int) -> None:
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.pad(x[:, :0], (1, 2), value=3.0) + x[:, :3]

    check_values(Empty(), torch.randn(batch, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    "put",
    [
        lambda x, index: x.index_put((torch.arange(len(x))[:, None], index), 2 * x[:, 2:]),
        lambda x, index: x.index_copy(1, index, 2 * x[:, 2:]),
        lambda x, index: x.scatter(1, index.expand(len(x), -1), 2 * x[:, 2:]),
    ],
)
def test_several_elements_at_one_place_are_refused(put: Callable[..., torch.Tensor]) -> None:
    class Put(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return put(x, self.index)

    module, x = Put(), torch.randn(3, 4, dtype=torch.float64)
    module.index = torch.tensor([1, 0])
    check_values(module, x)
    module.index = torch.tensor([1, 1])
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="puts several elements at one place"):
        jacsparse.jacobian(module, x)
