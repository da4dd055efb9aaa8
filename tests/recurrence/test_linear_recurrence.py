"""linear_recurrence against a plain loop: every form of A, every schedule, both directions, gradients too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from jacsparse.patterns import UnsupportedOperatorError
from torch.fx.experimental.proxy_tensor import make_fx

import jacsparse
from jacsparse import Pattern, linear_recurrence
from jacsparse.recurrence import Dense, Diagonal, Report, Scaled, Sparse
from tests.helpers import close, reflections, uniform

SCHEDULES = ["auto", "sequential", "chunked:3", "chunked", "blelloch", "relaxed:4"]
FORMS = ["dense", "diagonal", "scaled", "sparse"]


def blocks(form: str, time: int, batch: int, n: int, dtype: torch.dtype = torch.float64) -> Any:
    """Matrices that neither grow nor shrink a state much."""
    scale = max(1, n) ** -0.5
    if form == "dense":
        return Dense((scale * torch.randn(time, batch, n, n, dtype=dtype)).requires_grad_())
    if form == "diagonal":
        return Diagonal(torch.randn(time, batch, n, dtype=dtype).requires_grad_())
    if form == "scaled":
        W = (scale * torch.randn(n, n, dtype=dtype)).requires_grad_()
        return Scaled(W, torch.rand(time, batch, n, dtype=dtype).requires_grad_())
    pattern = Pattern.from_scipy(scipy.sparse.random(n, n, 0.4, random_state=n, format="csr"))
    return Sparse(pattern, torch.randn(time, pattern.nnz, batch, dtype=dtype).requires_grad_())


def loop(A: Any, b: torch.Tensor, h0: torch.Tensor, reverse: bool) -> torch.Tensor:
    matrices, state, states = A.dense(), h0, [None] * len(b)
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        state = torch.einsum("bij,bj->bi", matrices[t].expand(b.shape[1], -1, -1), state) + b[t]
        states[t] = state
    return torch.stack(states)  # type: ignore[arg-type]


@given(
    form=st.sampled_from(FORMS),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12)),
    schedule=st.sampled_from(SCHEDULES),
    shared=st.booleans(),
    reverse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_a_loop(
    form: str, sizes: tuple[int, int, int], schedule: str, shared: bool, reverse: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    time, batch, n = sizes
    A = blocks(form, time, 1 if shared else batch, n)
    b, h0 = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((time, batch, n), (batch, n)))
    expected = loop(A, b, h0, reverse)
    g = torch.randn_like(expected)
    reports: list[Report] = []
    actual = linear_recurrence(A, b, h0, reverse=reverse, schedule=schedule, reports=reports)
    sources = [b, h0, *A.tensors]
    references = torch.autograd.grad(expected, sources, g, allow_unused=True)
    for ours, reference in zip(
        [actual, *torch.autograd.grad(actual, sources, g)], [expected, *references], strict=True
    ):
        wanted = torch.zeros_like(ours) if reference is None else reference
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        assert not ours.numel() or (ours - wanted).abs().max() <= 1e-10 * largest
    assert [report.recurrence for report in reports] == ["forward", "backward"]


@pytest.mark.parametrize("time", [0, 1, 40, 200])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "blelloch:2", "chunked:64"])
@pytest.mark.parametrize("form", FORMS)
def test_without_samples_elements_or_steps(form: str, schedule: str, time: int) -> None:
    for batch, matrices, n, reverse in ((0, 0, 3, False), (0, 1, 3, True), (2, 1, 0, False), (2, 2, 0, True)):
        A = blocks(form, time, matrices, n)
        b, h0 = (torch.randn(shape).double().requires_grad_() for shape in ((time, batch, n), (batch, n)))
        h = linear_recurrence(A, b, h0, reverse=reverse, schedule=schedule)
        assert h.shape == b.shape and h.dtype == b.dtype
        for leaf, gradient in zip((b, h0, *A.tensors), torch.autograd.grad(h.sum(), [b, h0, *A.tensors]), strict=True):
            assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype and not gradient.any()


@pytest.mark.parametrize("form", FORMS)
def test_tensors_with_their_signs_elsewhere(form: str) -> None:
    """As imaginary parts have them, where PyTorch conjugates lazily."""
    A, b, h0 = blocks(form, 7, 2, 3), torch.randn(7, 2, 3).double(), torch.randn(2, 3).double()
    results = []
    for negative in (torch._neg_view, torch.neg):
        sources = [negative(tensor.detach()).requires_grad_() for tensor in (b, h0, *A.tensors)]
        h = linear_recurrence(A.form(*sources[2:]), *sources[:2], schedule="chunked:3")
        results.append([h.detach(), *torch.autograd.grad(h, sources, negative(torch.ones_like(h)))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_not_traced() -> None:
    class Smoothed(torch.nn.Module):
        def forward(self, b: torch.Tensor) -> torch.Tensor:
            return linear_recurrence(Diagonal(torch.sigmoid(b)), b)

    model, b = Smoothed(), torch.randn(5, 2, 3)
    for trace in (
        lambda: make_fx(model)(b),
        lambda: make_fx(model, pre_dispatch=True)(b),
        lambda: torch.jit.trace(model, (b,)),
        lambda: torch.export.export(model, (b,), strict=False),
    ):
        with pytest.raises(UnsupportedOperatorError, match="a linear recurrence cannot be exported, traced or f"):
            trace()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str, schedule: str) -> None:
    A = blocks(form, 7, 2, 3)
    b, h0 = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 2, 3), (2, 3)))
    assert torch.autograd.gradcheck(
        lambda b, h0, *tensors: linear_recurrence(A.form(*tensors), b, h0, schedule=schedule),
        (b, h0, *A.tensors),
    )


def trained_blocks(time: int) -> Scaled:
    """The Jacobians, along a sequence, of an RNN of 20 units that has learned to add up its input."""
    torch.manual_seed(0)
    rnn, head = jacsparse.nn.RNN(1, 20), torch.nn.Linear(20, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(150):
        x = 0.1 * torch.randn(200, 16, 1)
        loss = (head(rnn(x)[0]) - x.cumsum(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        h = rnn(0.1 * torch.randn(time, 1, 1))[0]
    return Scaled(rnn.weight_hh_l0.detach().T.contiguous(), 1 - h.square())


@functools.lru_cache(maxsize=1)
def long_sequence(kind: str, where: str) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A recurrence of many steps, and its solution in float64 and in float32."""
    time, n, rng = 30_000, 20, np.random.default_rng(0)
    if kind == "orthogonal":
        A: Any = Dense(torch.from_numpy(reflections(n, n, rng)).float().expand(time, 1, n, n).contiguous())
    else:
        A = trained_blocks(time)
    b = uniform(rng, time, 1, n)
    if where == "last":
        # A loss on the last state alone.
        b[1:] = 0
    wide = solved(A.form(*[t.double() for t in A.tensors]), b.double(), "sequential")
    return A, b, wide, solved(A, b, "sequential")


