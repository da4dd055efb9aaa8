"""Training by delayed gradients: all modules of a network go backward at once (Huo et al., 2018, DDG)."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from ..distributed import Incoming, Like, Ranks
from .splitting import layers_of, partition

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class _Pass:
    """A forward pass of one part, whose gradient is still to come."""

    x: torch.Tensor
    #: Parameters and buffers as they were before it.
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    iteration: int
    #: None where it is to be computed again.
    output: torch.Tensor | None = None


class DelayedPart:
    """One part of the network: its forward passes that wait for their gradients, and its optimiser.

    Parameters
    ----------
    module : Module
        The part.
    number : int
        Its place among all parts.
    delay : int
        After how many iterations the gradient of an output comes.
    optimizer : callable
        Makes the optimiser of the part's parameters.
    seed : int or None
        Of random numbers in its forward passes; None for those that PyTorch draws next.
    recompute : bool
        Whether activations are computed again, not stored.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        delay: int,
        optimizer: OptimizerFactory,
        seed: int | None,
        recompute: bool,
    ) -> None:
        self.module, self.number, self.delay = module, number, delay
        self.seed, self.recompute = seed, recompute
        parameters = list(module.parameters())
        self.optimizer = optimizer(parameters) if parameters else None
        self.passes: deque[_Pass] = deque()

    def forward(self, x: torch.Tensor, iteration: int) -> torch.Tensor:
        """The part's output, detached; the pass waits for its gradient."""
        x = x.detach()
        if self.number:
            x.requires_grad_()
        parameters: dict[str, torch.Tensor]
        if not self.delay:
            with self._random(iteration):
                output = self.module(x)
            parameters, buffers = dict(self.module.named_parameters()), {}
        else:
            parameters = {
                name: value.detach().clone().requires_grad_(value.requires_grad)
                for name, value in self.module.named_parameters()
            }
            buffers = {name: value.clone() for name, value in self.module.named_buffers()}
            with self._random(iteration), torch.set_grad_enabled(not self.recompute):
                output = functional_call(self.module, parameters, (x,))
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"part {self.number} returns a {type(output).__name__}; parts pass on one tensor")
        recomputed = self.recompute and self.delay
        self.passes.append(_Pass(x, parameters, buffers, iteration, None if recomputed else output))
        return output.detach()

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Update the weights by the oldest pass' gradient; return that of its input. Without a gradient it is zero."""
        parameters = dict(self.module.named_parameters())
        if gradient is None:
            for value in parameters.values():
                value.grad = torch.zeros_like(value) if value.requires_grad else None
            with _without_decay(self.optimizer):
                self._update()
            return None
        past = self.passes.popleft()
        output = past.output if past.output is not None else self._computed_again(past)
        leaves = {name: value for name, value in past.parameters.items() if value.requires_grad}
        wanted = [*leaves.values(), *([past.x] if self.number else [])]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if output.requires_grad:
            gradients = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for value in parameters.values():
            value.grad = None
        for name, of_parameter in zip(leaves, gradients, strict=False):
            parameters[name].grad = of_parameter
        self._update()
        if not self.number:
            return None
        return torch.zeros_like(past.x) if gradients[-1] is None else gradients[-1]

    def forget(self, iteration: int) -> None:
        """Forget the pass of an iteration that failed, if there is one."""
        if self.passes and self.passes[-1].iteration == iteration:
            self.passes.pop()

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def _computed_again(self, past: _Pass) -> torch.Tensor:
        # Writes to running statistics go to the copies: the first forward pass has made them.
        buffers = {name: value.clone() for name, value in past.buffers.items()}
        with self._random(past.iteration):
            output: torch.Tensor = functional_call(self.module, {**past.parameters, **buffers}, (past.x,))
        return output

    @contextlib.contextmanager
    def _random(self, iteration: int) -> Iterator[None]:
        """Random numbers that depend on the part and the iteration alone, wherever it runs and however often."""
        if self.seed is None:
            yield
            return
        devices = {value.device for value in self.module.parameters() if value.is_cuda}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed((self.seed * 1_000_003 + iteration) * 1_009 + self.number)
            yield

    def state_dict(self) -> dict[str, Any]:
        """The part's weights, its optimiser's state and its waiting passes, as tensors and plain values."""
        return {
            "module": self.module.state_dict(),
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "passes": [
                {
                    "x": past.x.detach(),
                    "parameters": {name: value.detach() for name, value in past.parameters.items()},
                    "buffers": past.buffers,
                    "iteration": past.iteration,
                }
                for past in self.passes
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.module.load_state_dict(state["module"])
        if self.optimizer is not None:
            # The optimiser would share these tensors with whoever else has them.
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        frozen = {name for name, value in self.module.named_parameters() if not value.requires_grad}
        self.passes = deque(
            _Pass(
                past["x"].clone().requires_grad_(self.number > 0),
                {name: value.clone().requires_grad_(name not in frozen) for name, value in past["parameters"].items()},
                {name: value.clone() for name, value in past["buffers"].items()},
                int(past["iteration"]),
            )
            for past in state["passes"]
        )


class DelayedGradients:
    """Trains a network by delayed gradients, which all of its modules can compute at once.

    With K modules, module k updates its weights at iteration t by the gradient of iteration ``t - K + k``, at that
    iteration's weights and data, and not at all before there is one. Only the forward pass goes through the modules one
    after the other. Gradients are zero before they exist, and Adam counts those iterations, as in Algorithm 2; weight
    decay then rests.

    Parameters
    ----------
    model : Module
        An ``nn.Sequential``, nested or not. It is trained in place.
    modules : int or sequence of int or str
        The number of modules K, or where they begin, as `jacsparse.training.partition` takes it.
    optimizer : callable
        Makes an optimiser of a list of parameters, as ``functools.partial(torch.optim.SGD, lr=0.01)``. Each module has
        one of its own.
    loss : callable
        A scalar from the model's output and the targets; by default the mean cross-entropy.
    process_group : ProcessGroup, optional
        One process for each module: each rank holds all of the model, and trains the module of its number. By default
        all modules are trained in this process.
    recompute : bool
        Whether activations are computed again in the backward pass, so that a module stores its weights and inputs
        alone for iterations that wait for their gradients.
    example : Tensor, (batch, ...), optional
        As `jacsparse.training.partition` takes it.

    Attributes
    ----------
    partition : list of Module
        The K modules.
    optimizers : list of Optimizer
        Of the modules that this process trains; schedulers of learning rates take them.
    iteration : int
        Finished iterations.

    Raises
    ------
    TypeError, ValueError
        Where the model cannot be cut so, or the group has not as many ranks as modules.
    RankError
        Where ranks have different models.

    Notes
    -----
    Equations 6 to 9, Algorithms 1 and 2. Equation 8 would apply weight decay before the first gradient; here it rests.
    Random numbers in forward passes, as dropout's, are seeded by the module and the iteration where K > 1.

    Examples
    --------
    >>> import functools
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> ddg = DelayedGradients(model, modules=2, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
    >>> losses = [ddg.step(x, y).item() for _ in range(30)]
    >>> losses[-1] < losses[0]
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: int | Sequence[int | str],
        optimizer: OptimizerFactory,
        loss: Loss = functional.cross_entropy,
        process_group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        example: torch.Tensor | None = None,
    ) -> None:
        self.model, self.loss = model, loss
        self.partition = partition(model, modules, example=example)
        self.iteration, self._last = 0, len(self.partition) - 1
        seed = int(torch.randint(2**31, ()).item()) if self._last else None
        self._ranks = None if process_group is None else Ranks(process_group)
        if self._ranks is not None:
            if example is not None:
                # Measured costs differ between ranks.
                starts = list(itertools.accumulate(len(part) for part in self.partition[:-1]))
                self.partition = partition(model, self._ranks.first(starts))
            self._check(self._ranks)
            seed = self._ranks.first(seed)
        self._seed = seed
        here = range(self._last + 1) if self._ranks is None else [self._ranks.rank]
        self._parts = [
            DelayedPart(self.partition[number], number, self._last - number, optimizer, seed, recompute)
            for number in here
        ]
        #: Gradients for the modules before, which use them in the next iteration.
        self._gradients: dict[int, torch.Tensor] = {}
        #: What activations that come from another rank are like, by the size of the batch.
        self._likes: dict[int, Like] = {}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimisers of the modules that this process trains."""
        return [part.optimizer for part in self._parts if part.optimizer is not None]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Train on a batch.

        Parameters
        ----------
        x : Tensor, (batch, ...)
            The model's input.
        y : Tensor
            The targets, as the loss takes them.

        Returns
        -------
        Tensor or None
            The loss of this batch, detached; None on ranks that do not train the last module.

        Raises
        ------
        ValueError
            Where the batch is empty.
        TypeError
            Where a module returns anything but one tensor.
        RankError
            Where another rank fails, does not answer in the group's time, or passes other batches.
        """
        if not len(x):
            raise ValueError("x has no samples; pass batches of at least one")
        incoming = self._exchange_gradients()
        try:
            loss = self._forward_and_loss(x, y)
        except BaseException:
            # A step that failed before any update may be repeated.
            for part in self._parts:
                part.forget(self.iteration)
            raise
        if incoming is not None:
            part = self._parts[-1]
            self._gradients[part.number] = incoming.wait(self.iteration).to(part.passes[0].x.device)
        with self._during("backward pass"):
            following = {part.number - 1: part.backward(self._gradients.get(part.number)) for part in self._parts}
        self._gradients = {number: value for number, value in following.items() if value is not None}
        if self._ranks is not None:
            self._ranks.flush()
        self.iteration += 1
        return loss

    def synchronize(self) -> None:
        """Bring the weights and buffers of all modules to all ranks; every rank has to call it."""
        if self._ranks is not None:
            for number, part in enumerate(self.partition):
                self._ranks.broadcast(part.state_dict().values(), number)

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs to go on bit for bit: weights, optimisers, and passes that wait for gradients.

        It is the same for both engines, and fits ``torch.save``. Every rank has to call it, and gets all of it.
        """
        local: dict[str, dict[int, Any]] = {
            "parts": {part.number: part.state_dict() for part in self._parts},
            "gradients": dict(self._gradients),
        }
        states = [local] if self._ranks is None else self._ranks.gather(local)
        joint = {name: {k: v for state in states for k, v in state[name].items()} for name in local}
        return {**joint, "iteration": self.iteration, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, of either engine.

        Raises
        ------
        ValueError
            Where it is of another number of modules; nothing has changed then.
        """
        if len(state["parts"]) != len(self.partition):
            raise ValueError(
                f"the state is of {len(state['parts'])} modules, and there are {len(self.partition)} here; split alike"
            )
        for part in self._parts:
            part.seed = state["seed"]
            part.load_state_dict(state["parts"][part.number])
        before = {part.number - 1 for part in self._parts}
        self._gradients = {number: value for number, value in state["gradients"].items() if number in before}
        self.iteration, self._seed = state["iteration"], state["seed"]

    def _forward_and_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """The loss, whose gradient waits for the last module; None where another rank has it."""
        output = self._forward(x)
        if output is None:
            return None
        output.requires_grad_()
        with self._during("loss"):
            loss = self.loss(output, y)
            (self._gradients[self._last],) = torch.autograd.grad(loss, output)
        return loss.detach()

    def _forward(self, x: torch.Tensor) -> torch.Tensor | None:
        """The output of the last module; None where another rank has it."""
        phase, samples = f"forward pass of iteration {self.iteration}", len(x)
        if self._parts[0].number:
            assert self._ranks is not None
            incoming = self._ranks.expect(self._parts[0].number - 1, self._likes.get(samples), phase)
            h = incoming.wait(self.iteration)
            self._likes[samples] = h.dtype, tuple(h.shape)
            x = h.to(x.device)
        with self._during("forward pass"):
            for part in self._parts:
                x = part.forward(x, self.iteration)
        if self._parts[-1].number == self._last:
            return x
        assert self._ranks is not None
        self._ranks.send(x, self._parts[-1].number + 1, self.iteration, phase)
        return None

    def _exchange_gradients(self) -> Incoming | None:
        """Send the last iteration's gradient to the rank before; what the next one sends is on its way."""
        if self._ranks is None:
            return None
        part, phase = self._parts[0], f"backward pass of iteration {self.iteration}"
        for number, value in self._gradients.items():
            self._ranks.send(value, number, self.iteration, phase)
        if not part.delay or self.iteration < part.delay:
            return None
        output = part.passes[0].output
        like = None if output is None else (output.dtype, tuple(output.shape))
        return self._ranks.expect(part.number + 1, like, phase)

    def _during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        if self._ranks is None:
            return contextlib.nullcontext()
        return self._ranks.during(f"{phase} of iteration {self.iteration}")

    def _check(self, ranks: Ranks) -> None:
        """Raise ValueError or RankError where there is not one rank for each module, all with the same layers."""
        if ranks.size != len(self.partition):
            raise ValueError(
                f"there are {len(self.partition)} modules, and the process group has {ranks.size} ranks; start one "
                "process for each module"
            )
        facts: dict[str, Any] = {}
        for path, layer in layers_of(self.model).items():
            parameters = (f"{name} {tuple(p.shape)} {p.dtype}" for name, p in layer.named_parameters())
            facts[f"layer {path}"] = f"{type(layer).__name__}: {', '.join(parameters)}"
        ranks.agree({**facts, "lengths of modules": [len(part) for part in self.partition]})


@contextlib.contextmanager
def _without_decay(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A context in which weight decay rests."""
    groups = [] if optimizer is None else [group for group in optimizer.param_groups if "weight_decay" in group]
    decays = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
