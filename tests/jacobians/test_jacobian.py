"""Whole Jacobians: every order of products, full and sparse, and what a SparseJacobian can do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from jacsparse.models import build, prune_weights
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import jacsparse
from tests.helpers import BOUND, FLOAT, autograd_jacobian, dense, drawn


def test_pruned_vgg_11_equals_autograd() -> None:
    model = build("vgg11").eval()
    prune_weights(model, 0.97)
    x = torch.randn(1, 3, 32, 32)
    actual = jacsparse.jacobian(model.features, x)
    assert actual.shape == (512, 3072)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradient = torch.randn(1, 512, generator=generator)
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model.features(leaf), leaf, gradient.reshape(1, 512, 1, 1))
        assert (actual.vjp(gradient) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_hook_on_the_input_is_not_the_models() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2)
    )
    x = torch.randn(1, 1, 6, 6, requires_grad=True)
    # The first calls may go another way than later ones, which rounds otherwise.
    *_, expected = (jacsparse.jacobian(module, x).todense(0) for _ in range(3))
    x.register_hook(lambda gradient: 2 * gradient)
    assert torch.equal(jacsparse.jacobian(module, x).todense(0), expected)


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (nn.Conv1d(2, 3, 2, dtype=FLOAT), (0, 2, 3)),
        (nn.Linear(3, 4, dtype=FLOAT), (0, 3)),
        (lambda x: functional.max_pool1d(x, 2), (0, 2, 4)),
        (lambda x: functional.avg_pool2d(x, 2), (0, 2, 4, 4)),
        (lambda x: x.softmax(1).cumsum(1), (0, 3)),
        (lambda x: x.sort(1)[0].sum(1), (0, 3)),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), (0, 3, 2)),
    ],
)
def test_tensors_without_elements(f: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=FLOAT)
    for _ in range(3):
        result = jacsparse.jacobian(f, x, batched=False)
        assert result.shape == (0, 0) and result.values.shape == (0, 1)
    assert jacsparse.prepare_jacobian(f, x, batched=False)(x).shape == (0, 0)


def test_several_arguments_without_samples() -> None:
    e = torch.zeros(0, 6, dtype=FLOAT)
    for argnums, columns in ((0, 6), (1, 6), ((0, 1), 12)):
        assert jacsparse.jacobian(lambda a, b: a * b, e, e, argnums=argnums, batched=True).values.shape == (columns, 0)
    assert jacsparse.hessian(lambda a, b: (a * a * b).sum(1), e, e, batched=True).values.shape == (6, 0)
    assert jacsparse.jacobian(lambda a, b: a * b, e, torch.ones(6, dtype=FLOAT), batched=True).values.shape == (6, 1)
    # Arguments that have no elements in any batch stay as they are.
    none = torch.zeros(0, dtype=torch.int64)
    assert jacsparse.jacobian(lambda x, i: x.index_select(1, i), e, none, batched=True).shape == (0, 6)
    c = torch.zeros(0, 6, dtype=FLOAT)
    assert jacsparse.jacobian(lambda x, c: torch.cat([x @ c.T, x], 1), e, c, batched=True).shape == (6, 6)


def test_expanded_arguments_of_functions_that_read_memory() -> None:
    x = torch.ones(2, 1, dtype=FLOAT).expand(2, 5)
    f = lambda x: (x.as_strided((2, 4), (5, 1)) if x.is_contiguous() else x[:, :4]) * 2  # noqa: E731
    for options in ({}, {}, {"create_graph": True}):
        assert torch.equal(
            jacsparse.jacobian(f, x, **options, batched=True).todense(0).detach(), 2 * torch.eye(4, 5, dtype=FLOAT)
        )


def test_random_numbers_that_are_written_to_a_view_are_refused() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        torch.nn.functional.rrelu(y[1:], training=True, inplace=True)
        return y.sin()

    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"rrelu_with_noise draws random .* work on a clone"):
        jacsparse.jacobian(f, torch.linspace(-1, 1, 4))
    prepared = jacsparse.prepare_jacobian(lambda x: torch.nn.functional.rrelu(x, 0.2, 0.4), torch.linspace(-1, 1, 4))
    torch.testing.assert_close(prepared(torch.linspace(1, -1, 4)).todense().diagonal(), torch.tensor([1, 1, 0.3, 0.3]))


def test_random_numbers_are_drawn_in_the_order_of_an_arguments_elements() -> None:
    f = lambda x, y: functional.dropout(x, 0.5) * y  # noqa: E731
    for x in (drawn(4, 3).mT, drawn(2, 3, 4).permute(2, 0, 1), drawn(3, 8)[:, ::2], drawn(1, 4).expand(3, 4)):
        torch.manual_seed(7)
        expected = functional.dropout(torch.ones_like(x), 0.5)
        torch.manual_seed(7)
        for argnums in (0, (1, 0)):
            with torch.random.fork_rng():
                actual = jacsparse.jacobian(f, x, torch.ones_like(x), argnums=argnums, batched=False)
            of_x = actual.todense()[:, -x.numel() :]
            assert torch.equal(of_x.diagonal().reshape(x.shape), expected)


def test_threads_find_ways_to_values_at_once() -> None:
    # By forward mode, which PyTorch has once for all threads.
    def is_right(seed: int) -> bool:
        x, weight = drawn(2, 5, seed=seed), drawn(5, 5, seed=seed)
        f = lambda x: (x @ weight + x).softmax(1)  # noqa: E731
        results = [jacsparse.jacobian(f, x, batched=True) for _ in range(3)]
        return all((each.todense(1) - dense(f, x)[1]).abs().amax() <= BOUND for each in results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(24)))


def test_calls_within_a_checkpoint() -> None:
    f = lambda x: x[:, 1:] * x[:, :-1]  # noqa: E731
    for seed in range(4):
        x = drawn(3, 6, seed=seed)
        actual = checkpoint(lambda t: jacsparse.jacobian(f, t, batched=True).values, x, use_reentrant=False)
        assert torch.equal(actual, jacsparse.jacobian(f, x, batched=True).values)


@pytest.mark.parametrize("wrap", [jacsparse.nn.Scan, jacsparse.nn.Solve, jacsparse.nn.Leapfrog])
def test_modules_of_this_library_are_prepared(wrap: Callable[..., nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = drawn(2, 4)
    module = wrap(network, threads=2) if wrap is jacsparse.nn.Leapfrog else wrap(network)
    prepared, expected = jacsparse.prepare_jacobian(module, x), jacsparse.jacobian(network, x)
    for actual in (prepared(x), *(jacsparse.jacobian(module, x) for _ in range(3))):
        assert (actual.values - expected.values).abs().amax() <= BOUND


def test_a_function_that_writes_to_an_argument_runs_once() -> None:
    for _ in range(4):
        b = torch.ones(3, dtype=FLOAT)
        result = jacsparse.jacobian(lambda a, b: b.add_(a) * a, drawn(3), b, batched=False)
        assert (result.values[:, 0] - (1 + 2 * drawn(3))).abs().amax() <= BOUND
        assert (b - (1 + drawn(3))).abs().amax() <= BOUND


def test_a_broadcast_operand_that_is_overwritten_after_its_use() -> None:
    def normalised(x: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
        norm = x.square().sum(-1, keepdim=True).sqrt()
        y = x / norm
        return y + 0 * norm.add_(1).detach() if overwrite else y

    x = drawn(4, 5)
    expected = jacsparse.jacobian(lambda x: normalised(x, overwrite=False), x)
    for _ in range(4):
        actual = jacsparse.jacobian(lambda x: normalised(x, overwrite=True), x)
        assert (actual.todense() - expected.todense()).abs().amax() <= BOUND


@pytest.mark.parametrize("size", [(3, 2, 5), (1, 4, 3), (5, 5, 2)])
def test_indices_lie_one_after_the_other(size: tuple[int, ...]) -> None:
    # PyTorch's backward pass of this pooling ends the process, or is wrong, where they do not.
    pooling, x = nn.AdaptiveMaxPool3d((1, 3, 1)), drawn(1, 1, *size)
    expected = autograd_jacobian(pooling, x[0])
    for _ in range(4):
        assert torch.equal(jacsparse.jacobian(lambda t: pooling(t * 1), x, batched=True).todense(0), expected)


class Constant(nn.Module):
    """A module whose output depends on parameters alone, or on nothing."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(drawn(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, x)


CONSTANTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ones": lambda w, x: torch.ones(len(x), 3, dtype=x.dtype),
    "as the input": lambda w, x: torch.zeros_like(x),
    "the parameter": lambda w, x: w,
    "of the parameter": lambda w, x: w.sin() * 2,
    "detached": lambda w, x: x.detach() * w[:, :1],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_results_that_do_not_depend_on_the_input(name: str) -> None:
    module, x = Constant(CONSTANTS[name]), drawn(5, 4)
    expected = torch.autograd.functional.jacobian(module, x)
    assert not expected.any()
    rows = expected.shape[1]
    prepared = [jacsparse.prepare_jacobian(module, x, method=m) for m in ("auto", "products", "compressed")]
    for result in (jacsparse.jacobian(module, x), jacsparse.jacobian(module, x, create_graph=True), prepared[0](x)):
        assert result.shape == (rows, 4) and not result.pattern.nnz
    assert all(each.pattern == result.pattern and each.check(x) == 0 for each in prepared)
    if name in ("ones", "as the input"):
        assert jacsparse.jacobian_pattern(module, (4,)) == result.pattern
    for schedule in ("linear", "blelloch"):
        leaf = x.clone().requires_grad_()
        jacsparse.nn.Scan(module, schedule=schedule)(leaf).square().sum().backward()
        gradient, module.weight.grad = module.weight.grad, None
        y = module(x).square().sum()
        of_weight = torch.autograd.grad(y, module.weight)[0] if y.requires_grad else None
        assert leaf.grad is not None and not leaf.grad.any()
        assert (gradient is None) == (of_weight is None)
        if of_weight is not None:
            torch.testing.assert_close(gradient, of_weight)


