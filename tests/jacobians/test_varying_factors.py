"""Products of factors that depend on the input, and functions of few elements, fold as elementwise operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import jacsparse
from jacsparse.jacobians.products import FoldedProducts
from tests.helpers import FLOAT, assert_equal, dense, drawn

TRIANGLES = torch.tensor([[0, 1, 3], [1, 4, 3], [1, 2, 4], [2, 5, 4], [3, 4, 6], [4, 7, 6]])
GRADIENTS, AREAS = drawn(len(TRIANGLES), 2, 3, seed=7), drawn(len(TRIANGLES), 1, 1, seed=8).abs()


def elasticity(
    u: torch.Tensor, triangles: torch.Tensor = TRIANGLES, gradients: torch.Tensor = GRADIENTS
) -> torch.Tensor:
    """The forces of a Saint Venant-Kirchhoff material on the nodes of a mesh of triangles."""
    one = torch.eye(2, dtype=u.dtype)
    deformation = torch.einsum("eij,ejk->eki", gradients, u.view(-1, 2)[triangles]) + one
    strain = 0.5 * (deformation.mT @ deformation - one)
    stress = strain.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] * one + 2 * strain
    forces = torch.einsum("eij,eki->ejk", gradients, deformation @ stress)
    return torch.zeros_like(u).view(-1, 2).index_add(0, triangles.flatten(), forces.reshape(-1, 2)).view(-1)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Points, each turned by a rotation of its own: ``(pairs, 4)``, an angle and a point of three coordinates."""
    angle, points = x[..., 0], x[..., 1:]
    c, s, none, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    rotations = torch.stack([c, -s, none, s, c, none, none, none, one], -1).unflatten(-1, (3, 3))
    return (rotations @ points[..., None])[..., 0]