@pytest.mark.parametrize("schedule", ["chunked", "chunked:32", "chunked:256", "blelloch", "relaxed"])
@pytest.mark.parametrize("where", ["all", "last"])
@pytest.mark.parametrize("kind", ["trained", "orthogonal"])
def test_long_sequences_stay_as_accurate_as_a_loop(kind: str, schedule: str, where: str) -> None:
    A, b, wide, loop = long_sequence(kind, where)
    ours = solved(A, b, schedule)
    for name, expected in wide.items():
        # Guessing stops where what is left is nothing beside the largest state.
        error = _error if schedule == "relaxed" else _step_error
        sequential, actual = (error(of[name], expected) for of in (loop, ours))
        assert actual <= 10 * sequential, name


#: Matrices, or diagonals, of which no power is much larger than another.
EQUAL: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "orthogonal": lambda rng: torch.linalg.qr(torch.from_numpy(rng.standard_normal((12, 12))))[0].numpy(),
    "reflection": lambda rng: reflections(12, 1, rng),
    "reflections": lambda rng: reflections(12, 12, rng),
    "rotations": lambda rng: scipy.linalg.block_diag(*(rotation(*rng.choice(SIDES)) for _ in range(6))),
    "permutation": lambda rng: scaled_permutation(rng.permutation(12), rng.choice([1, 1.25], 12)),
    "signs": lambda rng: rng.choice([-1.0, 1.0], 12),
    "memory": lambda rng: 1 - 2.0 ** -rng.integers(8, 16, 12) / 3,
}
#: Of right triangles.
SIDES = [(3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25)]


