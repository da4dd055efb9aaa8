"""Modules with a forward of their own: what is traced, how it is cut, and what is refused and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from jacsparse.patterns import RULES, Diagonal, Pattern
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

import jacsparse
from jacsparse import UnsupportedOperatorError
from tests.helpers import Straight, autograd_jacobian, by_products


class Net(nn.Module):
    """A forward that is given as a function, with layers at hand."""

    def __init__(self, function: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def check(module: nn.Module, *shape: int, batch: int = 2, schedule: str = "blelloch") -> jacsparse.SparseJacobian:
    """Jacobian, gradients and the module's own verification, all of them right."""
    torch.manual_seed(1)
    x = torch.randn(batch, *shape, dtype=torch.float64)
    actual, products = jacsparse.jacobian(module, x), by_products(module, x)
    for number, sample in enumerate(x):
        expected = autograd_jacobian(module, sample)
        for each in (actual, products):
            assert torch.allclose(each.todense(number), expected, rtol=1e-10, atol=1e-12)
        inside = torch.from_numpy(actual.pattern.to_scipy().toarray())
        assert not (expected[~inside] != 0).any()
    assert actual.pattern == jacsparse.jacobian_pattern(module, shape)
    assert not jacsparse.verify(module, x).failed
    gradients = []
    for run in (module, jacsparse.nn.Scan(module, schedule=schedule)):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in module.parameters())])
    for ours, expected in zip(*reversed(gradients), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-11)
    return actual


def linear(into: int = 4, out: int = 4) -> nn.Linear:
    return nn.Linear(into, out)


# What is cut where.


def test_a_residual_region_is_one_stage() -> None:
    module = Net(
        lambda self, x: torch.relu(self.c(torch.relu(self.a(x)))) + x, a=nn.Conv2d(2, 2, 3, padding=1),
        c=nn.Conv2d(2, 2, 1),
    )  # fmt: skip
    stages = jacsparse.chain(module, (2, 4, 4))
    assert [stage.name for stage in stages] == ["5 operators"]
    # The union over both paths: the convolution's taps hold the diagonal.
    assert jacsparse.jacobian_pattern(module.a, (2, 4, 4)) == stages.stages[0].pattern
    check(module, 2, 4, 4)


def test_stages_have_paths_and_reshapes_are_none() -> None:
    module = Net(
        lambda self, x: self.last(torch.relu(self.first(x).unsqueeze(1)).flatten(1)).view(-1, 2, 2), first=linear(),
        last=linear(),
    )  # fmt: skip
    stages = jacsparse.chain(module, (4,))
    assert [(stage.path, stage.name) for stage in stages] == [
        ("first", "aten.addmm"), ("Net", "aten.relu"), ("last", "aten.addmm"),
    ]  # fmt: skip
    assert (stages.in_shape, stages.out_shape) == ((4,), (2, 2))
    check(module, 4)


def test_layers_that_do_the_same_are_looked_at_once_and_have_paths_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule, count = RULES["aten.roll"], itertools.count()
    located = type(rule).located  # type: ignore[attr-defined]
    monkeypatch.setattr(type(rule), "located", lambda *args: (next(count), located(*args))[1])
    net = nn.Sequential(*[part for _ in range(3) for part in (Rolled(1), nn.Linear(6, 6, dtype=torch.float64))])
    net.append(Rolled(2))
    stages = jacsparse.chain(net, (6,)).stages
    assert next(count) == 2 and [stage.path for stage in stages] == list("0123456")
    assert [edge.call.path for stage in stages for edge in stage.edges] == list("0123456")
    jacsparse.verify(net, torch.randn(3, 6, dtype=torch.float64))


class Rolled(nn.Module):
    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(self.places, 1)


def test_traced_modules_inside_a_sequential() -> None:
    inner = Net(lambda self, x: x * torch.sigmoid(self.gate(x)), gate=linear(3, 3))
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), inner, nn.Unflatten(1, (3, 1)), inner_of(), nn.Flatten())
    paths = [stage.path for stage in jacsparse.chain(module.double(), (2, 3))]
    # What only reshapes runs with what follows.
    assert paths == ["1", "2", "4"]
    check(module, 2, 3)


def inner_of() -> nn.Module:
    return Net(lambda self, x: x.flip(1))