@pytest.mark.parametrize(
    ("f", "shape", "batched"),
    [
        (elasticity, (16,), False),
        (rotated, (5, 4), False),
        (rotated, (2, 5, 4), True),
        (lambda x: (x[:, :2] @ x[:, 2:].mT).flatten(1), (3, 4, 5), True),
        (lambda x: x.view(3, 4).mT @ x[:3].exp(), (12,), False),
        (lambda x: torch.addmm(x.view(4, 4), x.view(4, 4).sin(), x.view(4, 4), beta=0.5), (16,), False),
        (lambda x: torch.baddbmm(x, x, x.mT, beta=-1).flatten(1), (3, 2, 2), True),
        (lambda x: torch.einsum("bij,bj->bi", x[..., :3], x[..., 3]), (2, 3, 4), True),
        (lambda x: torch.linalg.multi_dot([x, x.mT, x]), (2, 3), False),
    ],
)
def test_values(f: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], batched: bool) -> None:
    for options in ({}, {"create_graph": True}, {"method": "products"}):
        prepared = jacsparse.prepare_jacobian(f, drawn(*shape), batched=batched, **options)
        assert isinstance(prepared._first.evaluator, FoldedProducts)
        for seed in range(3):
            x = drawn(*shape, seed=seed)
            assert_equal(prepared(x), dense(f, x, batched=batched))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Points turned by vectors, by the formula of Rodrigues: ``(points, 6)``."""
    vector, point = x[..., :3], x[..., 3:]
    angle = vector.norm(dim=-1, keepdim=True)
    axis = vector / angle
    dot = (axis * point).sum(-1, keepdim=True)
    return point * angle.cos() + torch.linalg.cross(axis, point) * angle.sin() + axis * dot * (1 - angle.cos())


def hyperelasticity(u: torch.Tensor) -> torch.Tensor:
    """The forces of a neo-Hookean material on the nodes of a mesh of triangles."""
    gradient = torch.einsum("eij,ejk->eki", GRADIENTS, 0.05 * u.view(-1, 2)[TRIANGLES])
    deformation = gradient + torch.eye(2, dtype=u.dtype)
    inverse = torch.linalg.inv(deformation).mT
    stress = deformation - inverse + torch.linalg.det(deformation).abs().log()[:, None, None] * inverse
    forces = torch.einsum("eij,eki->ejk", GRADIENTS, stress * AREAS)
    return torch.zeros_like(u).view(-1, 2).index_add(0, TRIANGLES.flatten(), forces.reshape(-1, 2)).view(-1)


@pytest.mark.parametrize(
    ("f", "shape", "batched"),
    [
        (hyperelasticity, (16,), False),
        (turned, (5, 6), False),
        (turned, (2, 5, 6), True),
        (lambda x: x.view(-1, 3).softmax(1).flatten() * x, (12,), False),
        (lambda x: x.view(len(x), -1, 3).softmax(2).flatten(1) * x, (2, 12), True),
        (lambda x: x.view(-1, 3).norm(dim=1), (12,), False),
        (lambda x: x.view(-1, 2).prod(1)[:, None] * x.view(-1, 2), (12,), False),
        (lambda x: x.view(-1, 4).cumprod(1), (12,), False),
        (lambda x: x.view(len(x), -1, 4).sort(2)[0].flatten(1) * x, (3, 12), True),
        (lambda x: x.view(-1, 4).logsumexp(1) * x.view(-1, 4).var(1), (12,), False),
        (lambda x: functional.max_pool1d(x.view(len(x), 1, -1), 3, 2).flatten(1).sin(), (2, 13), True),
        (lambda x: torch.linalg.solve(x[:, :4].view(-1, 2, 2), x[:, 4:]), (3, 6), True),
        (lambda x: functional.normalize(x.view(-1, 3), dim=1), (12,), False),
        (lambda x: functional.layer_norm(x, x.shape[-1:]), (6, 4), False),
        (lambda x: torch.cdist(x[:, :1], x[:, 1:]).flatten(1), (2, 3, 2), True),
        (nn.Sequential(nn.Softmax(1), nn.LayerNorm(4, dtype=FLOAT)), (3, 4), True),
    ],
)
def test_functions_of_few_elements(
    f: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], batched: bool
) -> None:
    for options in ({"method": "products"}, {"method": "products", "create_graph": True}):
        prepared = jacsparse.prepare_jacobian(f, drawn(*shape), batched=batched, **options)
        assert isinstance(prepared._first.evaluator, FoldedProducts)
        for seed in range(4):
            x = drawn(*shape, seed=seed)
            assert_equal(prepared(x), dense(f, x, batched=batched))
            assert_equal(jacsparse.jacobian(f, x, batched=batched), dense(f, x, batched=batched))


def test_a_large_mesh() -> None:
    """The terms of products are too many for a small function, and few for each entry."""
    size = 52
    corner = (torch.arange(size)[:, None] * (size + 1) + torch.arange(size)).flatten()
    below = torch.stack([corner, corner + size + 1, corner + 1], 1)
    triangles = torch.cat([below, torch.stack([corner + 1, corner + size + 1, corner + size + 2], 1)])
    gradients, u = drawn(len(triangles), 2, 3, seed=1), 0.1 * drawn(2 * (size + 1) ** 2)
    prepared = jacsparse.prepare_jacobian(lambda u: elasticity(u, triangles, gradients), u, batched=False)
    assert isinstance(prepared._first.evaluator, FoldedProducts)
    prepared.check(0.1 * drawn(len(u), seed=2))


def test_compiled_values() -> None:
    prepared = jacsparse.prepare_jacobian(elasticity, drawn(16), batched=False, compile=True)
    assert isinstance(prepared._first.evaluator, FoldedProducts)
    assert_equal(prepared(drawn(16, seed=3)), dense(elasticity, drawn(16, seed=3), batched=False))


def test_gradients_of_values() -> None:
    x = drawn(16).requires_grad_()
    prepared = jacsparse.prepare_jacobian(elasticity, drawn(16), batched=False, create_graph=True)
    matrix: Any = torch.autograd.functional.jacobian(elasticity, x, create_graph=True)
    weights = drawn(*matrix.shape, seed=5)
    gradients = [torch.autograd.grad((of_x * weights).sum(), x)[0] for of_x in (prepared(x).todense(), matrix)]
    assert (gradients[0] - gradients[1]).abs().amax() <= 1e-12 * gradients[1].abs().amax()


def test_coarser_factors() -> None:
    """A factor under autocast is rounded as the function rounds it."""
    x = drawn(2, 3, 3).float()
    f = lambda x: (x @ x.sin()).flatten(1).to(FLOAT)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prepared = jacsparse.prepare_jacobian(f, x, batched=True)
        values = prepared(x)
    expected = dense(f, x.double())
    assert (torch.stack([values.todense(n) for n in range(2)]) - expected).abs().amax() <= 2**-6 * expected.abs().amax()