def rotation(a: int, b: int, c: int) -> np.ndarray:
    return np.array([[a, -b], [b, a]]) / c


def scaled_permutation(order: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return scale[:, None] * np.eye(len(order))[order] / scale


def equal_steps(form: str, kind: str, time: int, seeds: int) -> Any:
    """The same matrix at each step, another one for each sample."""
    matrices = np.stack([EQUAL[kind](np.random.default_rng(seed)) for seed in range(seeds)])
    steps = torch.from_numpy(matrices).float().expand(time, *matrices.shape)
    if matrices.ndim == 2:
        return Diagonal(steps.contiguous())
    if form == "dense":
        return Dense(steps.contiguous())
    if form == "scaled":
        # One matrix for all samples; the steps are its product with what float32 has of 0.8.
        return Scaled(steps[0, 0] / 0.8, steps.new_full((time, seeds, len(matrices[0])), 0.8))
    pattern = Pattern.from_scipy(scipy.sparse.csr_array((matrices != 0).any(axis=0)))
    rows, columns = (torch.from_numpy(places) for places in (matrices != 0).any(axis=0).nonzero())
    return Sparse(pattern, steps[:, :, rows, columns].transpose(1, 2).contiguous())


@functools.lru_cache(maxsize=1)
def solved_by_a_loop(
    form: str, kind: str, where: str
) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A recurrence, and its solution in float64 and in float32."""
    time, seeds = 5_000, 3
    A, b = equal_steps(form, kind, time, seeds), uniform(np.random.default_rng(seeds), time, seeds, 12)
    if where == "last":
        b[1:] = 0
    wide = solved(A.form(*[t.double() for t in A.tensors]), b.double(), "sequential")
    return A, b, wide, solved(A, b, "sequential")


@pytest.mark.parametrize(
    ("where", "schedule"),
    [
        *(("all", name) for name in ("chunked", "chunked:3", "blelloch", "relaxed:32")),
        *(("last", name) for name in ("chunked", "blelloch")),
        *(pytest.param("all", f"chunked:{steps}", marks=pytest.mark.full) for steps in (32, 256)),
        *(pytest.param("last", f"chunked:{steps}", marks=pytest.mark.full) for steps in (3, 32, 256)),
        pytest.param("last", "relaxed:32", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("form", "kind"), [*(("dense", kind) for kind in EQUAL), ("scaled", "reflection"), ("sparse", "rotations")]
)
def test_what_equal_steps_round_does_not_add_up(form: str, kind: str, where: str, schedule: str) -> None:
    """Each chunk's matrix has the same rounding, where a loop rounds other numbers at each step.

    Let products of steps have norms of at most κ. What is rounded within a chunk is a loop's error at its end less, at
    most κ times, that at its start; and the state that it starts from was rounded, which is carried along. Both are
    shares of the largest state in the chunk.
    """
    A, b, wide, loop = solved_by_a_loop(form, kind, where)
    condition, eps = A.size**0.5, torch.finfo(b.dtype).eps
    actual = solved(A, b, schedule)
    for name, expected in wide.items():
        for sample in range(b.shape[1]):
            sequential, error = (_chunk_error(of[name][:, sample], expected[:, sample]) for of in (loop, actual))
            # What is rounded in another order has another error, of the same size.
            assert error <= 2 * (1 + condition) * sequential + (A.size + 2) * condition * eps, (name, sample)


def solved(A: Any, b: torch.Tensor, schedule: str) -> dict[str, torch.Tensor]:
    """The states, and the gradients of `b` for a loss on the last one or, where all have one, on all."""
    b = b.clone().requires_grad_()
    h = linear_recurrence(A, b, schedule=schedule)
    of_last, of_all = (torch.autograd.grad(loss, b, retain_graph=True)[0] for loss in (h[-1].sum(), h.sum()))
    return {"states": h.detach(), "of last": of_last, "of all": of_all}


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def _step_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of any step, as a share of the step's own size, down to where float32 has no digits left."""
    size = expected.abs().amax(dim=(1, 2))
    there = size > 1e-30
    return float(((actual.double() - expected).abs().amax(dim=(1, 2))[there] / size[there]).max())


def _chunk_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of any step, as a share of the largest state within a chunk of it."""
    largest = torch.nn.functional.max_pool1d(expected.abs().amax(dim=1)[None], 2 * 256 + 1, stride=1, padding=256)[0]
    return float(((actual.double() - expected).abs().amax(dim=1) / largest).max())


@pytest.mark.parametrize("form", FORMS)
def test_matrices_print_their_sizes(form: str) -> None:
    assert repr(blocks(form, 4, 2, 3)) == f"<{form.title()} 4 steps of 3 × 3, batch 2, torch.float64>"


def test_edges() -> None:
    for shape in ((0, 2, 3), (4, 0, 3), (4, 2, 0)):
        b = torch.zeros(shape, requires_grad=True)
        for schedule in SCHEDULES:
            h = linear_recurrence(Dense(torch.zeros(shape[0], shape[1], shape[2], shape[2])), b, schedule=schedule)
            assert h.shape == shape
            h.sum().backward()


def test_strided_operands() -> None:
    A, b = blocks("dense", 5, 2, 3), torch.randn(3, 2, 5, dtype=torch.float64).permute(2, 1, 0)
    close(linear_recurrence(A, b), loop(A, b, torch.zeros(2, 3, dtype=torch.float64), False), 1e-12)


def test_a_nan_stays_in_its_sample() -> None:
    A, b = blocks("scaled", 50, 3, 4), torch.randn(50, 3, 4, dtype=torch.float64)
    clean = linear_recurrence(A, b)
    b[20, 1] = float("nan")
    for schedule in SCHEDULES:
        actual = linear_recurrence(A, b, schedule=schedule)
        close(actual[:, [0, 2]], clean[:, [0, 2]], 1e-12)
        assert bool(actual[20:, 1].isnan().all())


def test_relaxed_falls_back_where_nothing_contracts() -> None:
    A = Dense(1.05 * torch.linalg.qr(torch.randn(40, 1, 4, 4, dtype=torch.float64))[0])
    b, reports = torch.randn(40, 1, 4, dtype=torch.float64), []
    actual = linear_recurrence(A, b, schedule="relaxed:4", reports=reports)
    close(actual, loop(A, b, torch.zeros(1, 4, dtype=torch.float64), False), 1e-12)
    assert reports[0].methods == ["relaxed", "chunked"]


def test_gradients_of_gradients_are_refused() -> None:
    A, b = blocks("diagonal", 4, 1, 2), torch.randn(4, 1, 2, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(linear_recurrence(A, b).sum(), b, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear recurrences cannot be differentiated twice"):
        first.sum().backward()


ONES = torch.ones(4, 2, 3)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "A": (
        lambda: linear_recurrence(ONES, ONES),
        TypeError,
        "A is a Tensor; expected Dense, Diagonal",
    ),
    "b's rank": (lambda: linear_recurrence(Diagonal(ONES), ONES[0]), ValueError, r"b has shape \(2, 3\)"),
    "b's dtype": (lambda: linear_recurrence(Diagonal(ONES), ONES.long()), TypeError, r"b is torch\.int64"),
    "b's device": (lambda: linear_recurrence(Diagonal(ONES), ONES.to("meta")), ValueError, "b is on meta"),
    "steps": (lambda: linear_recurrence(Diagonal(ONES[:3]), ONES), ValueError, "A has 3 steps of 2 samples, 3 × 3"),
    "h0": (lambda: linear_recurrence(Diagonal(ONES), ONES, ONES[0, :1]), ValueError, r"h0 has shape \(1, 3\)"),
    "mixed": (lambda: linear_recurrence(Diagonal(ONES), ONES.double()), TypeError, "convert one of them"),
    "schedule": (lambda: linear_recurrence(Diagonal(ONES), ONES, schedule="fast"), ValueError, "schedule is 'fast'"),
    "chunk": (lambda: linear_recurrence(Diagonal(ONES), ONES, schedule="chunked:0"), ValueError, "schedule is"),
    "square": (lambda: Dense(torch.ones(4, 2, 3, 5)), ValueError, "expected square matrices"),
    "W": (lambda: Scaled(torch.ones(2, 2), ONES), ValueError, r"W has shape \(2, 2\); expected \(3, 3\)"),
    "pattern": (lambda: Sparse(np.eye(3), ONES), TypeError, "pattern is an ndarray; expected a Pattern"),
    "values": (
        lambda: Sparse(Pattern.from_scipy(scipy.sparse.eye(3)), torch.ones(4, 2, 1)),
        ValueError,
        r"values has shape \(4, 2, 1\); expected \(time, 3, batch\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_auto_picks_by_length_batch_size_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacsparse.recurrence.solvers.choice.thread_count", lambda: 16)
    for time, batch, expected, executed, reason in (
        (9000, 1, "chunked", "chunked:128", "enough for chunks, which take 3 vectors through each step"),
        (100, 1, "sequential", "linear", "fewer than 4 chunks of 128 steps for each"),
        (9000, 16, "sequential", "linear", "too few for chunks, which take 3 vectors through each step"),
    ):
        reports: list[Report] = []
        linear_recurrence(Diagonal(torch.ones(time, batch, 3)), torch.ones(time, batch, 3), reports=reports)
        (report,) = reports
        assert report.methods == [expected]
        assert report.reason == f"{batch} samples of {time} steps and 3 elements on 16 workers: {reason}"
        assert report.schedule is not None and report.schedule.name == executed


@pytest.mark.parametrize("schedule", ["chunked", "chunked:30", "blelloch"])
def test_products_that_overflow_are_gone_through_step_by_step(schedule: str) -> None:
    q = torch.linalg.qr(torch.randn(5, 5))[0]
    A = Dense((2.5 * q).expand(600, 2, 5, 5))
    b = torch.zeros(600, 2, 5)
    b[-50:] = torch.randn(50, 2, 5)
    reports: list[Report] = []
    actual = linear_recurrence(A, b, schedule=schedule, reports=reports)
    close(actual, linear_recurrence(A, b, schedule="sequential"), 1e-5)
    # A power of 30 fits float32, and those are composed in float64.
    lost = 2 if schedule == "chunked" else 0
    assert reports[0].methods == [schedule.partition(":")[0], *(["sequential"] if lost else [])]
    assert reports[0].fallback_samples == lost


@pytest.mark.parametrize("form", FORMS)
def test_operands_of_any_layout(form: str) -> None:
    A = blocks(form, 4, 2, 3)
    b, h0 = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 2, 4), (3, 2)))
    b, h0 = b.permute(2, 1, 0), h0.T.requires_grad_()
    assert not b.is_contiguous() and not h0.is_contiguous()
    (actual,) = torch.autograd.grad(linear_recurrence(A, b, h0).sum(), h0)
    (expected,) = torch.autograd.grad(loop(A, b, h0, False).sum(), h0)
    close(actual, expected, 1e-12)


def test_what_is_added_may_change_afterwards() -> None:
    A, b = blocks("dense", 4, 2, 3), torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    given = b * 1
    h = linear_recurrence(A, given)
    given.data.zero_()
    with torch.no_grad():
        given.zero_()
    assert torch.autograd.grad(h.sum(), b)[0].isfinite().all()


def test_long_diagonals_stay_diagonal() -> None:
    d = torch.rand(3000, 1, 200)
    reports: list[Report] = []
    actual = linear_recurrence(Diagonal(d), torch.ones(3000, 1, 200), schedule="blelloch", reports=reports)
    close(actual, linear_recurrence(Diagonal(d), torch.ones(3000, 1, 200), schedule="sequential"), 1e-5)
    assert reports[0].methods == ["blelloch"]