def test_dense_and_inception_regions() -> None:
    def dense(self: Net, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in (self.a, self.b):
            features.append(torch.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, 1)

    check(Net(dense, a=nn.Conv2d(2, 2, 3, padding=1), b=nn.Conv2d(4, 1, 1)), 2, 3, 3)
    inception = Net(
        lambda self, x: torch.cat([self.a(x), self.b(functional.max_pool2d(x, 3, 1, 1)), x[:, :1].abs()], 1),
        a=nn.Conv2d(2, 1, 3, padding=1), b=nn.Conv2d(2, 1, 1),
    )  # fmt: skip
    check(inception, 2, 4, 4)


def test_samples_that_are_batches_to_their_operators() -> None:
    def over_time(self: Net, x: torch.Tensor) -> torch.Tensor:
        # (batch, time, channels, height, width): each frame by itself, in either order of the two.
        frames = self.conv(x.flatten(0, 1))
        minor = functional.max_pool2d(x.transpose(0, 1).flatten(0, 1), 2)
        return frames.unflatten(0, x.shape[:2]).sum(1) + minor.unflatten(0, (3, -1)).mean(0).repeat(1, 1, 2, 2)

    check(Net(over_time, conv=nn.Conv2d(1, 1, 3, padding=1)), 3, 1, 4, 4)


def test_pruned_weights_inside_a_traced_module() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear())
    prune.custom_from_mask(module.a, "weight", torch.eye(4).flip(0))
    actual = check(module, 4)
    assert actual.pattern.nnz == 8
    with torch.no_grad():
        module.a.weight_orig.mul_(2)
    check(module, 4)
    assert jacsparse.jacobian_pattern(module, (4,), pruned=False).nnz == 16


def test_weights_that_are_zero_by_chance_may_move() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear())
    with torch.no_grad():
        module.a.weight.zero_()
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    scan(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with torch.no_grad():
        module.a.weight.fill_(1)
    x.grad = None
    scan(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 5))


def test_parametrised_and_shared_weights() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4).double())
    check(Net(lambda self, x: torch.tanh(self.a(x)) + x, a=layer), 4)
    tied = linear()
    module = Net(lambda self, x: self.b(torch.tanh(self.a(x))) + x, a=tied, b=tied)
    assert module.a is module.b
    check(module, 4)
    twice = Net(lambda self, x: self.a(torch.tanh(self.a(torch.tanh(self.a(x))))), a=linear())
    assert len(jacsparse.chain(twice, (4,))) == 5
    check(twice, 4)


