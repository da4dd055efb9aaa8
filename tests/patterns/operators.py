"""Every operator that has a rule, as modules and sample shapes that hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

aten = torch.ops.aten
Case = tuple[nn.Module, tuple[int, ...]]
Cases = st.SearchStrategy[Case]

sizes = st.integers(1, 5)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
amounts, positive, flags = st.floats(-2, 2), st.floats(0.1, 2), st.booleans()


class Apply(nn.Module):
    """A function of the input and of constants."""

    def __init__(self, function: Callable[..., torch.Tensor], *constants: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.count = len(constants)
        for place, constant in enumerate(constants):
            self.register_buffer(f"constant{place}", constant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *(getattr(self, f"constant{place}") for place in range(self.count)))


def constant(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pair(low: int, high: int, axes: int = 2) -> st.SearchStrategy[Any]:
    """One number for all axes, or one for each."""
    numbers = st.integers(low, high)
    return numbers | st.tuples(*[numbers] * axes)


def lengths(axes: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes of so many axes, smaller where there are more."""
    return st.tuples(*[st.integers(1, (9, 7, 4)[axes - 1])] * axes)


# Convolution and linear layers.


@st.composite
def convolutions(draw: st.DrawFn, axes: int = 2) -> Case:
    groups = draw(st.integers(1, 3))
    into, out = groups * draw(st.integers(1, 3 if axes < 3 else 1)), groups * draw(st.integers(1, 3 if axes < 3 else 2))
    padding = draw(pair(0, 3, axes) | st.sampled_from(["same", "valid"]))
    stride = 1 if padding == "same" else draw(pair(1, 3, axes))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    kernel = draw(pair(1, 4 if axes < 3 else 3, axes))
    module = kind(into, out, kernel, stride, padding, draw(pair(1, 3, axes)), groups, draw(flags), dtype=torch.float64)
    return module, (into, *draw(lengths(axes)))


@st.composite
def transposed_convolutions(draw: st.DrawFn, axes: int = 2) -> Case:
    groups = draw(st.integers(1, 2))
    into, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    stride, dilation = draw(pair(1, 3, axes)), draw(pair(1, 2, axes))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    extra = draw(pair(0, 2, axes))
    sizes_ = (draw(pair(1, 3, axes)), stride, draw(pair(0, 2, axes)), extra, groups, draw(flags), dilation)
    module = kind(into, out, *sizes_, dtype=torch.float64)
    return module, (into, *draw(lengths(axes).map(lambda each: tuple(min(4, size) for size in each))))


@st.composite
def raw_convolutions(draw: st.DrawFn) -> Case:
    axes, transposed = draw(st.integers(1, 2)), draw(flags)
    (module, shape) = draw((transposed_convolutions if transposed else convolutions)(axes))
    if isinstance(module.padding, str):
        module.padding = (0,) * axes
    rest = (module.stride, module.padding, module.dilation, transposed, module.output_padding, module.groups)
    return Apply(lambda x, w: aten.convolution(x, w, None, *rest), module.weight.detach()), shape


@st.composite
def linears(draw: st.DrawFn) -> Case:
    into, lead = draw(st.integers(1, 9)), draw(st.lists(st.integers(1, 3), max_size=2))
    return nn.Linear(into, draw(st.integers(1, 9)), draw(flags), dtype=torch.float64), (*lead, into)


@st.composite
def single_features(draw: st.DrawFn) -> Case:
    """A linear layer whose weight has one dimension."""
    into, lead = draw(st.integers(1, 9)), draw(st.lists(st.integers(1, 3), max_size=2))
    weight = constant(into) * (torch.rand(into) < draw(st.sampled_from([0.5, 1])))
    return Apply(lambda x, w: functional.linear(x, w), weight), (*lead, into)


# Orders and places.


@st.composite
def orderings(draw: st.DrawFn, kind: str) -> Case:
    # All different: of equal ones either may come first.
    shape = draw(shapes)
    axis = draw(st.integers(1, len(shape)))
    size, falling = shape[axis - 1], draw(flags)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(0, 0.01, int(torch.tensor(shape).prod()), dtype=x.dtype).reshape(shape)

    count = draw(st.integers(1, size))
    function = {
        "sort": lambda x: aten.sort(apart(x), axis, falling)[0],
        "topk": lambda x: aten.topk(apart(x), count, axis, falling)[0],
    }[kind]
    return Apply(function), shape


@st.composite
def unpoolings(draw: st.DrawFn, axes: int) -> Case:
    channels, sizes_ = draw(st.integers(1, 2)), draw(st.tuples(*[st.integers(2, 4)] * axes))
    pool = (functional.max_pool2d, functional.max_pool3d)[axes - 2]
    unpool = (functional.max_unpool2d, functional.max_unpool3d)[axes - 2]

    def run(x: torch.Tensor) -> torch.Tensor:
        y, places = pool(x, 2, return_indices=True)
        return unpool(y, places, 2, output_size=x.shape[2:])

    return Apply(run), (channels, *sizes_)


@st.composite
def grid_samples(draw: st.DrawFn, axes: int) -> Case:
    channels, image, out = draw(st.integers(1, 2)), draw(lengths(axes)), draw(lengths(axes))
    image, out = (tuple(min(3, size) for size in each) for each in (image, out))
    options = {"padding_mode": draw(st.sampled_from(["zeros", "border"])), "align_corners": draw(flags)}
    grid, number = constant(1, *out, axes), int(torch.tensor(out).prod()) * axes
    if draw(flags):
        return Apply(lambda x, g: functional.grid_sample(x, g.expand(x.shape[0], *g.shape[1:]), **options), grid), (
            channels,
            *image,
        )
    picture = constant(1, channels, *image)
    return Apply(
        lambda x, p: functional.grid_sample(
            p.expand(x.shape[0], *p.shape[1:]), x.sin().reshape(x.shape[0], *out, axes), **options
        ),
        picture,
    ), (number,)


@st.composite
def distances(draw: st.DrawFn) -> Case:
    points, others, width, order = (draw(st.integers(1, 3)) for _ in range(4))
    if draw(flags):
        return Apply(lambda x, c: aten._cdist_forward(x, c, float(order), None), constant(1, others, width)), (
            points,
            width,
        )
    return Apply(lambda x: aten._cdist_forward(x[:, :points], x[:, points:], float(order), None)), (
        points + others,
        width,
    )


