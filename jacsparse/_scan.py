"""Back-propagation as a scan: a schedule's steps, run over numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ._chain import Chain, Record, chain, check_input
from ._jacobian import SparseJacobian
from .patterns import Pattern
from .patterns._cuda import allocated
from .patterns._values import batch_last
from .schedule import Schedule, Step, resolve
from .spgemm import ProductPlan, matvec, plan_product

__all__ = ["Scanner", "backward", "vjp"]

#: Bytes of values that a scan holds at once, larger batches being run in slices; and bytes of its plans' index arrays.
MEMORY_LIMIT = 2**30


def check_limit(memory_limit: int | None) -> int:
    """`memory_limit`, or what it is where left out; ValueError where it is no number of bytes."""
    if memory_limit is None:
        return MEMORY_LIMIT
    if not isinstance(memory_limit, int) or isinstance(memory_limit, bool) or memory_limit < 0:
        raise ValueError(f"memory_limit is {memory_limit!r}; expected a number of bytes of at least 0, or None")
    return memory_limit


class Scanner:
    """A chain, a schedule for it and the plans of its products: everything that is decided before the numbers.

    Parameters
    ----------
    chain : Chain
        The stages.
    schedule : Schedule or str
        As `jacsparse.schedule.resolve` takes it.
    memory_limit : int, optional
        Bytes of values to hold at once, and of the plans' index arrays; 1 GiB where left out.

    Raises
    ------
    TypeError, ValueError
        Where the schedule is none or does not fit, or the limit is no number of bytes.
    """

    def __init__(self, chain: Chain, schedule: Schedule | str = "auto", memory_limit: int | None = None) -> None:
        self.chain = chain
        self.schedule = resolve(schedule, len(chain), chain)
        self.memory_limit = check_limit(memory_limit)

    @functools.cached_property
    def stages_of(self) -> dict[int, int]:
        """The stage, from 0, of each value of the schedule that is a stage's transposed Jacobian."""
        return {value: len(self.chain) - value for value in range(1, len(self.chain) + 1)}

    def gradient_of(self, stage: int) -> int:
        """The value of the schedule that is the gradient of a stage's output."""
        return self.schedule.gradients[len(self.chain) - 1 - stage]

    @functools.cached_property
    def plans(self) -> dict[int, ProductPlan]:
        """The plan of each live product of two matrices, by the value that it makes."""
        patterns: dict[int, Pattern] = {}
        plans: dict[int, ProductPlan] = {}
        left_over = self.memory_limit
        for step in self.schedule.live_steps():
            if step.kind != "mm":
                continue
            left, right = (
                patterns[value] if value in patterns else self.chain.stages[self.stages_of[value]].pattern
                for value in (step.left, step.right)
            )
            plan = plan_product(left, right, memory_limit=left_over, winners=True)
            plans[step.out], patterns[step.out] = plan, plan.pattern
            left_over = max(0, left_over - plan.nbytes)
        return plans

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, parameters: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of parameters, for a gradient of its output.

        Parameters
        ----------
        records : sequence of Record
            What the forward pass left, for the whole batch.
        gradient : Tensor, (batch, *out_shape)
            Of the chain's output.
        parameters : iterable of int
            Which, by the ``id`` of the module's.
        for_input : bool
            Whether the input's is wanted too.

        Returns
        -------
        gradient : Tensor or None
            Of the input, ``(batch, *in_shape)``.
        parameter_gradients : dict of int to Tensor
            By ``id``. A parameter of several stages gets their sum.
        """
        asked = set(parameters)
        own = [[key for key in record.parameters if key in asked] for record in records]
        if not for_input and not any(own):
            return None, {}
        run = _Run(self, records, gradient, own, for_input)
        run.execute()
        found: dict[int, torch.Tensor] = {}
        for part in run.parameter_gradients:
            for key, value in part.items():
                found[key] = found[key] + value if key in found else value
        return run.input_gradient, found


class _Run:
    """One pass of the steps over a batch.

    Steps that no product of matrices precedes, or that none follows, run on the whole batch by the operators' own
    backward, which gives their parameters' gradients as well. The rest run in slices of samples: only there matrices
    exist.
    """

    def __init__(
        self,
        scanner: Scanner,
        records: Sequence[Record],
        gradient: torch.Tensor,
        parameters: Sequence[Sequence[int]],
        for_input: bool,
    ) -> None:
        self.scanner, self.records, self.parameters, self.for_input = scanner, records, parameters, for_input
        self.batch = gradient.shape[0]
        self.vectors = {0: gradient}
        stages = [number for number, own in enumerate(parameters) if own or records[number].hooked]
        stages += [0] if for_input else []
        self.wanted = {scanner.gradient_of(number) for number in stages}
        self.steps = scanner.schedule.live_steps(self.wanted)
        self.before, self.sliced, self.after = _parts(
            self.steps, {step.out for step in self.steps if step.kind == "mm"}
        )
        products = [step for step in self.sliced if step.kind == "mm"]
        multiplied = {value for step in products for value in (step.left, step.right)}
        # Stages of several operators that only vectors meet: no matrix of them is made.
        self.through = {
            step.left
            for step in self.sliced
            if step.left in scanner.stages_of
            and step.left not in multiplied
            and scanner.chain.stages[scanner.stages_of[step.left]].operator is None
        }
        self.memory: dict[int, torch.Tensor] = {}
        self.parameter_gradients: list[dict[int, torch.Tensor]] = [{} for _ in records]
        # The gradients of the stages' inputs that their own backward gave.
        self.pulled: dict[int, torch.Tensor] = {}
        self.input_gradient: torch.Tensor | None = None

    def execute(self) -> None:
        """Take all steps, and then the gradients that only need their own stage's."""
        self._by_operators(self.before)
        if self.sliced:
            self._in_slices()
        self._by_operators(self.after)
        for number, own in enumerate(self.parameters):
            for_input = (self.for_input and number == 0) or self.records[number].hooked
            if number not in self.pulled and (own or for_input):
                self._pull_back(number, self.vectors[self.scanner.gradient_of(number)], for_input=for_input)
        if self.for_input:
            self.input_gradient = self.pulled[0]
        for step in self.sliced:
            for value in {step.left, step.right} & self.scanner.stages_of.keys():
                number = self.scanner.stages_of[value]
                if self.records[number].hooked:
                    gradient = self.vectors[self.scanner.gradient_of(number)]
                    _check_hook(self.records[number], gradient, self.pulled[number])

    def _pull_back(self, number: int, gradient: torch.Tensor, *, for_input: bool) -> torch.Tensor:
        """A stage's own backward, hooks and all."""
        found = self.records[number].pull_back(gradient, self.parameters[number], for_input=for_input)
        self.pulled[number], self.parameter_gradients[number] = found
        return self.pulled[number]

    def _record(self, value: int) -> Record:
        return self.records[self.scanner.stages_of[value]]

    def _pattern(self, value: int) -> Pattern:
        plan = self.scanner.plans.get(value)
        return self._record(value).stage.pattern if plan is None else plan.pattern

    def _rows(self, value: int) -> int:
        """Of a matrix of the schedule, whether it is made or not."""
        plan = self.scanner.plans.get(value)
        return math.prod(self._record(value).stage.in_shape) if plan is None else plan.pattern.shape[0]

    def _by_operators(self, steps: Iterable[Step]) -> None:
        for step in steps:
            number = self.scanner.stages_of[step.left]
            self.vectors[step.out] = self._pull_back(number, self.vectors[step.right], for_input=True)

    def _in_slices(self) -> None:
        used_later = self.wanted | {step.right for step in self.after}
        vectors_out = [step.out for step in self.sliced if step.kind == "mv" and step.out in used_later]
        for value in vectors_out:
            step = next(step for step in self.sliced if step.out == value)
            self.vectors[value] = self.vectors[0].new_empty((self.batch, self._rows(step.left)))
        shared: dict[int, SparseJacobian] = {}
        size = self._slice_size()
        for begin in range(0, self.batch, size):
            samples = slice(begin, min(begin + size, self.batch))
            self._slice(samples, vectors_out, shared)

    def _slice(self, samples: slice, vectors_out: Sequence[int], shared: dict[int, SparseJacobian]) -> None:
        matrices: dict[int, SparseJacobian] = {}
        vectors: dict[int, torch.Tensor] = {}
        last_use = {value: number for number, step in enumerate(self.sliced) for value in (step.left, step.right)}

        def matrix(value: int) -> SparseJacobian:
            if value in shared:
                return shared[value]
            if value not in matrices:
                record = self._record(value)
                made = record.transposed_jacobian(samples)
                (shared if record.stage.shared else matrices)[value] = made
                return made
            return matrices[value]

        def operand(value: int, selects: bool) -> torch.Tensor:
            if selects:
                winners = self._record(value).winners(samples)
                assert winners is not None
                return winners
            return matrix(value).values

        for number, step in enumerate(self.sliced):
            if step.kind == "mm":
                plan = self.scanner.plans[step.out]
                left, right = operand(step.left, plan.selects_left), operand(step.right, plan.selects_right)
                out = self._memory(step.out, (plan.pattern.nnz, max(left.shape[1], right.shape[1])))
                matrices[step.out] = SparseJacobian(plan.pattern, plan.multiply(left, right, out=out))
            else:
                if step.right not in vectors:
                    vectors[step.right] = batch_last(self.vectors[step.right][samples])
                if step.left in self.through:
                    vectors[step.out] = self._record(step.left).pull_back_sparse(vectors[step.right], samples)
                else:
                    left_matrix = matrix(step.left)
                    vectors[step.out] = matvec(left_matrix.pattern, left_matrix.values, vectors[step.right])
                if step.out in vectors_out:
                    self.vectors[step.out][samples] = vectors[step.out].T
            for value in (step.left, step.right):
                if last_use[value] == number:
                    matrices.pop(value, None)
                    vectors.pop(value, None)

    def _memory(self, value: int, shape: tuple[int, int]) -> torch.Tensor:
        """Memory for a product's values, the same in each slice: fresh pages would cost as much as the product."""
        if value not in self.memory:
            like, (m, n) = self.vectors[0], self._pattern(value).shape
            what = f"values of a {m:,} × {n:,} product"
            self.memory[value] = allocated(what, shape, like.dtype, like.device, shape[1]).view(-1)
        return self.memory[value][: math.prod(shape)].view(shape)

    def _slice_size(self) -> int:
        """As many samples as fit the memory limit with the values of all matrices."""
        products = {step.out for step in self.sliced if step.kind == "mm"}
        matrices = (
            products | {step.left for step in self.sliced} | {step.right for step in self.sliced if step.kind == "mm"}
        ) - self.through
        total = sum(self._pattern(value).nnz for value in matrices) * self.vectors[0].element_size()
        size = max(1, min(self.batch, self.scanner.memory_limit // max(1, total)))
        # Whole vectors of samples, or one at a time.
        return size if size == self.batch else size // 16 * 16 or size // 4 * 4 or 1


def _parts(steps: Sequence[Step], products: set[int]) -> tuple[list[Step], list[Step], list[Step]]:
    """Steps before any product of matrices, those that touch or lie between products, and those after all."""
    touches = {step.out for step in steps if step.kind == "mm" or step.left in products}
    depends: set[int] = set()
    for step in steps:
        if step.out in touches or step.right in depends or step.left in depends:
            depends.add(step.out)
    leads: set[int] = set()
    for step in reversed(steps):
        if step.out in touches or step.out in leads:
            leads.update((step.left, step.right))
    between = {step.out for step in steps if step.out in touches or (step.out in depends and step.out in leads)}
    before = [step for step in steps if step.out not in between and step.out not in depends]
    after = [step for step in steps if step.out not in between and step.out in depends]
    return before, [step for step in steps if step.out in between], after


def _check_hook(record: Record, gradient: torch.Tensor, result: torch.Tensor) -> None:
    """Raise where a module's backward hook gives another gradient of its input than the Jacobian does."""
    matrix = record.transposed_jacobian()
    ours = matvec(matrix.pattern, matrix.values, batch_last(gradient)).T.reshape(result.shape)
    if result.numel() and (ours - result).abs().max() > 1e-3 * result.abs().max():
        raise RuntimeError(
            f"{record.stage.path}: a backward hook changes the gradient, which a product of Jacobians cannot know; "
            "use schedule='linear', or a module of its own"
        )


def scanned(scanner: Scanner, records: list[Record], x: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
    """The output of a forward pass as one node of autograd's graph, whose backward pass is the scan.

    The records live as long as what autograd saves: until the backward pass, unless the graph is retained.
    """

    def unpack(held: list[Record]) -> torch.Tensor:
        handle = torch.empty(0)
        handle.records = held  # type: ignore[attr-defined]
        return handle

    with torch.autograd.graph.saved_tensors_hooks(lambda _: records, unpack):
        output: torch.Tensor = _Scanned.apply(scanner, records[-1].output.detach(), x, *parameters)
    return output


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scanner: Scanner, output: torch.Tensor, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.scanner, ctx.parameters = scanner, parameters
        # In whose place the hooks of `scanned` keep the records.
        ctx.save_for_backward(x.new_empty(0))
        # A copy: what follows may change its own in place, and the last stage may need this one.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which nn.Scan does not give; "
                "call the module without Scan for those"
            )
        (handle,) = ctx.saved_tensors
        needed = [id(p) for p, needs in zip(ctx.parameters, ctx.needs_input_grad[3:], strict=True) if needs]
        x_gradient, found = ctx.scanner.pull_back(handle.records, gradient, needed, for_input=ctx.needs_input_grad[2])
        return (None, None, x_gradient, *(found.get(id(parameter)) for parameter in ctx.parameters))


def vjp(
    module: nn.Module, x: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor]]]:
    """A module's output and the function that takes gradients back, as ``torch.func.vjp``; parameters are constants.

    Parameters
    ----------
    module : Module
        A chain of operators: one, or ``nn.Sequential``.
    x : Tensor, (batch, *input_shape)
        float32 or float64.
    schedule : Schedule or str
        In which order products are taken.

    Returns
    -------
    y : Tensor, (batch, *output_shape)
        ``module(x)``.
    pullback : callable
        ``pullback(gradient of y) -> (gradient of x,)``.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.

    Examples
    --------
    >>> import torch
    >>> y, pullback = vjp(torch.nn.ReLU(), torch.tensor([[1.0, -1.0]]))
    >>> pullback(torch.tensor([[5.0, 5.0]]))
    (tensor([[5., 0.]]),)
    """
    check_input("x", x)
    scanner = Scanner(chain(module, tuple(x.shape[1:]), like=x), schedule)
    if not len(scanner.chain):
        with torch.no_grad():
            y = module(x)
        return y, lambda gradient: (_checked(gradient, y).reshape(x.shape),)
    records = scanner.chain.run(x)
    y = records[-1].output.detach()

    def pullback(gradient: torch.Tensor) -> tuple[torch.Tensor]:
        x_gradient, _ = scanner.pull_back(records, _checked(gradient, y), (), for_input=True)
        assert x_gradient is not None
        return (x_gradient,)

    return y, pullback