def test_frozen_parameters_get_no_gradient() -> None:
    module = Net(lambda self, x: self.b(torch.relu(self.a(x)) + x), a=linear(), b=linear())
    module.a.requires_grad_(False)
    jacsparse.nn.Scan(module, schedule="linear")(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert module.a.weight.grad is None and module.b.weight.grad is not None


# What passes no derivative.


def test_what_has_no_derivative() -> None:
    actual = check(Net(lambda self, x: x * (x > 0) + x.round()), 4)
    assert isinstance(actual.pattern.structure, Diagonal)
    nothing = Net(lambda self, x: torch.sign(x) * 2.0)
    assert jacsparse.jacobian_pattern(nothing, (4,)).nnz == 0
    assert jacsparse.jacobian(nothing, torch.randn(2, 4)).todense(0).abs().sum() == 0
    detached = Net(lambda self, x: self.a(x.detach()) + x, a=linear())
    assert jacsparse.jacobian_pattern(detached, (4,)).nnz == 4
    check(detached, 4)


def test_embedding_passes_no_gradient_to_its_input() -> None:
    module = Net(lambda self, x: x + self.table(x.argmax(1)), table=nn.Embedding(4, 4))
    assert jacsparse.jacobian_pattern(module, (4,)).nnz == 4
    check(module, 4)


def test_positions_are_constants() -> None:
    module = Net(lambda self, x: torch.relu(x + self.table(torch.arange(3))), table=nn.Embedding(3, 4))
    check(module, 3, 4)


# In-place operators and aliases.


def test_in_place_operators() -> None:
    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        view = y[:, :2]
        view.mul_(2)
        y += x
        y[:, 3] = y[:, 0].clone() * 2
        return torch.relu_(y)

    module = Net(forward, a=linear())
    check(module, 4)


def test_an_input_that_the_model_overwrites_stays_what_it_is() -> None:
    module = Net(lambda self, x: torch.relu_(x).mul_(3))
    x = torch.randn(2, 4, dtype=torch.float64)
    before = x.clone()
    jacobian = jacsparse.jacobian(module, x)
    assert torch.equal(x, before)
    assert torch.equal(jacobian.todense(0).diagonal(), 3.0 * (before[0] > 0))


# Batches.


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_batches_of_other_sizes(batch: int) -> None:
    module = Net(lambda self, x: self.a(x).transpose(0, 1).softmax(-1).transpose(0, 1) + x, a=linear())
    x = torch.randn(batch, 3, 4, dtype=torch.float64, requires_grad=True)
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    y = scan(x)
    assert torch.equal(y, module(x))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert jacsparse.jacobian(module, x.detach()).values.shape[1] == batch


# What is refused.


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Net(lambda self, x: torch.linalg.householder_product(x.view(-1, 2, 2), x[:, :2])),
            r"householder_product has no rule; register one .* at .*test_chain.py, ",
        ),
        (Net(lambda self, x: x.softmax(0)), r"aten._softmax mixes the samples of a batch at .*test_chain.py, line"),
        (Net(lambda self, x: x - x.mean()), "aten.mean mixes the samples of a batch"),
        (Net(lambda self, x: x.flip(0)), "aten.flip mixes the samples of a batch"),
        (Net(lambda self, x: x.t()), "does not have them along its first axis"),
        (Net(lambda self, x: x if x.sum() > 0 else -x), r"asks what a tensor holds at .*test_chain.py, line"),
        (Net(lambda self, x: x[x > 0]), r"a size depends on what a tensor holds at .*test_chain.py, line"),
        (Net(lambda self, x: x * x.detach().tolist()[0][0]), "asks what a tensor holds"),
        (Net(lambda self, x: (x, x)), "its output is a tuple; wrap it"),
        (Net(lambda self, x: torch.ones(2, 4)), "does not have them along its first axis"),
        (
            Net(lambda self, x: (2 * x).scatter_(1, x.argsort(1), x)),
            r"index of aten.scatter depends on the input: .* by torch.where",
        ),
        (Net(lambda self, x: functional.linear(x, x.mean(0, keepdim=True))), "mixes the samples"),
        (Net(lambda self, x: self.bn(x) + x, bn=nn.BatchNorm1d(4)), r"call \.eval\(\) on it first"),
        (Net(lambda self, x: torch.fft.fft(x)), "aten._fft_r2c gives complex numbers, .* return torch.view_as_real"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(module: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        jacsparse.chain(module, (4,))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_programs_of_pytorch() -> None:
    module, x = Net(lambda self, x: self.a(x) + x, a=linear()), torch.randn(2, 4, dtype=torch.float64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    expected = jacsparse.jacobian(module, x)
    for exported in (program.module(), torch.export.unflatten(program)):
        assert torch.equal(jacsparse.jacobian(exported, x).values, expected.values)
    for scripted in (torch.jit.trace(nn.ReLU(), x), nn.Sequential(torch.jit.trace(nn.ReLU(), x))):
        for use in (lambda m: jacsparse.jacobian(m, x), jacsparse.nn.Scan, lambda m: jacsparse.count_flop(m, (4,))):
            with pytest.raises(TypeError, match=r"a torch\.jit\.ScriptModule; give the module that it was compiled"):
                use(scripted)


def test_a_tensor_is_no_shape() -> None:
    with pytest.raises(ValueError, match=r"input_shape is a tensor: give x\.shape\[1:\] of \(2, 3\)"):
        jacsparse.chain(nn.ReLU(), torch.randn(2, 3))


def test_recurrent_layers_are_taken_step_by_step() -> None:
    module = Net(lambda self, x: self.lstm(x)[0] + x, lstm=nn.LSTM(4, 4, batch_first=True))
    assert not jacsparse.verify(module, torch.randn(2, 3, 4, dtype=torch.float64)).failed


def test_the_error_names_the_operator_in_the_model() -> None:
    inner = nn.Sequential(
        nn.Linear(4, 4),
        Net(
            lambda self, x: torch.linalg.householder_product(self.a(x).view(-1, 2, 2), x[:, :2]).flatten(1), a=linear()
        ),
    )
    model = Net(lambda self, x: self.body(x) + x, body=inner)
    with pytest.raises(
        UnsupportedOperatorError, match=r"^body\.1: operator aten\.linalg_householder_product has no rule"
    ):
        jacsparse.jacobian_pattern(model, (4,))


def test_a_shape_that_does_not_fit() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear())
    with pytest.raises(
        ValueError, match=r"^a: an input of shape \(3,\) does not fit Linear.* at .*test_chain.py, line"
    ):
        jacsparse.chain(module, (3,))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float16, torch.bool])