@st.composite
def linear_systems(draw: st.DrawFn, kind: str) -> Case:
    """Systems with dominant diagonals, whose matrix, right side or both are the input."""
    size, columns, left, upper, ones = draw(sizes), draw(sizes), draw(flags), draw(flags), draw(flags)
    varies = draw(st.sampled_from(["matrix", "right", "both"]))
    diagonal = 8 * size * torch.eye(size, dtype=torch.float64)

    def run(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        a = diagonal + (c if varies == "right" else x)[..., :size]
        b = (c.expand(len(x), *c.shape) if varies == "matrix" else x)[..., size:]
        if kind == "inv":
            return torch.linalg.inv(a) @ b
        if kind == "solve_triangular":
            # With ones on the diagonal, other elements are as small.
            options = {"upper": upper, "left": left, "unitriangular": ones}
            return torch.linalg.solve_triangular(a / (8 * size), b if left else b.mT, **options)
        return torch.linalg.solve(a, b[..., 0]) if ones else torch.linalg.solve(a, b if left else b.mT, left=left)

    return Apply(run, constant(size, size + columns)), (size, size + columns)


@st.composite
def matrix_functions(draw: st.DrawFn, kind: str) -> Case:
    """Of matrices whose eigenvalues, or singular values, are apart."""
    size, lead = draw(st.integers(2, 3)), draw(st.lists(st.integers(1, 2), max_size=1))
    rows = draw(st.integers(1, 3)) if kind in ("linalg_pinv", "_linalg_svd", "linalg_qr") else size
    number, upper = draw(st.integers(0, 1)), draw(flags)
    diagonal = torch.zeros(rows, size, dtype=torch.float64)
    diagonal.diagonal().copy_(8 * torch.arange(1.0, min(rows, size) + 1))
    function = {
        "_linalg_det": lambda x: aten._linalg_det(x + diagonal)[0],
        "_linalg_slogdet": lambda x: aten._linalg_slogdet(x + diagonal)[1],
        "linalg_matrix_exp": lambda x: aten.linalg_matrix_exp(x * 0.3),
        "linalg_pinv": lambda x: torch.linalg.pinv(x + diagonal),
        "_linalg_eigh": lambda x: torch.linalg.eigh(x + x.mT + diagonal)[number],
        "_linalg_svd": lambda x: torch.linalg.svd(x + diagonal, full_matrices=False)[2 * number],
        "linalg_lu_factor_ex": lambda x: aten.linalg_lu_factor_ex(x + diagonal)[0],
        "linalg_qr": lambda x: torch.linalg.qr(x + diagonal if rows >= size else (x + diagonal).mT)[number],
        "linalg_cholesky_ex": lambda x: torch.linalg.cholesky(x + x.mT + 2 * diagonal, upper=upper),
        "lu_unpack": lambda x: torch.lu_unpack(
            x, torch.arange(size, 0, -1, dtype=torch.int32).clamp(min=1).expand(x.shape[:-1]).sort(-1)[0]
        )[1 + number],
    }[kind]
    return Apply(function), (*lead, rows, size)


@st.composite
def factor_solves(draw: st.DrawFn) -> Case:
    """Systems by their factors, which are the input, the right side, or both."""
    size, columns, left, adjoint = draw(sizes), draw(sizes), draw(flags), draw(flags)
    varies, copies = draw(st.sampled_from(["factors", "right", "both"])), draw(st.integers(0, 2))
    diagonal = 8 * size * torch.eye(size, dtype=torch.float64)
    pivots = torch.arange(1, size + 1, dtype=torch.int32)

    def run(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        a = diagonal + (c if varies == "right" else x)[..., :size]
        b = (c.expand(len(x), *c.shape) if varies == "factors" else x)[..., size:]
        a, b = a.expand(len(x), size, size), b if left else b.mT
        if copies:
            # Several systems of one matrix.
            a, b = a[:, None], b[:, None] * torch.arange(1.0, copies + 1, dtype=b.dtype)[:, None, None]
        return torch.linalg.lu_solve(a, pivots.expand(a.shape[:-1]), b, left=left, adjoint=adjoint)

    return Apply(run, constant(size, size + columns)), (size, size + columns)


class Backward(nn.Module):
    """The backward pass of a module at a constant, as a function of the gradient."""

    def __init__(self, operator: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self.operator = operator
        self.register_buffer("x", x)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = self.x.expand(len(gradient), *self.x.shape[1:]).clone().requires_grad_()
            return torch.autograd.grad(self.operator(x), x, gradient, create_graph=True)[0]


@st.composite
def backward_passes(draw: st.DrawFn, operator: str) -> Case:
    """The backward pass of an operator, which is made of others at some sizes."""
    module, shape = draw(OPERATORS[operator].filter(lambda case: _has_derivative(*case)))
    assume(not has_other_derivative(operator, module, shape))
    x = constant(1, *shape)
    return Backward(module, x), tuple(module(x).shape[1:])


def has_other_derivative(operator: str, module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether PyTorch's derivative of a backward pass is wrong: that of antialiasing from one position or to one."""
    if not operator.endswith("_aa"):
        return False
    return 1 in (*shape[1:], *module(torch.zeros((1, *shape), dtype=torch.float64)).shape[2:])


def _has_derivative(module: nn.Module, shape: tuple[int, ...]) -> bool:
    x = torch.zeros((1, *shape), dtype=torch.float64, requires_grad=True)
    inner = getattr(module, "inner", module)
    try:
        y, smaller = module(x), inner(x.detach() - 1)
    except (RuntimeError, ValueError, IndexError):
        return False
    # A dilated window may lie wholly in the padding; PyTorch's backward then writes outside its tensor.
    return y.requires_grad and bool(torch.isfinite(smaller).all())


@st.composite
def bilinears(draw: st.DrawFn) -> Case:
    left, right, out = (draw(st.integers(1, 3)) for _ in range(3))
    layer = nn.Bilinear(left, right, out, dtype=torch.float64)
    apply = Apply(lambda x: layer(x[..., :left], x[..., left:]))
    apply.inner = layer
    return apply, (*draw(st.lists(st.integers(1, 2), max_size=1)), left + right)


@st.composite
def scatter_reductions(draw: st.DrawFn) -> Case:
    rows, columns, sources = (draw(st.integers(1, 3)) for _ in range(3))
    how, includes = draw(st.sampled_from(["sum", "mean", "prod", "amax", "amin"])), draw(flags)
    index = torch.tensor([draw(st.integers(0, rows - 1)) for _ in range(sources)])[:, None].expand(-1, columns)

    def run(x: torch.Tensor) -> torch.Tensor:
        leading, source = x[:, :rows], x[:, rows:]
        return torch.scatter_reduce(leading, 1, index.expand(x.shape[0], -1, -1), source, how, include_self=includes)

    return Apply(run), (rows + sources, columns)


#: Without any, PyTorch takes the samples for channels.
channels = st.lists(st.integers(1, 3), max_size=1)


@st.composite
def max_pools(draw: st.DrawFn, axes: int = 2) -> Case:
    kernel = draw(pair(1, 4 if axes < 3 else 2, axes))
    low = min(kernel) if isinstance(kernel, tuple) else kernel
    kind = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[axes - 1]
    stride, padding = draw(st.none() | pair(1, 4, axes)), draw(st.integers(0, low // 2))
    module = kind(kernel, stride, padding, draw(pair(1, 3 if axes < 3 else 1, axes)), ceil_mode=draw(flags))
    return module, (*draw(channels), *draw(lengths(axes)))


@st.composite
def pools_with_indices(draw: st.DrawFn, axes: int) -> Case:
    module, shape = draw(max_pools(axes))
    pool = (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)[axes - 2]
    numbers = [each if isinstance(each, tuple) else (each,) * axes for each in _pool_sizes(module)]
    apply = Apply(lambda x: pool(x, *numbers, module.ceil_mode)[0])
    apply.inner = module
    return apply, shape


def _pool_sizes(module: Any) -> tuple[Any, ...]:
    return module.kernel_size, module.stride, module.padding, module.dilation


@st.composite
def average_pools(draw: st.DrawFn, axes: int = 2) -> Case:
    kernel = draw(pair(1, 4 if axes < 3 else 2, axes))
    low = min(kernel) if isinstance(kernel, tuple) else kernel
    kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[axes - 1]
    override = [] if axes == 1 else [draw(st.none() | st.integers(1, 5))]
    stride, padding = draw(st.none() | pair(1, 4, axes)), draw(st.integers(0, low // 2))
    return kind(kernel, stride, padding, draw(flags), draw(flags), *override), (*draw(channels), *draw(lengths(axes)))


@st.composite
def adaptive_pools(draw: st.DrawFn, how: str, axes: int = 2) -> Case:
    one = st.integers(1, 9 if axes < 3 else 4)
    size = draw(one if axes == 1 else one | st.tuples(*[st.none() | one] * axes))
    return getattr(nn, f"Adaptive{how}Pool{axes}d")(size), (*draw(channels), *draw(lengths(axes)))


@st.composite
def interpolations(draw: st.DrawFn, mode: str, axes: int, antialias: bool = False) -> Case:
    options: dict[str, Any] = {"mode": mode}
    if mode in ("linear", "bilinear", "trilinear", "bicubic"):
        options["align_corners"] = draw(flags)
    if antialias:
        options["antialias"] = True
    if draw(flags):
        options["size"] = tuple(draw(st.integers(1, 6)) for _ in range(axes))
    else:
        options["scale_factor"] = draw(st.sampled_from([1.0, 1.5, 2.0, 3.0]))
        options["recompute_scale_factor"] = draw(flags)
    return Apply(lambda x: functional.interpolate(x, **options)), (draw(st.integers(1, 2)), *draw(lengths(axes)))


# Lines: softmax and normalisation.


@st.composite
def along_an_axis(draw: st.DrawFn, function: Callable[..., torch.Tensor]) -> Case:
    shape = draw(shapes)
    axis = draw(st.integers(1, len(shape)))
    return Apply(lambda x: function(x, axis - (len(shape) + 1 if axis % 2 else 0))), shape


def _with_weights(module: Any) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


@st.composite
def line_norms(draw: st.DrawFn, kind: Any) -> Case:
    shape = draw(shapes)
    last = shape[-draw(st.integers(1, len(shape))) :]
    options = {"bias": draw(flags)} if kind is nn.LayerNorm else {}
    return _with_weights(
        kind(last, eps=draw(st.sampled_from([1e-5, 0.1])), elementwise_affine=draw(flags), **options)
    ), shape


@st.composite
def group_norms(draw: st.DrawFn) -> Case:
    groups, axes = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    channels = groups * draw(st.integers(1, 3))
    return _with_weights(nn.GroupNorm(groups, channels, affine=draw(flags))), (
        channels,
        *(draw(sizes) for _ in range(axes)),
    )


@st.composite
def instance_norms(draw: st.DrawFn) -> Case:
    axes, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[axes - 1]
    module = _with_weights(kind(channels, affine=draw(flags), track_running_stats=draw(flags)))
    if module.track_running_stats:
        _draw_statistics(module)
    return module.eval(), (channels, *(draw(st.integers(2, 4)) for _ in range(axes)))


def _draw_statistics(module: Any) -> None:
    module.running_mean.normal_()
    module.running_var.uniform_(0.1, 3)


@st.composite
def batch_norms(draw: st.DrawFn) -> Case:
    channels, axes = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes]
    module = _with_weights(kind(channels, affine=draw(flags)).eval())
    _draw_statistics(module)
    return module, (channels, *(draw(st.integers(1, 4)) for _ in range(axes)))


@st.composite
def functional_batch_norms(draw: st.DrawFn) -> Case:
    module, shape = draw(batch_norms())
    leading = (module.weight, module.bias) if module.affine else (None, None)
    call = aten._native_batch_norm_legit_no_training
    numbers = (module.momentum, module.eps)
    apply = Apply(lambda x: call(x, *leading, module.running_mean, module.running_var, *numbers)[0])
    apply.inner = module
    return apply, shape


@st.composite
def native_layer_norms(draw: st.DrawFn) -> Case:
    module, shape = draw(line_norms(nn.LayerNorm))
    apply = Apply(
        lambda x: aten.native_layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)[0]
    )
    apply.inner = module
    return apply, shape


@st.composite
def native_group_norms(draw: st.DrawFn) -> Case:
    module, shape = draw(group_norms())
    channels, positions = shape[0], int(torch.tensor(shape[1:]).prod())

    def run(x: torch.Tensor) -> torch.Tensor:
        size = (x.shape[0], channels, positions)
        return aten.native_group_norm(x, module.weight, module.bias, *size, module.num_groups, module.eps)[0]

    apply = Apply(run)
    apply.inner = module
    return apply, shape


# Products.


@st.composite
def products(draw: st.DrawFn, kind: str) -> Case:
    """A matrix of constants on either side, or both factors made of the input, broadcast along some axes."""
    heads, rows, inner, columns = (draw(st.integers(1, 3)) for _ in range(4))
    side = draw(st.sampled_from(["left", "right", "both"]))
    if kind == "mm":
        # As torch.export lowers a linear layer on samples that are vectors.
        return Apply(lambda x, c: aten.mm(x, c), constant(inner, columns)), (inner,)
    if kind == "mv":
        return Apply(lambda x, c: aten.mv(x.flatten(0, 1), c).view(-1, rows), constant(inner)), (rows, inner)
    if kind == "addmv":
        apply = lambda x, c: aten.addmv(x.new_ones(1), x.flatten(0, 1), c, alpha=0.5).view(-1, rows)  # noqa: E731
        return Apply(apply, constant(inner)), (rows, inner)
    if kind == "addmm":
        factors = {"beta": draw(amounts), "alpha": draw(st.sampled_from([1.0, 0.5]))}
        if side == "both":
            return Apply(
                lambda x, c: aten.addmm(x[:, :columns], x, c, **factors), constant(inner + columns, columns)
            ), (inner + columns,)
        return Apply(lambda x, b, c: aten.addmm(b, x, c, **factors), constant(columns), constant(inner, columns)), (
            inner,
        )
    function = {"matmul": aten.matmul, "bmm": aten.bmm, "baddbmm": lambda a, c: aten.baddbmm(_zeros(a, c), a, c)}[kind]
    if side == "both":
        twice = Apply(lambda x: function(x[..., :rows, :], x[..., rows:, :].transpose(-1, -2).contiguous()))
        lead = (heads,) if kind == "matmul" else ()
        return twice, (*lead, rows + columns, inner)
    if kind != "matmul":
        other = constant(inner, columns) if side == "left" else constant(rows, inner)
        expanded = (lambda x, c: function(x, c.expand(x.shape[0], -1, -1))) if side == "left" else (
            lambda x, c: function(c.expand(x.shape[0], -1, -1), x)
        )  # fmt: skip
        return Apply(expanded, other), ((rows, inner) if side == "left" else (inner, columns))
    lead = draw(st.sampled_from([(), (heads,), (heads, 1)]))
    # Without heads, the first axis would meet that of the batch.
    leading = draw(st.sampled_from([(), (1,), *([(heads,)] if lead else [])]))
    vector = draw(flags)
    if side == "left":
        other = constant(inner) if vector else constant(*leading, inner, columns)
        return Apply(lambda x, c: aten.matmul(x, c), other), (*lead, rows, inner)
    other = constant(inner) if vector else constant(*leading, rows, inner)
    return Apply(lambda x, c: aten.matmul(c, x), other), (*lead, inner, columns)


def _zeros(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a.new_zeros((a.shape[0], a.shape[1], c.shape[2]))


@st.composite
def attentions(draw: st.DrawFn) -> Case:
    heads, queries, keys, width, values = (draw(st.integers(1, 3)) for _ in range(5))
    causal = draw(flags)
    # Some queries may attend to no key at all.
    allowed = torch.rand(queries, keys) > 0.5
    added = constant(heads, queries, keys)
    mask = None if causal else draw(st.sampled_from([None, allowed, added, added.masked_fill(~allowed, -torch.inf)]))
    parts = [queries * width, keys * width, keys * values]
    leading = draw(st.sampled_from(["q", "k", "v", "qkv"]))
    constants = [constant(heads, *size) for size in ((queries, width), (keys, width), (keys, values))]

    def run(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pieces = x.split(parts, dim=-1)
        q, k, v = (
            one.unflatten(-1, size.shape[1:]) if name in leading else size.expand(x.shape[0], -1, -1, -1)
            for one, name, size in zip(pieces, "qkv", (q, k, v), strict=True)
        )
        return aten.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=draw_scale)

    draw_scale = draw(st.sampled_from([None, 0.5]))
    if draw(flags) and mask is None:
        # Keys and values that all heads share.
        return Apply(
            lambda x: aten.scaled_dot_product_attention(
                x[:, :heads], x[:, heads : heads + 1], x[:, heads + 1 :], None, 0.0, causal, enable_gqa=True
            )
        ), (heads + 2, keys, width)
    return Apply(run, *constants), (heads, sum(parts))


# Movement.


@st.composite
def movements(draw: st.DrawFn, kind: str) -> Case:
    shape = draw(shapes)
    rank = len(shape) + 1
    axis = draw(st.integers(1, rank - 1))
    size = shape[axis - 1]
    count = draw(st.integers(1, 3))
    begin = draw(st.integers(0, size - 1))
    order = [0, *draw(st.permutations(range(1, rank)))]
    picks = torch.tensor(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)))
    last, numel = draw(st.integers(0, rank - 2)), int(torch.tensor(shape).prod())
    filling = draw(st.sampled_from([2.0, -torch.inf, torch.nan]))

    def along(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return i.view(-1, *[1] * (rank - 1 - axis)).expand(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def repeated(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return 2 * x.narrow(axis, 0, 1).expand_as(along(x, i))

    whole = {
        "alias": lambda x: aten.alias(x),
        "clone": lambda x: aten.clone(x),
        "contiguous": lambda x: aten.contiguous(x),
        "positive": lambda x: aten.positive(x),
        "view": lambda x: aten.view(x, [x.shape[0], 1, numel]),
        "_unsafe_view": lambda x: aten._unsafe_view(x, [x.shape[0], numel]),
        "reshape": lambda x: aten.reshape(x.transpose(1, -1), [x.shape[0], numel]),
        "view_as": lambda x: aten.view_as(x, x.flatten(1)),
        "flatten": lambda x: aten.flatten(x, 1),
        "unflatten": lambda x: aten.unflatten(x, axis, [1, size]),
        "unsqueeze": lambda x: aten.unsqueeze(x, axis),
        "squeeze": lambda x: aten.squeeze(x.unsqueeze(axis), axis),
        "permute": lambda x: aten.permute(x, order),
        "transpose": lambda x: aten.transpose(x, 1, axis),
        "movedim": lambda x: aten.movedim(x, axis, 1),
        "adjoint": lambda x: aten.adjoint(x[:, None]),
        "hstack": lambda x: aten.hstack([x, x * 2]),
        "vstack": lambda x: aten.vstack([x.transpose(0, 1), x.transpose(0, 1) * 2]).transpose(0, 1),
        "dstack": lambda x: aten.dstack([x[:, None], x[:, None] * 2]),
        "column_stack": lambda x: aten.column_stack([x, x * 2]),
        "flip": lambda x: aten.flip(x, [axis]),
        "roll": lambda x: aten.roll(x, [count], [axis]),
        "rot90": lambda x: aten.rot90(x.unsqueeze(1), count, [1, axis + 1]),
        "expand": lambda x: aten.expand(x.unsqueeze(axis), [-1] * axis + [count] + [-1] * (rank - axis)),
        "expand_as": lambda x: aten.expand_as(x.unsqueeze(1), x.unsqueeze(1).repeat(1, count, *[1] * (rank - 1))),
        "broadcast_to": lambda x: aten.broadcast_to(x.unsqueeze(1), [x.shape[0], count, *shape]),
        "repeat": lambda x: aten.repeat(x, [1, count, *[1] * (rank - 2)]),
        "repeat_interleave": lambda x: aten.repeat_interleave(x, count, axis),
        "tile": lambda x: aten.tile(x, [1, *[1] * (rank - 2), count]),
        "slice": lambda x: aten.slice(x, axis, begin, size, count),
        "select": lambda x: aten.select(x, axis, begin - size if count == 1 else begin),
        "narrow": lambda x: aten.narrow(x, axis, begin, size - begin),
        "index": lambda x, i: aten.index(x, [*[None] * axis, i]),
        "index_select": lambda x, i: aten.index_select(x, axis, i),
        "diagonal": lambda x: aten.diagonal(x.unsqueeze(1), 0, 1, axis + 1),
        "diag_embed": lambda x: aten.diag_embed(x, count - 2),
        "unfold": lambda x: aten.unfold(x, axis, min(size, count), 1),
        "cat": lambda x: aten.cat([x, x.flip(axis), torch.ones_like(x)], axis),
        "stack": lambda x: aten.stack([x, x.flip(axis)], axis),
        "split": lambda x: aten.split(x, count, axis)[-1],
        "split_with_sizes": lambda x: aten.split_with_sizes(x, [begin, size - begin], axis)[1],
        "unsafe_split": lambda x: aten.unsafe_split(x, count, axis)[-1],
        "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes(x, [begin, size - begin], axis)[1],
        "as_strided": lambda x: aten.as_strided(x.contiguous(), [x.shape[0], numel, 2], [numel, 1, 0]),
        "copy": lambda x: torch.ones_like(x).copy_(x),
        "fill": lambda x: (y := x * 2, y.narrow(axis, 0, 1).fill_(2.0))[0],
        "zero": lambda x: (y := x * 2, y.narrow(axis, 0, 1).zero_())[0],
        "overwrite": lambda x: (y := torch.cat([x, x * 2], axis), y.narrow(axis, begin, size).mul_(3))[0],
        "masked_scatter": lambda x: x.masked_scatter(torch.ones(shape[-1]).cumsum(0) > 1, 2 * x[..., :1]),
        "chunk": lambda x: aten.chunk(x, count, axis)[0],
        "unbind": lambda x: aten.unbind(x, axis)[begin],
        "tensor_split": lambda x: aten.tensor_split(x, count, axis)[0],
        "slice_scatter": lambda x: aten.slice_scatter(x, 2 * x.narrow(axis, 0, size - begin), axis, begin),
        "select_scatter": lambda x: aten.select_scatter(x, 3 * x.select(axis, 0), axis, begin),
        "diagonal_scatter": lambda x: aten.diagonal_scatter(
            (y := x.unsqueeze(1).expand(-1, 2, *shape)) * 2, y.diagonal(0, 1, axis + 1) * 3, 0, 1, axis + 1
        ),
        "index_put": lambda x, i: aten.index_put(
            aten.index_put(x, [*[None] * axis, i[:1]], x.narrow(axis, 0, 1) * 2),
            [*[None] * axis, i],
            repeated(x, i),
            accumulate=True,
        ),
        "gather": lambda x, i: aten.gather(x, axis, along(x, i)),
        "t": lambda x: aten.mul(aten.t(x.flatten(1)), 2.0).movedim(1, 0),
        "mT": lambda x: aten.mT(x.unsqueeze(1)),
        "mH": lambda x: aten.mH(x.unsqueeze(1)),
        "swapaxes": lambda x: aten.swapaxes(x, 1, axis),
        "swapdims": lambda x: aten.swapdims(x, 1, axis),
        "moveaxis": lambda x: aten.moveaxis(x, axis, 1),
        "fliplr": lambda x: aten.fliplr(x),
        "flipud": lambda x: aten.flipud(x.transpose(0, 1)).transpose(0, 1),
        "atleast_1d": lambda x: aten.atleast_1d(x),
        "atleast_2d": lambda x: aten.atleast_2d(x),
        "atleast_3d": lambda x: aten.atleast_3d(x),
        "scatter": lambda x, i: aten.scatter(x, axis, along(x, i[:1]), 2 * x.narrow(axis, 0, 1)),
        "scatter_add": lambda x, i: aten.scatter_add(x, axis, along(x, i), repeated(x, i)),
        "index_add": lambda x, i: aten.index_add(x, axis, i, repeated(x, i), alpha=0.5),
        "index_copy": lambda x, i: aten.index_copy(x, axis, i[:1], x.narrow(axis, 0, 1) * 2),
        "index_fill": lambda x, i: aten.index_fill(x, axis, i, filling),
        "tril": lambda x: aten.tril(x.unsqueeze(-1).expand(*x.shape, count), last - 1),
        "triu": lambda x: aten.triu(x.unsqueeze(-1).expand(*x.shape, count), last - 1),
        "pad": lambda x: aten.pad(x, [1, count], "constant", filling),
        "constant_pad_nd": lambda x: aten.constant_pad_nd(x, [count, -1 if shape[-1] > 1 else 0], filling),
    }[kind]
    return Apply(whole, *([picks] if kind in PICKING.split() else [])), shape


@st.composite
def paddings(draw: st.DrawFn, how: str, axes: int) -> Case:
    shape = tuple(size + 1 for size in draw(lengths(axes)))
    pads = [draw(st.integers(0, min(2, shape[axes - 1 - place // 2] - 1))) for place in range(2 * axes)]
    operator = getattr(aten, f"{how}_pad{axes}d")
    return Apply(lambda x: operator(x, pads)), (draw(st.integers(1, 2)), *shape)


@st.composite
def shuffles(draw: st.DrawFn, kind: str) -> Case:
    factor, channels, size = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    if kind == "pixel_shuffle":
        return Apply(lambda x: aten.pixel_shuffle(x, factor)), (channels * factor**2, size, size + 1)
    if kind == "pixel_unshuffle":
        return Apply(lambda x: aten.pixel_unshuffle(x, factor)), (channels, size * factor, 2 * factor)
    return Apply(lambda x: aten.channel_shuffle(x, factor)), (factor * (channels + 1), size, 2)


@st.composite
def windows(draw: st.DrawFn, kind: str) -> Case:
    kernel, dilation, padding, stride = (draw(pair(low, 2)) for low in (1, 1, 0, 1))
    spread = [each if isinstance(each, tuple) else (each, each) for each in (kernel, dilation, padding, stride)]
    images = tuple(draw(st.integers(3, 5)) for _ in range(2))
    channels = draw(st.integers(1, 2))
    if kind == "im2col":
        return Apply(lambda x: aten.im2col(x, *spread)), (channels, *images)
    columns = functional.unfold(torch.zeros(1, channels, *images), *spread)
    return Apply(lambda x: aten.col2im(x, list(images), *spread)), tuple(columns.shape[1:])


# Reductions.


@st.composite
def reductions(draw: st.DrawFn, kind: str) -> Case:
    if kind in ("max", "min") and draw(flags):
        # Of two operands, at each place.
        return draw(binaries(getattr(aten, kind)))
    shape = draw(shapes)
    axes = draw(st.lists(st.integers(1, len(shape)), min_size=1, max_size=len(shape), unique=True))
    if draw(flags):
        axes = [axis - len(shape) - 1 for axis in axes]
    keep, axis = draw(flags), axes[0]
    order = draw(st.sampled_from([1, 2, 3]))
    if kind in ("std", "var", "std_mean", "var_mean"):
        shape = tuple(size + 1 for size in shape)
    function = {
        "sum": lambda x: aten.sum(x, axes, keep),
        "mean": lambda x: aten.mean(x, axes, keep),
        "nansum": lambda x: aten.nansum(_with_nans(x, axis), axes, keep),
        "nanmean": lambda x: aten.nanmean(_with_nans(x, axis), axes, keep),
        "amax": lambda x: aten.amax(x, axes, keep),
        "amin": lambda x: aten.amin(x, axes, keep),
        "nanmedian": lambda x: aten.nanmedian(x, axis, keep)[0],
        "kthvalue": lambda x: aten.kthvalue(x, 1, axis, keep)[0],
        "mode": lambda x: aten.mode(x, axis, keep)[0],
        "max": lambda x: aten.max(x, axis, keep)[0],
        "min": lambda x: aten.min(x, axis, keep)[0],
        "median": lambda x: aten.median(x, axis, keep)[0],
        "prod": lambda x: aten.prod(x, axis, keep),
        "logsumexp": lambda x: aten.logsumexp(x, axes, keep),
        "std": lambda x: aten.std(x + 0, axes, correction=1, keepdim=keep),
        "var": lambda x: aten.var(x, axes, correction=0, keepdim=keep),
        "std_mean": lambda x: aten.std_mean(x, axes, correction=1, keepdim=keep)[order % 2],
        "var_mean": lambda x: aten.var_mean(x, axes, correction=0, keepdim=keep)[order % 2],
        "norm": lambda x: aten.norm(x, order, axes, keep),
        "linalg_vector_norm": lambda x: aten.linalg_vector_norm(x, order, axes, keep),
    }[kind]
    return Apply(function), shape


def _with_nans(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Some, but not along all of a line."""
    return torch.cat([torch.where(x > 0.5, torch.nan, x), x], axis)


@st.composite
def comparisons(draw: st.DrawFn, kind: str) -> Case:
    shape, keep = draw(shapes), draw(flags)
    axis = draw(st.integers(1, len(shape)))
    function = {
        "cosine_similarity": lambda x, y: aten.cosine_similarity(x, y, axis),
        "pairwise_distance": lambda x, y: aten.pairwise_distance(x, y, 2, 0.1, keep),
    }[kind]
    how = draw(st.sampled_from(["left", "right", "both"]))
    if how == "both":
        return Apply(lambda x: function(x, x.flip(-1) * 0.5)), shape
    return Apply(
        (lambda x, c: function(x, c)) if how == "left" else (lambda x, c: function(c, x)), constant(1, *shape)
    ), shape


# Losses.

#: By ATen's name; of an input and a target, which may depend on the input too but for ``soft_margin_loss``.
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse_loss": functional.mse_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": lambda x, y, reduction: functional.huber_loss(x, y, reduction, 0.5),
    "soft_margin_loss": lambda x, y, reduction: functional.soft_margin_loss(x, y.sign(), reduction=reduction),
    "binary_cross_entropy": lambda x, y, reduction: functional.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), y.detach().abs(), reduction=reduction
    ),
    "binary_cross_entropy_with_logits": lambda x, y, reduction: functional.binary_cross_entropy_with_logits(
        x, y, None, reduction=reduction, pos_weight=torch.full((1,), 2.0, dtype=torch.float64)
    ),
}


@st.composite
def losses(draw: st.DrawFn, kind: str) -> Case:
    shape, function = draw(shapes), LOSSES[kind]
    if kind != "soft_margin_loss" and draw(flags):
        return Apply(lambda x: function(x, x.flip(-1) * 0.5, reduction="none")), shape
    return Apply(lambda x, c: function(x, c.expand(x.shape), reduction="none"), constant(*shape)), shape


@st.composite
def margin_losses(draw: st.DrawFn, kind: str) -> Case:
    classes = draw(sizes)
    if kind == "multi_margin_loss":
        label, power, weight = draw(st.integers(0, classes - 1)), draw(st.integers(1, 2)), constant(classes)
        return Apply(
            lambda x, w: functional.multi_margin_loss(
                x, torch.full((len(x),), label), power, weight=w, reduction="none"
            ),
            weight,
        ), (classes,)
    labels = torch.tensor(draw(st.lists(st.integers(-1, classes - 1), min_size=classes, max_size=classes)))
    return Apply(lambda x, t: functional.multilabel_margin_loss(x, t.expand(len(x), -1), reduction="none"), labels), (
        classes,
    )


# Along an axis.


@st.composite
def differences(draw: st.DrawFn) -> Case:
    times = draw(st.integers(0, 3))
    return draw(along_an_axis(lambda x, axis: aten.diff(torch.cat([x] * 4, axis), times, axis)))


@st.composite
def gates(draw: st.DrawFn) -> Case:
    return draw(along_an_axis(lambda x, axis: aten.glu(torch.cat([x, x.flip(axis)], axis), axis)))


# Elementwise.


@st.composite
def prelus(draw: st.DrawFn) -> Case:
    shape = draw(shapes)
    return nn.PReLU(draw(st.sampled_from([1, shape[0]])), draw(amounts), dtype=torch.float64), shape


#: By operator; each on shapes of any kind.
ACTIVATIONS: dict[str, st.SearchStrategy[nn.Module]] = {
    # Not in place: PyTorch's derivative of that is another in the eighth digit.
    "aten.celu": st.builds(nn.CELU, positive),
    "aten.elu": st.builds(nn.ELU, positive, flags),
    "aten.gelu": st.builds(nn.GELU, st.sampled_from(["none", "tanh"])),
    "aten.hardshrink": st.builds(nn.Hardshrink, positive),
    "aten.hardsigmoid": st.builds(nn.Hardsigmoid, flags),
    "aten.hardswish": st.builds(nn.Hardswish, flags),
    "aten.hardtanh": st.builds(lambda low, width: nn.Hardtanh(low, low + width), amounts, positive),
    "aten.leaky_relu": st.builds(nn.LeakyReLU, positive, flags),
    "aten.log_sigmoid": st.builds(nn.LogSigmoid),
    "aten.mish": st.builds(nn.Mish, flags),
    "aten.relu": st.builds(nn.ReLU, flags),
    "aten.relu6": st.builds(nn.ReLU6, flags),
    "aten.rrelu": st.builds(lambda low, width: nn.RReLU(low, low + width).eval(), positive, positive),
    "aten.selu": st.builds(nn.SELU, flags),
    "aten.sigmoid": st.builds(nn.Sigmoid),
    "aten.silu": st.builds(nn.SiLU, flags),
    "aten.softplus": st.builds(nn.Softplus, positive, positive),
    "aten.softshrink": st.builds(nn.Softshrink, positive),
    "aten.softsign": st.builds(nn.Softsign),
    "aten.tanh": st.builds(nn.Tanh),
    "aten.tanhshrink": st.builds(nn.Tanhshrink),
    "aten.threshold": st.builds(nn.Threshold, amounts, amounts, flags),
}

#: Of one operand, where it has a derivative.
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("abs", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "neg")},
    **{name: getattr(torch, name) for name in ("sin", "sinh", "square", "asinh", "sinc", "tan", "rad2deg")},
    "log": lambda x: torch.log(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs() + 1),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 1),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "nan_to_num": lambda x: torch.nan_to_num(x),
    "clamp": lambda x: torch.clamp(x, -0.7, 0.4),
    "clamp_min": lambda x: torch.clamp_min(x, 0.1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "pow": lambda x: torch.pow(x, 3),
    "masked_fill": lambda x: aten.masked_fill.Scalar(x, x > 0.3, 2.0),
}

#: Of two operands.
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: torch.div(x, y.abs() + 1),
    "rsub": lambda x, y: aten.rsub.Tensor(x, y, alpha=3),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "atan2": lambda x, y: torch.atan2(x, y.abs() + 1),
    "logaddexp": torch.logaddexp,
    "hypot": lambda x, y: torch.hypot(x, y.abs() + 1),
    "fmod": lambda x, y: torch.fmod(x, y.abs() + 1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.5),
}


@st.composite
def unaries(draw: st.DrawFn, name: str) -> Case:
    return Apply(UNARY[name]), draw(shapes)


@st.composite
def binaries(draw: st.DrawFn, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Case:
    """With a constant on either side, or two operands made of the input, one of them broadcast."""
    shape = draw(shapes)
    how = draw(st.sampled_from(["left", "right", "same", "broadcast", "over"]))
    if how in ("left", "right"):
        other = constant(*(1 if draw(flags) else size for size in shape))
        return Apply((lambda x, c: function(x, c)) if how == "left" else (lambda x, c: function(c, x)), other), shape
    if how == "same":
        return Apply(lambda x: function(x, x.flip(-1) * 0.5)), shape
    if how == "over":
        # What depends on the input is broadcast over a constant.
        return Apply(lambda x, c: function(x.unsqueeze(1), c), constant(3, *shape)), shape
    return Apply(lambda x: function(x, x.mean(-1, keepdim=True))), shape


def _dropouts(kind: type[nn.Module]) -> Cases:
    return st.tuples(
        st.builds(lambda p: kind(p).eval(), st.floats(0, 0.9)), shapes.filter(lambda shape: len(shape) > 1)
    )


MOVEMENTS = (
    "alias clone contiguous positive view _unsafe_view reshape view_as flatten unflatten unsqueeze squeeze permute "
    "transpose movedim flip roll rot90 expand expand_as broadcast_to repeat repeat_interleave tile slice select narrow "
    "diagonal diag_embed unfold cat stack split split_with_sizes chunk unbind tensor_split "
    "unsafe_split unsafe_split_with_sizes as_strided copy fill zero masked_scatter slice_scatter select_scatter tril "
    "diagonal_scatter triu pad constant_pad_nd t mT mH swapaxes swapdims moveaxis fliplr flipud "
    "atleast_1d atleast_2d atleast_3d adjoint hstack vstack dstack column_stack"
)
PICKING = "index index_select index_put gather scatter scatter_add index_add index_copy index_fill"
REDUCTIONS = (
    "sum mean nansum nanmean amax amin max min median nanmedian kthvalue mode prod logsumexp std var std_mean var_mean "
    "norm linalg_vector_norm"
)

#: Backward passes, with the operators that they belong to.
BACKWARD_PASSES = {
    **{f"aten.avg_pool{axes}d_backward": f"aten.avg_pool{axes}d" for axes in (2, 3)},
    **{f"aten._adaptive_avg_pool{axes}d_backward": f"aten._adaptive_avg_pool{axes}d" for axes in (2, 3)},
    **{f"aten.max_pool{axes}d_with_indices_backward": f"aten.max_pool{axes}d" for axes in (2, 3)},
    **{f"aten.adaptive_max_pool{axes}d_backward": f"aten.adaptive_max_pool{axes}d" for axes in (2, 3)},
    **{f"aten.replication_pad{axes}d_backward": f"aten.replication_pad{axes}d" for axes in (1, 2, 3)},
    **{f"aten.upsample_nearest{axes}d_backward": f"aten.upsample_nearest{axes}d" for axes in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{axes}d_backward": f"aten._upsample_nearest_exact{axes}d" for axes in (1, 2, 3)},
    **{
        f"aten.{name}_backward": f"aten.{name}"
        for name in (
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "masked_scatter"),
        )
    },
}
MATRIX_FUNCTIONS = (
    "_linalg_det _linalg_slogdet _linalg_eigh _linalg_svd linalg_matrix_exp linalg_pinv linalg_lu_factor_ex linalg_qr "
    "linalg_cholesky_ex lu_unpack"
)

#: By ATen's name.
OPERATORS: dict[str, Cases] = {
    **{f"aten.conv{axes}d": convolutions(axes) for axes in (1, 2, 3)},
    **{f"aten.conv_transpose{axes}d": transposed_convolutions(axes) for axes in (1, 2, 3)},
    "aten.convolution": raw_convolutions(),
    "aten.linear": linears() | single_features(),
    **{f"aten.max_pool{axes}d": max_pools(axes) for axes in (1, 2, 3)},
    **{f"aten.max_pool{axes}d_with_indices": pools_with_indices(axes) for axes in (2, 3)},
    **{f"aten.avg_pool{axes}d": average_pools(axes) for axes in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{axes}d": adaptive_pools("Avg", axes) for axes in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{axes}d": adaptive_pools("Max", axes) for axes in (1, 2, 3)},
    "aten._adaptive_avg_pool2d": st.builds(
        lambda size, shape: (Apply(lambda x: aten._adaptive_avg_pool2d(x, [size, size + 1])), (2, *shape)),
        sizes,
        lengths(2),
    ),
    "aten._adaptive_avg_pool3d": st.builds(
        lambda size, shape: (Apply(lambda x: aten._adaptive_avg_pool3d(x, [1, size, 2])), (2, *shape)),
        sizes,
        lengths(3),
    ),
    **{f"aten.upsample_nearest{axes}d": interpolations("nearest", axes) for axes in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{axes}d": interpolations("nearest-exact", axes) for axes in (1, 2, 3)},
    "aten.upsample_linear1d": interpolations("linear", 1),
    "aten.upsample_bilinear2d": interpolations("bilinear", 2),
    "aten.upsample_bicubic2d": interpolations("bicubic", 2),
    "aten.upsample_trilinear3d": interpolations("trilinear", 3),
    "aten._upsample_bilinear2d_aa": interpolations("bilinear", 2, antialias=True),
    "aten._upsample_bicubic2d_aa": interpolations("bicubic", 2, antialias=True),
    "aten.softmax": along_an_axis(torch.softmax),
    "aten.log_softmax": along_an_axis(torch.log_softmax),
    "aten._softmax": along_an_axis(lambda x, axis: aten._softmax(x, axis, False)),
    "aten._log_softmax": along_an_axis(lambda x, axis: aten._log_softmax(x, axis, False)),
    "aten.cumsum": along_an_axis(torch.cumsum),
    "aten.logcumsumexp": along_an_axis(torch.logcumsumexp),
    "jacsparse.gather": movements("overwrite"),
    **{f"aten.{kind}": orderings(kind) for kind in ("sort", "topk")},
    **{f"aten.max_unpool{axes}d": unpoolings(axes) for axes in (2, 3)},
    **{f"aten.grid_sampler_{axes}d": grid_samples(axes) for axes in (2, 3)},
    "aten._cdist_forward": distances(),
    **{f"aten.linalg_{kind}": linear_systems(kind) for kind in ("solve", "solve_triangular", "inv")},
    "aten.linalg_lu_solve": factor_solves(),
    **{f"aten.{kind}": matrix_functions(kind) for kind in MATRIX_FUNCTIONS.split()},
    "aten._trilinear": bilinears(),
    "aten.scatter_reduce": scatter_reductions(),
    "aten.cumprod": along_an_axis(torch.cumprod),
    "aten.cummax": along_an_axis(lambda x, axis: torch.cummax(x, axis)[0]),
    "aten.cummin": along_an_axis(lambda x, axis: torch.cummin(x, axis)[0]),
    "aten.diff": differences(),
    **{f"aten.{kind}": losses(kind) for kind in LOSSES},
    "aten.multi_margin_loss": margin_losses("multi_margin_loss"),
    "aten.multilabel_margin_loss_forward": margin_losses("multilabel_margin_loss"),
    "aten.glu": gates(),
    **{f"aten.{kind}": comparisons(kind) for kind in ("cosine_similarity", "pairwise_distance")},
    "aten.layer_norm": line_norms(nn.LayerNorm),
    "aten.native_layer_norm": native_layer_norms(),
    "aten.rms_norm": line_norms(nn.RMSNorm),
    "aten.group_norm": group_norms(),
    "aten.native_group_norm": native_group_norms(),
    "aten.instance_norm": instance_norms(),
    "aten.batch_norm": batch_norms(),
    "aten._native_batch_norm_legit_no_training": functional_batch_norms(),
    **{f"aten.{kind}": products(kind) for kind in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm")},
    "aten.scaled_dot_product_attention": attentions(),
    **{f"aten.{kind}": movements(kind) for kind in f"{MOVEMENTS} {PICKING}".split()},
    **{f"aten.{how}_pad{axes}d": paddings(how, axes) for how in ("reflection", "replication") for axes in (1, 2, 3)},
    **{f"aten.{kind}": shuffles(kind) for kind in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")},
    **{f"aten.{kind}": windows(kind) for kind in ("im2col", "col2im")},
    **{f"aten.{kind}": reductions(kind) for kind in REDUCTIONS.split()},
    **{name: st.tuples(modules, shapes) for name, modules in ACTIVATIONS.items()},
    "aten.prelu": prelus(),
    "aten.dropout": _dropouts(nn.Dropout),
    "aten.alpha_dropout": _dropouts(nn.AlphaDropout),
    "aten.feature_dropout": _dropouts(nn.Dropout1d),
    "aten.feature_alpha_dropout": _dropouts(nn.FeatureAlphaDropout),
    "aten.identity": st.tuples(st.just(nn.Identity()), shapes),
    "aten._to_copy": st.tuples(st.just(Apply(lambda x, c: aten._to_copy(x, dtype=c.dtype), constant(1))), shapes),
    "aten.to": st.tuples(st.just(Apply(lambda x, c: x.to(c.dtype, copy=True), constant(1))), shapes),
    **{f"aten.{name}": unaries(name) for name in UNARY},
    **{f"aten.{name}": binaries(function) for name, function in BINARY.items()},
}
OPERATORS |= {name: backward_passes(operator) for name, operator in BACKWARD_PASSES.items()}