def _checked(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"the gradient is a {type(gradient).__name__}; expected a torch.Tensor")
    ours, expected = ((tensor.dtype, tuple(tensor.shape), str(tensor.device)) for tensor in (gradient, y))
    if ours != expected:
        raise ValueError(
            f"the gradient is {ours[0]} {ours[1]} on {ours[2]}; expected that of the output: "
            f"{expected[0]} {expected[1]} on {expected[2]}"
        )
    return gradient.detach()


def backward(
    module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> torch.Tensor:
    """Run a module forward and back: the gradient of `x` is returned, those of the parameters are added to ``.grad``.

    Parameters
    ----------
    module : Module
        A chain of operators without randomness and without running statistics: the forward is run here once more.
    x : Tensor, (batch, *input_shape)
        float32 or float64.
    grad_output : Tensor, (batch, *output_shape)
        Of the module's output.
    schedule : Schedule or str
        In which order products are taken.

    Returns
    -------
    Tensor, (batch, *input_shape)

    Raises
    ------
    ValueError
        Where the module draws random numbers, or a shape does not fit.
    """
    from .nn import Scan

    check_input("x", x)
    for path, part in module.named_modules():
        if part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise ValueError(
                f"{path or type(part).__name__}: backward runs the forward again, which would drop others; call .eval()"
            )
    given = x.detach().requires_grad_()
    y = Scan(module, schedule=schedule)(given)
    y.backward(_checked(grad_output, y))
    assert given.grad is not None
    return given.grad