def test_other_numbers_are_refused(dtype: torch.dtype) -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear())
    for call in (jacsparse.jacobian, jacsparse.verify, jacsparse.vjp):
        with pytest.raises(TypeError, match=f"x is {dtype}; expected float32 or float64"):
            call(module, torch.zeros(2, 4, dtype=dtype))


def test_weights_of_another_kind_or_place() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear())
    with pytest.raises(TypeError, match=r"a\.weight is torch\.float64, its input torch\.float32; convert one"):
        jacsparse.jacobian(module, torch.zeros(2, 4))
    half = Net(lambda self, x: self.a(x) + x, a=linear()).to(torch.complex128)
    with pytest.raises((TypeError, ValueError), match=r"complex|does not fit"):
        jacsparse.jacobian(half, torch.zeros(2, 4))
    elsewhere = Net(lambda self, x: self.a(x) + x, a=linear()).to("meta")
    with pytest.raises(ValueError, match=r"a\.weight is on meta; this runs on CPUs and CUDA"):
        jacsparse.jacobian(elsewhere, torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_a_model_on_the_gpu_and_an_input_on_the_cpu() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear()).cuda()
    with pytest.raises(ValueError, match=r"a\.weight is on cuda:0, its input on cpu; move one of them"):
        jacsparse.jacobian(module, torch.zeros(2, 4, dtype=torch.float64))


def test_forward_hooks_are_run() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=linear())
    module.a.register_forward_hook(lambda _m, _i, output: output * 3)
    module.a.register_forward_pre_hook(lambda _m, args: (args[0].tanh(),))
    check(module, 4)


