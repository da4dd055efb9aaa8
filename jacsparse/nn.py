"""Modules whose backward pass is a scan or a solver, recurrent layers, and layers of pruned weights."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .patterns import UnsupportedOperatorError, are_values_registered
from .recurrence import GRU, LSTM, RNN, Recurrent, Report, convert
from .runtime import a_type, transform_under_way, uncompiled
from .scan import BY_AUTOGRAD, Puller, Scanner, Scanners, StageRanks, scanned, scanner_of
from .schedule import Schedule, parse
from .solvers import Propagator, TriangularSolver, solver_of
from .sparse import SparseConv1d, SparseConv2d, SparseLinear
from .spgemm import check_limit
from .stages import Chain, Owner, Run, chain, check_input, forward_pass
from .tracing import check_module, is_recording, name_of, without_saving_hooks
from .training import Leapfrogger, check_threads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Leapfrog",
    "Recurrent",
    "Scan",
    "Solve",
    "SparseConv1d",
    "SparseConv2d",
    "SparseLinear",
    "convert",
]


#: The scanners of a module that are kept, each of a chain.
_MOST_SCANNERS = 8


class _OfChain(nn.Module):
    """A module around another one, whose chain of stages back-propagates."""

    _owner: Owner

    def __init__(self, module: nn.Module, pruned: bool | None) -> None:
        super().__init__()
        self.module = check_module(module)
        self.pruned = pruned
        self.reset()

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Return ``module(x, *arguments)``; `x` has shape ``(batch, *input_shape)``, float32 or float64.

        Tensors among the other arguments, as first states, have gradients as parameters do.
        """
        if not torch.is_grad_enabled() or is_recording() or torch.compiler.is_compiling():
            return self.module(x, *arguments)
        tensors = itertools.chain((x, *arguments), self.module.parameters())
        if not any(getattr(each, "requires_grad", False) for each in tensors):
            return self.module(x, *arguments)
        transform = transform_under_way()
        if transform:
            raise TypeError(
                f"nn.{type(self).__name__} is called within {transform}, which does not see its backward pass; call "
                "its .module there, or take gradients by torch.autograd"
            )
        check_input("x", x)
        if not len(x):
            return self.module(x, *arguments)
        chain, run = self._forward_pass(x, arguments)
        with without_saving_hooks():
            puller = self._puller(chain, run)
        return scanned(puller, run, x)

    def _forward_pass(self, x: torch.Tensor, arguments: Sequence[Any] = ()) -> tuple[Chain, Run]:
        return forward_pass(self.module, x, self._owner, pruned=self.pruned, couples=True, arguments=arguments)

    def _puller(self, chain: Chain, run: Run) -> Puller:
        """What pulls gradients back through a chain, after a forward pass."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget patterns and plans; the next forward makes new ones for its weights."""
        self._owner = Owner()

    def __getstate__(self) -> dict[str, Any]:
        # Patterns and plans are not copied or written to files.
        return {**self.__dict__, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.reset()


class Scan(_OfChain):
    """A module that computes the same output as `module`, and back-propagates by a scan.

    It is part of autograd as any module is: gradients reach the input and all parameters that are not frozen, through
    pruning masks, parametrisations and hooks.

    Parameters
    ----------
    module : Module
        A module. Its own forward pass computes the output at each call. Where the samples of a batch depend on each
        other, as by batch normalisation in training mode, no Jacobians are multiplied: the gradient goes through such a
        stage as autograd has it, and a schedule is for each stretch between them.
    schedule : Schedule or str
        The order of the products: ``linear`` is plain back-propagation, ``blelloch`` or ``blelloch:LEVELS`` is
        Algorithm 1 of the thesis. ``auto`` is autograd's own pass, because no other order is faster on one device:
        nothing is captured then. By a name, matrices with at most one entry in each row, as of ReLU and pooling, wait
        for a vector, so that fewer are multiplied, or none; a Schedule, as `jacsparse.schedule.blelloch` makes them, is
        taken as it stands. By a name, loops over at least eight steps are chains of their steps.
    pruned : bool, optional
        Whether the Jacobians omit pruned weights: those that a mask of ``torch.nn.utils.prune`` holds at zero and,
        without a mask, those that are zero. By default the latter on the CPU alone: each call has to look at them,
        which waits for a GPU, and at a mask only once for each of its versions.
    memory_limit : int, optional
        Bytes of Jacobians' values to hold at once; larger batches run in slices. 1 GiB by default.
    process_group : ProcessGroup, optional
        Ranks that have consecutive stages of a chain: `module` is this rank's. All ranks pass the same input and get
        the whole chain's output, compute the loss from it alike, and get the same gradient of the input.
    exchange : {"auto", "linear", "gather", "scan"}
        How gradients get across ranks. ``linear``: from rank to rank, each of which waits for the one behind it.
        ``gather``, ``scan``: all ranks but the first and the last first multiply their stages to one transposed
        Jacobian, of all samples at once, and these are exchanged in one round, or in ⌈log2 p⌉ rounds for p ranks.
        ``auto`` is the one that is predicted to take the least time.

    Attributes
    ----------
    reports : list of Report
        How the last backward pass went through each loop, and through the stages around them.

    Raises
    ------
    TypeError, ValueError
        Where the schedule is none, or the limit is no number of bytes.
    UnsupportedOperatorError
        At a forward pass with gradients, where an operator has no rule, but by ``auto``.

    Warns
    -----
    RuntimeWarning
        In a backward pass by another schedule than ``linear``, where a loop is left to autograd.

    Notes
    -----
    Thesis, equations 3.1 and 3.2 and Algorithm 1, for loops section 3.1. Hooks run; one that changes a gradient where
    Jacobians are multiplied raises RuntimeError in the backward pass. A backward pass with ``create_graph=True`` raises
    RuntimeError, but by ``auto``.

    ``torch.utils.checkpoint(..., use_reentrant=False)`` around a scan runs it anew once in a backward pass, and keeps
    nothing of it until then (PyTorch 2.8 or later). One within `module` is run anew once by ``linear``, and by other
    schedules once for each of its stages with parameters; it saves no memory, as the stages' tensors are kept. Hooks of
    saved tensors may be disabled; where they change what is saved, as by rounding, ``linear`` goes by what they give
    back, and Jacobians are those of the tensors themselves.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> scan = Scan(model, schedule="blelloch")
    >>> scan(torch.randn(5, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([3, 4])

    With stages on the ranks of a group, of which ``torchrun`` starts several. All ranks compute the loss alike, and it
    counts once: gradients of each rank's own stages are whole, and no rank adds anything to them.

    >>> import tempfile
    >>> import torch.distributed as dist
    >>> store = "file://" + tempfile.mkdtemp() + "/store"
    >>> dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    >>> stages = [model[:2], model[2:]]
    >>> stage = stages[dist.get_rank()] if dist.get_world_size() == 2 else model
    >>> output = Scan(stage, process_group=dist.group.WORLD)(torch.ones(5, 4))       # the whole chain's
    >>> output.square().mean().backward()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        schedule: Schedule | str = "auto",
        pruned: bool | None = None,
        memory_limit: int | None = None,
        process_group: ProcessGroup | None = None,
        exchange: str = "auto",
    ) -> None:
        parse(schedule)
        check_limit(memory_limit)
        super().__init__(module, pruned)
        self.schedule = schedule
        self.memory_limit = memory_limit
        self._across = StageRanks.of(process_group, exchange)

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Return ``module(x, *arguments)``, or the whole chain's output for `x` where it goes across ranks."""
        if self._across is not None:
            if arguments:
                what = f"a Scan across ranks takes x alone, and got {len(arguments)} more"
                raise TypeError(f"{what}; make them parameters")
            return self._forward_across(self._across, x)
        if parse(self.schedule)[0] != "auto" or are_values_registered():
            return super().forward(x, *arguments)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.reports[:] = [Report("backward", 1, name_of(self.module), ["sequential"], reason=BY_AUTOGRAD)]
        return self.module(x, *arguments)

    @uncompiled
    def _forward_across(self, across: StageRanks, x: torch.Tensor) -> torch.Tensor:
        if is_recording() or torch.compiler.is_compiling():
            raise UnsupportedOperatorError("a Scan across ranks cannot be recorded or exported; call it")
        return across.output(self.module, check_input("x", x), self._run_part)

    def _run_part(self, x: torch.Tensor) -> tuple[Scanner, Run]:
        chain, run = self._forward_pass(x)
        return self._scanner(chain), run

    def scanner(self, input_shape: tuple[int, ...]) -> Scanner:
        """The chain, schedule and plans for inputs of a shape, without the batch axis."""
        return self._scanner(chain(self.module, input_shape, pruned=self.pruned is not False, couples=True))

    def _puller(self, chain: Chain, run: Run) -> Scanner:
        return self._scanner(chain)

    def _scanner(self, chain: Chain) -> Scanner:
        return scanner_of(self._scanners, chain, self.schedule, self.memory_limit, self.reports, most=_MOST_SCANNERS)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scanners": None, "reports": None}

    def reset(self) -> None:
        """Forget patterns and plans; the next forward makes new ones for its weights."""
        super().reset()
        self.reports: list[Report] = []
        self._scanners: Scanners = OrderedDict()

    def extra_repr(self) -> str:
        """The schedule, and the exchange across ranks."""
        across = "" if self._across is None else f", exchange={self._across.exchange!r} across ranks"
        return f"schedule={getattr(self.schedule, 'name', self.schedule)!r}{across}"


class Solve(_OfChain):
    """A module that computes the same output as `module`, and back-propagates by a solver of triangular systems.

    Parameters
    ----------
    module : Module
        As of `Scan`; recurrent layers are for `jacsparse.solvers.propagation`.
    method : str or TriangularSolver
        As `jacsparse.solvers.solve` takes it. An iterative solver gives gradients within its tolerance.
    pruned : bool
        Whether the Jacobians omit pruned weights.
    **options
        Arguments of the solver.

    Raises
    ------
    TypeError, ValueError
        Where there is no such method or option, or the module is a recurrent layer; at a forward pass with gradients,
        where the method does not apply to its chain.
    UnsupportedOperatorError
        At a forward pass with gradients, where an operator has no rule or has backward hooks.

    Warns
    -----
    RuntimeWarning
        In the backward pass, where an iterative solver stops at its limit.

    Notes
    -----
    Naumov, equation 14: the stages are the off-diagonal blocks, the elementwise ones the diagonal. A backward pass with
    ``create_graph=True`` raises RuntimeError. Checkpoints, and other hooks of saved tensors, are as for `Scan` with
    ``blelloch``.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> Solve(model, method="cyclic_reduction")(torch.randn(5, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([3, 4])
    """

    def __init__(
        self, module: nn.Module, *, method: str | TriangularSolver = "substitution", pruned: bool = True, **options: Any
    ) -> None:
        if isinstance(module, nn.RNNBase | Recurrent):
            raise TypeError(
                f"module is {a_type(module)}, whose output is several tensors; an nn.RNN's system is made by "
                "jacsparse.solvers.propagation, and any layer with batch_first=True can be wrapped in a module that "
                "returns one tensor"
            )
        super().__init__(module, pruned)
        self.method = solver_of(method, **options)

    def _puller(self, chain: Chain, run: Run) -> Propagator:
        return Propagator(self.method, run)

    def extra_repr(self) -> str:
        """The method."""
        return f"method={self.method.name!r}"


class Leapfrog(_OfChain):
    """A module that computes the same output as `module`, and back-propagates by leapfrogging.

    Parameters
    ----------
    module : Module
        As of `Scan`, without backward hooks: each thread would call them.
    threads : int
        As `jacsparse.leapfrog_backward` takes it.

    Raises
    ------
    ValueError
        Where `threads` is no integer of at least 1.
    UnsupportedOperatorError
        In the backward pass, where a backward hook may change gradients.

    Notes
    -----
    Saraiya, Algorithm 1: each thread computes the gradients of the parameters of every k-th layer.

    ``torch.utils.checkpoint(..., use_reentrant=False)`` around it runs the module anew once in a backward pass, and
    then the threads go back (PyTorch 2.8 or later). Where tensors within the module are saved by hooks, as those of a
    checkpoint within it, of ``save_on_cpu`` or of ``allow_mutation_on_saved_tensors``, one pass of autograd on the
    calling thread computes all gradients instead of the threads: each hook is then called once for each tensor, and a
    checkpoint draws the random numbers that it drew before.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> Leapfrog(model, threads=2)(torch.randn(5, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([3, 4])
    """

    def __init__(self, module: nn.Module, *, threads: int) -> None:
        self.threads = check_threads(threads)
        super().__init__(module, pruned=False)

    def _puller(self, chain: Chain, run: Run) -> Leapfrogger:
        return Leapfrogger(self.threads, chain.in_shape)

    def extra_repr(self) -> str:
        """The number of threads."""
        return f"threads={self.threads}"