def test_functions_that_do_not_depend_on_their_argument() -> None:
    x, w = drawn(4), drawn(3).requires_grad_()
    J, y = jacsparse.jacobian(lambda u: torch.ones(3, dtype=FLOAT), x, value=True)
    assert J.shape == (3, 4) and not J.pattern.nnz and torch.equal(y, torch.ones(3, dtype=FLOAT))
    assert jacsparse.jacobian_pattern(lambda u: torch.ones(3, dtype=FLOAT), x) == J.pattern
    _, y = jacsparse.jacobian(lambda u: 2 * w, x, value=True, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], torch.full((3,), 2.0, dtype=FLOAT))
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda u: torch.ones((), dtype=FLOAT),
        lambda u: 3 * u.sum(),
        lambda u: u.detach().sum(),
    ]
    for f in functions:
        for H in (jacsparse.hessian(f, x), jacsparse.prepare_hessian(f, x)(x)):
            assert H.shape == (4, 4) and not H.pattern.nnz
        assert not jacsparse.hessian_pattern(f, x).nnz
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"Python read elements .* without \.item\(\)"):
        jacsparse.jacobian(lambda u: torch.tensor([u.sum().item()]), x)


PLACES = torch.tensor([[0, 1, 1, 2, 1], [0, 0, 2, 3, 2]])


def of_values(values: torch.Tensor, places: torch.Tensor = PLACES) -> torch.Tensor:
    return torch.sparse_coo_tensor(places, values, (3, 5))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: of_values(x**2) @ x,
        lambda x: of_values(x.sin()) @ torch.stack([x, x * 2], 1),
        lambda x: torch.sparse.mm(of_values(x**2).coalesce(), x[:, None]),
        lambda x: of_values(x**2).t() @ x[:3],
        lambda x: of_values(x**2).coalesce().T.to_dense(),
        lambda x: of_values(x**2).permute(-1, 0) @ x[:3],
        lambda x: of_values(x**2).permute(0, 1) @ x,
        lambda x: of_values(x**2).transpose(0, -1).transpose(1, -1) @ x[:3],
        lambda x: torch.addmm(x[:3, None], of_values(x), x.exp()[:, None], beta=2, alpha=3),
        lambda x: torch.addmm(torch.full((3, 1), float("nan"), dtype=FLOAT), of_values(x), x[:, None], beta=0),
        lambda x: of_values(x**2) @ torch.arange(1.0, 6.0, dtype=FLOAT),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_matrices_of_values_that_depend_on_the_input(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = drawn(5)
    prepared = [jacsparse.prepare_jacobian(f, drawn(5, seed=1), method=m) for m in ("products", "compressed")]
    expected = torch.autograd.functional.jacobian(f, x).reshape(-1, 5)
    for J in (jacsparse.jacobian(f, x), *(each(x) for each in prepared)):
        torch.testing.assert_close(J.todense(), expected, rtol=1e-12, atol=1e-12)
        assert J.pattern.nnz == expected.count_nonzero()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_places_of_sparse_matrices_are_read_in_each_call() -> None:
    x, places = drawn(5), PLACES.clone()

    def f(x: torch.Tensor) -> torch.Tensor:
        return of_values(x**2, places) @ x

    prepared = jacsparse.prepare_jacobian(f, x)
    for _ in range(3):
        expected = torch.autograd.functional.jacobian(f, x)
        torch.testing.assert_close(jacsparse.jacobian(f, x).todense(), expected, rtol=1e-12, atol=1e-12)
        places[1] = (places[1] + 1) % 5
    with pytest.raises(ValueError, match="holds other elements"):
        prepared(x)


def test_sparse_matrices_that_are_refused_say_why() -> None:
    x = drawn(5)
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"aten.mul.Tensor makes a sparse .* computed before"):
        jacsparse.jacobian(lambda x: (of_values(x) * 2) @ x, x)

    def overwritten(x: torch.Tensor) -> torch.Tensor:
        values = x.sin()
        matrix = of_values(values)
        values.mul_(2)
        return matrix @ x

    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"written to afterwards.* make the matrix of a clone"):
        jacsparse.jacobian(overwritten, x)
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"_values.* takes a sparse tensor; .* dense tensor"):
        jacsparse.jacobian(lambda x: of_values(x)._values(), x)


def test_a_later_call_is_few_calls_of_python() -> None:
    x, calls = drawn(6), list[str]()

    def f(x: torch.Tensor) -> torch.Tensor:
        return x[1:] ** 2 - x[:-1]

    jacobians = [jacsparse.jacobian(f, x) for _ in range(3)]
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        jacobians.append(jacsparse.jacobian(f, x))
    finally:
        sys.setprofile(None)
    # PyTorch 2.6 takes a fifth more.
    assert len(calls) <= (300 if torch.__version__.startswith("2.6.") else 250), calls
    expected = torch.diag(2 * x)[1:] - torch.eye(6, dtype=x.dtype)[:-1]
    for each in jacobians:
        torch.testing.assert_close(each.todense(), expected, rtol=1e-12, atol=1e-12)