def test_any_number_of_arguments() -> None:
    class Any(nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return args[0].tanh() + args[0]

    assert jacsparse.jacobian_pattern(Any(), (3,)).nnz == 3


def test_tracing_changes_nothing() -> None:
    module = Net(lambda self, x: functional.dropout(self.n(self.a(x)), 0.5, self.training) + x, a=linear(),
                 n=nn.InstanceNorm1d(3, track_running_stats=True))  # fmt: skip
    state = {name: value.clone() for name, value in module.state_dict().items()}
    drawn = torch.random.get_rng_state()
    jacsparse.chain(module, (3, 4))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_active_dropout_has_the_jacobian_of_its_own_draw() -> None:
    module = Net(lambda self, x: functional.dropout(x, 0.5, self.training) * 3 + x)
    (record,) = jacsparse.chain(module, (40,)).run(torch.zeros(3, 40, dtype=torch.float64))
    (expected,) = torch.autograd.grad(record.output.sum(), record.input, retain_graph=True)
    assert torch.equal(record.transposed_jacobian().values, expected.T)
    assert set(expected.flatten().tolist()) == {1.0, 7.0}


def test_verify_compares_active_dropout_under_one_draw() -> None:
    x = torch.randn(3, 40, dtype=torch.float64)
    for module in (
        nn.Sequential(nn.Linear(40, 40), nn.Dropout(), nn.ReLU(), nn.AlphaDropout()),
        Net(lambda self, x: functional.dropout(self.a(x), 0.5, self.training) * 3 + x, a=linear(40, 40)),
    ):
        drawn = torch.random.get_rng_state()
        actual = jacsparse.verify(module.double(), x)
        assert actual.checks[-1].exact
        assert torch.equal(torch.random.get_rng_state(), drawn)


def test_attributes_that_the_code_looks_at_are_part_of_the_structure() -> None:
    module = Net(lambda self, x: self.a(x) * self.factor + x, a=linear())
    module.factor = 2.0
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    for factor in (2.0, 5.0):
        module.factor = factor
        y = scan(x)
        assert torch.equal(y, module(x))


# Rules of the user's own.


@pytest.fixture
def rules() -> object:
    before = dict(RULES)
    del RULES["aten.cumsum"]
    yield
    RULES.clear()
    RULES.update(before)


def lower(call: jacsparse.Call) -> Pattern:
    rows = torch.ones(call.out_size, call.in_size).tril().to_sparse_csr()
    return Pattern((call.out_size, call.in_size), rows.crow_indices().numpy(), rows.col_indices().numpy())


def test_a_rule_of_ones_own(rules: object) -> None:
    module = Net(lambda self, x: self.a(x).cumsum(1) + x, a=linear())
    jacsparse.register_rule("aten.cumsum", pattern=lower)
    check(module, 4)

    def ones(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
        return call.input.new_ones((pattern.nnz, 1))

    with pytest.raises(ValueError, match=r"aten\.cumsum has a rule already; pass replace=True"):
        jacsparse.register_rule(torch.ops.aten.cumsum, pattern=lower, values=ones, shared=True)
    jacsparse.register_rule(torch.ops.aten.cumsum.default, pattern=lower, values=ones, shared=True, replace=True)
    assert check(Net(lambda self, x: x.cumsum(1)), 4).batch == 1


def test_values_by_colouring_take_columns_where_they_are_fewer(rules: object) -> None:
    # One column that all rows share, and one of each row's own: two colours of columns, as many of rows as rows.
    def arrow(call: jacsparse.Call) -> Pattern:
        matrix = torch.eye(call.out_size)
        matrix[:, 0] = 1
        rows = matrix.to_sparse_csr()
        return Pattern((call.out_size, call.in_size), rows.crow_indices().numpy(), rows.col_indices().numpy())

    @torch.library.custom_op("jacsparse_test::arrow", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * x[:, :1]

    operator.register_fake(torch.empty_like)
    operator.register_autograd(
        lambda ctx, g: _arrow_backward(ctx.saved_tensors[0], g),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    jacsparse.register_rule("jacsparse_test::arrow", pattern=arrow)
    check(Net(lambda self, x: torch.ops.jacsparse_test.arrow(x)), 6)


def _arrow_backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    ours = g * x.cos() * x[:, :1]
    first = (g * x.sin()).sum(1, keepdim=True)
    return ours + torch.nn.functional.pad(first, (0, x.shape[1] - 1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"operator": "cumsum", "pattern": lower},
            ValueError,
            r"operator is 'cumsum'; expected a namespace and a name",
        ),
        ({"operator": "aten.linear", "pattern": lower}, ValueError, "aten.linear is made of other operators"),
        ({"operator": 3, "pattern": lower}, TypeError, "operator is an int; expected its name"),
        ({"operator": "aten.cumsum", "pattern": None}, TypeError, "pattern is a NoneType; expected a function"),
        (
            {"operator": "aten.cumsum", "pattern": lower, "values": 3},
            TypeError,
            "values is an int; expected",
        ),
    ],
)
def test_bad_rules(rules: object, arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jacsparse.register_rule(**arguments)


def test_a_rule_that_gives_something_else(rules: object) -> None:
    module = Net(lambda self, x: x.cumsum(1))
    jacsparse.register_rule("aten.cumsum", pattern=lambda call: "full")
    with pytest.raises(TypeError, match=r"the rule of aten\.cumsum gave a str, not a Pattern"):
        jacsparse.jacobian_pattern(module, (4,))
    jacsparse.register_rule("aten.cumsum", pattern=lambda call: Pattern((1, 1), [0, 0], []), replace=True)
    with pytest.raises(ValueError, match=r"pattern of shape \(1, 1\); expected \(4, 4\)"):
        jacsparse.jacobian_pattern(module, (4,))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (lambda x, nnz: None, TypeError, "values that are a NoneType; expected a tensor"),
        (lambda x, nnz: x.new_ones((nnz, 1)).numpy(), TypeError, "values that are an ndarray; expected a tensor"),
        (lambda x, nnz: torch.ones(nnz, 1), TypeError, r"values of torch\.float32 on cpu; expected torch\.float64"),
        (lambda x, nnz: x.new_ones(nnz), ValueError, r"values of shape \(4,\); expected \(4, 3\) or \(4, 1\)"),
        (lambda x, nnz: x.new_ones((len(x), nnz)), ValueError, r"values of shape \(3, 4\); expected \(4, 3\) or"),
        (lambda x, nnz: x.new_ones((nnz + 1, len(x))), ValueError, r"values of shape \(5, 3\); expected \(4, 3\) or"),
    ],
)
def test_a_rule_that_gives_other_values(
    rules: object, values: Callable[..., object], error: type[Exception], message: str
) -> None:
    jacsparse.register_rule(
        "aten.neg",
        pattern=lambda call: Pattern.of(Diagonal(call.in_size)),
        values=lambda call, pattern: values(call.input, pattern.nnz),
        replace=True,
    )
    with pytest.raises(error, match=rf"^Net: the rule of aten\.neg gave {message}"):
        jacsparse.jacobian(Net(lambda self, x: -x), torch.randn(3, 4, dtype=torch.float64))


# Verification.


def test_verification_names_what_differs(rules: object) -> None:
    def too_little(call: jacsparse.Call) -> Pattern:
        return Pattern.of(Diagonal(call.in_size))

    module = Net(lambda self, x: torch.relu(self.a(x)).cumsum(1), a=linear())
    jacsparse.register_rule("aten.cumsum", pattern=too_little)
    x = torch.rand(1, 4, dtype=torch.float64)
    with pytest.raises(jacsparse.VerificationError) as caught:
        jacsparse.verify(module, x)
    assert "Net (aten.cumsum), 4 × 4: all entries, difference 3.0e+00" in str(caught.value)
    assert "∂y[1]/∂x[0] is 0, autograd 1, which the pattern leaves out" in str(caught.value)
    results = jacsparse.verify(module, x, raise_exception=False)
    assert [check.operator for check in results.failed] == ["aten.cumsum", "Net"]


def test_verification_finds_an_entry_of_a_large_jacobian(rules: object) -> None:
    def wrong(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
        values = call.input.new_full((pattern.nnz, len(call.input)), -1.0)
        values[777] = -2.5
        return values

    def diagonal(call: jacsparse.Call) -> Pattern:
        return Pattern.of(Diagonal(call.in_size))

    jacsparse.register_rule("aten.neg", pattern=diagonal, values=wrong, replace=True)
    with pytest.raises(jacsparse.VerificationError, match=r"∂y\[777\]/∂x\[777\] is -2\.5, autograd -1"):
        jacsparse.verify(Net(lambda self, x: -x), torch.randn(2, 1000, dtype=torch.float64))


def test_verification_of_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="an empty batch; pass at least one sample"):
        jacsparse.verify(nn.ReLU(), torch.zeros(0, 3))


# Samples must be worked on one by one, whatever the values are.


@pytest.mark.parametrize(
    "module",
    [
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).eval(),
        Net(lambda self, x: functional.scaled_dot_product_attention(*[x.flatten(1)[None]] * 3, is_causal=True)[0]),
        Net(lambda self, x: torch.tril(x.flatten(1))),
        Net(lambda self, x: torch.relu(x - 50).flip(0)),
        Net(lambda self, x: (1 + 1e-4 * x).flip(0)),
    ],
)
def test_mixed_samples_are_noticed(module: nn.Module) -> None:
    with pytest.raises(UnsupportedOperatorError, match="mixes the samples of a batch"):
        jacsparse.chain(module, (3, 4))


class Minor(nn.Module):
    """Runs a module on positions, the sample the faster index of the two."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = x.transpose(0, 1).flatten(0, 1)
        return self.inner(merged).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


@pytest.mark.parametrize(
    "inner",
    [
        nn.LocalResponseNorm(2),
        Net(lambda self, x: torch.relu(x - 50).square()),
        Net(lambda self, x: functional.rrelu(x, training=False)),
        Net(lambda self, x: functional.scaled_dot_product_attention(x, x, x)),
    ],
)
def test_samples_behind_positions(inner: nn.Module) -> None:
    x = 60 * torch.randn(2, 3, 2, 3, dtype=torch.float64)
    assert not jacsparse.verify(Minor(inner), x).failed


def hooked(self: Net, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: 3 * gradient)
    return y.tanh()


def test_derivatives_that_are_not_the_operators_are_noticed() -> None:
    module, x = Net(hooked), torch.randn(2, 4, dtype=torch.float64)
    for use in (lambda: jacsparse.chain(module, (4,)), lambda: jacsparse.jacobian(module, x)):
        with pytest.raises(UnsupportedOperatorError, match="a backward hook, of a module"):
            use()


def test_a_derivative_of_a_functions_own() -> None:
    module, x = Net(lambda self, x: (Straight.apply(x) * x).cumsum(1)), torch.randn(2, 4, dtype=torch.float64)
    assert [stage.name for stage in jacsparse.chain(module, (4,))] == ["1 operators", "aten.cumsum"]
    assert not jacsparse.verify(module, x).failed


# What a module refers to.


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: torch.tanh(x) + x.new_ones(4),
        lambda self, x: torch.cat([torch.tanh(x), torch.zeros_like(x)], 1),
        lambda self, x: torch.relu(torch.tanh(x) * 2) + torch.ones_like(x.sin()),
        lambda self, x: x.norm(p=0, dim=1, keepdim=True) + x,
    ],
)
def test_shapes_of_tensors_before_a_stage(function) -> None:
    assert not jacsparse.verify(Net(function), torch.randn(2, 4, dtype=torch.float64)).failed


class Bound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.function = self.implementation

    def implementation(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.parts, self.weights = [self.a], {"w": self.w}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.parts[0](x) @ self.weights["w"]).tanh()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def double(self) -> Part:
        super().double()
        self.rows = [self.w.data[0]]
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w).tanh() * self.rows[0]


@pytest.mark.parametrize("kind", [Bound, Listed, Part])
def test_parameters_that_are_reached_by_another_way_train(kind: type[nn.Module]) -> None:
    module = kind().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    module(x).square().sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    jacsparse.nn.Scan(module, schedule="blelloch")(x).square().sum().backward()
    for ours, parameter in zip(expected, module.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, rtol=1e-10)


def test_what_is_made_of_parameters_before_the_forward_pass_trains_them() -> None:
    module = Net(lambda self, x: self.a(x) * self.rows[0], a=linear(), w=linear()).double()
    module.rows = [module.w.weight[0]]
    x = torch.randn(2, 4, dtype=torch.float64)
    module(x).square().sum().backward(retain_graph=True)
    expected = module.w.weight.grad.clone()
    module.zero_grad()
    jacsparse.nn.Scan(module, schedule="blelloch")(x).square().sum().backward()
    assert torch.allclose(module.w.weight.grad, expected, rtol=1e-10)


def test_a_buffer_may_require_a_gradient() -> None:
    module = Net(lambda self, x: self.a(x) * self.scale, a=linear()).double()
    module.register_buffer("scale", torch.randn(4, dtype=torch.float64, requires_grad=True))
    x = torch.randn(2, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(module(x).square().sum(), module.scale)
    (actual,) = torch.autograd.grad(jacsparse.nn.Scan(module, schedule="linear")(x).square().sum(), module.scale)
    assert torch.allclose(actual, expected, rtol=1e-10)


class Owned(nn.Module):
    """A parametrisation that reads another parameter of its owner."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.gain = lambda: owner.gain

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.gain()


def test_a_parametrisation_that_reads_its_owner() -> None:
    module = Net(lambda self, x: self.a(x) * self.a.gain, a=linear()).double()
    module.a.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    parametrize.register_parametrization(module.a, "weight", Owned(module.a))
    check(module, 4)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_are_zero_but_for_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    # The softmax does not see what the keys have in common.
    module = Net(
        lambda self, x: functional.scaled_dot_product_attention(self.q(y := self.lstm(x)[0]), self.k(y), self.v(y)),
        lstm=nn.LSTM(4, 8, batch_first=True), q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8),
    )  # fmt: skip
    jacsparse.chain(module.float(), (5, 4))


def test_tracing_calls_no_hook_and_changes_nothing() -> None:
    module = Net(lambda self, x: self.a(x) + x, a=nn.Linear(4, 4))
    parametrizations.spectral_norm(module.a)
    calls: list[torch.Tensor] = []
    module.a.bias.register_hook(calls.append)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    jacsparse.chain(module, (4,))
    assert not calls and before
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: torch.tanh(self.a(x) * torch.rand(4)),
        lambda self, x: functional.linear(x, self.a.weight * torch.randn_like(self.a.weight)),
        lambda self, x: functional.linear(x, self.a.weight * torch.bernoulli(self.a.weight.detach(), 0.5)),
        lambda self, x: self.a(x) * x.new_empty((x.shape[0], 1)).bernoulli_(0.9) + x,
        lambda self, x: functional.gumbel_softmax(self.a(x), dim=1),
    ],
)
def test_random_tensors(function) -> None:
    module = Net(function, a=nn.Linear(4, 4)).float()
    # What is drawn is no guaranteed zero.
    assert jacsparse.jacobian_pattern(module, (4,)).nnz == 16
    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.manual_seed(0)
    (actual,) = torch.autograd.grad(jacsparse.nn.Scan(module, schedule="linear")(x).square().sum(), x)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_sums_of_other_dtypes() -> None:
    module = Net(lambda self, x: self.a((x + self.shift).float()), a=nn.Linear(4, 4)).float()
    module.shift = torch.randn(4, dtype=torch.float64)
    x = torch.randn(2, 4, requires_grad=True)
    actual = jacsparse.jacobian(module, x.detach())
    assert actual.values.dtype == x.dtype
    assert torch.equal(actual.todense(0), module.a.weight)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    (gradient,) = torch.autograd.grad(jacsparse.nn.Scan(module, schedule="blelloch")(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_plain_tensors_are_what_a_module_may_have() -> None:
    module = Net(lambda self, x: x[:, self.index] * self.scale + x)
    module.index, module.scale = torch.tensor([2, 0, 1, 3]), torch.randn(4, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert not jacsparse.verify(module, x).failed
    before = jacsparse.jacobian(module, x).todense(0)
    module.scale = module.scale * 2
    after = jacsparse.jacobian(module, x).todense(0)
    assert torch.allclose(after - torch.eye(4), 2 * (before - torch.eye(4)))


# What may change between two calls.


def changes() -> dict[str, tuple[nn.Module, Callable[[nn.Module], object]]]:
    listed = Net(lambda self, x: self.act(self.a(x) * self.factors[0] * self.options["k"]), a=linear())
    listed.act, listed.factors, listed.options = torch.tanh, [2.0], {"k": 3.0}
    frozen = nn.Sequential(linear(), nn.Tanh()).requires_grad_(False)
    frozen[0].weight[:, :2] = 0
    standardised = nn.Sequential(nn.Flatten(), linear(), nn.ReLU())
    parametrised = nn.Sequential(parametrizations.orthogonal(linear()), nn.Tanh())
    return {
        "function": (listed, lambda m: setattr(m, "act", torch.sin)),
        "list": (listed, lambda m: m.factors.__setitem__(0, 5.0)),
        "dict": (listed, lambda m: m.options.update(k=7.0)),
        "forward of an instance": (standardised, lambda m: setattr(m[2], "forward", lambda x: torch.tanh(x))),
        "weights behind PyTorch's back": (frozen, lambda m: m[0].weight.data.copy_(torch.randn(4, 4))),
        "parametrised weights": (parametrised, lambda m: m[0].parametrizations.weight.original.data.add_(1)),
    }


@pytest.mark.parametrize("name", changes())
def test_nothing_stale_is_kept(name: str) -> None:
    module, change = changes()[name]
    module.double()
    x = torch.randn(2, 4, dtype=torch.float64)
    for _ in range(2):
        actual = jacsparse.jacobian(module, x)
        for number, sample in enumerate(x):
            expected = torch.autograd.functional.jacobian(lambda s: module(s[None])[0], sample)
            assert torch.allclose(actual.todense(number), expected, rtol=1e-10, atol=1e-12)
        change(module)


def test_another_size_of_adaptive_pooling() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(3))
    assert jacsparse.jacobian(module, torch.randn(1, 1, 8, 8)).shape[0] == 18
    module[1].output_size = 2
    assert jacsparse.jacobian(module, torch.randn(1, 1, 8, 8)).shape[0] == 8


def test_a_convolution_with_weights_of_its_own_is_traced() -> None:
    class Centred(nn.Conv2d):
        def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return super()._conv_forward(x, weight - weight.mean(), bias)

    assert not jacsparse.verify(nn.Sequential(Centred(1, 2, 3).double()), torch.randn(1, 1, 5, 5).double()).failed


def test_indices_that_move_make_other_patterns() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("index", torch.tensor([2, 0, 1, 3]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, self.index] * 1.5

    module = nn.Sequential(linear(), nn.Tanh(), Picks(), linear(), nn.Tanh()).double()
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    for index in ([2, 0, 1, 3], [0, 3, 2, 1]):
        module[2].index.copy_(torch.tensor(index))
        (actual,) = torch.autograd.grad(scan(x).square().sum(), x)
        (expected,) = torch.autograd.grad(module(x).square().sum(), x)
        assert torch.allclose(actual, expected, rtol=1e-10)


def test_threads_may_trace_at_once() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)

    def traced(_: int) -> bool:
        module = Net(lambda self, x: x + torch.tanh(self.a(x)), a=linear()).double()
        return not jacsparse.verify(module, x).failed

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(traced, range(8)))
    assert math.pow(2, 3) == 8 and math.pow.__module__ == "math"


# What ATen composes of other operators.


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: torch.einsum("bij,bkj->bik", x, x.sin()),
        lambda self, x: x.swapaxes(1, 2).mT,
        lambda self, x: torch.hstack([x, x.cos()]),
        lambda self, x: torch.tensordot(x, torch.ones(4, 2, dtype=x.dtype), dims=1),
        lambda self, x: functional.pairwise_distance(x, 2 * x + 1),
    ],
)
def test_composed_operators(function) -> None:
    assert not jacsparse.verify(Net(function), torch.randn(2, 3, 4, dtype=torch.float64)).failed
