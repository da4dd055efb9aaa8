"""Training by delayed gradients: all modules of a network go backward at once (Huo et al., 2018, DDG)."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..distributed import Incoming, Ranks, ranks_of
from ..runtime import a_type
from .delayed_part import DelayedPart, OptimizerFactory, tensors_of
from .splitting import layers_of, partition

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DelayedGradients:
    """Trains a network by delayed gradients, which all of its modules can compute at once.

    With K modules, module k updates its weights at iteration t by the gradient of iteration ``t - K + k``, at that
    iteration's weights and data, and not at all before there is one. Only the forward pass goes through the modules one
    after the other. Gradients are zero before they exist, and Adam counts those iterations, as in Algorithm 2; weight
    decay then rests.

    Parameters
    ----------
    model : Module
        A model, as `jacsparse.training.partition` takes it. It is trained in place.
    modules : int or sequence of int or str
        The number of modules K, or where they begin, as `jacsparse.training.partition` takes it.
    optimizer : callable
        Makes an optimiser of a list of parameters, as ``functools.partial(torch.optim.SGD, lr=0.01)``. Each module has
        one of its own. Gradients can be clipped by ``register_step_pre_hook`` of each.
    loss : callable
        A scalar from the model's output and the targets alone; by default the mean cross-entropy.
    process_group : ProcessGroup, optional
        One process for each module: each rank holds all of the model, and trains the module of its number. Before the
        model is evaluated, all ranks call `synchronize`. An error between steps is told to the other ranks if it is
        raised within ``jacsparse.distributed.ranks_of(process_group).during("training")``. By default all modules are
        trained in this process.
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
    Random numbers in forward passes, as dropout's, are seeded by the module and the iteration where K > 1. A step that
    failed before any update may be repeated in one process; of several, none can go on.

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
        if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}; pass what makes one of a list of parameters, as "
                "functools.partial(torch.optim.SGD, lr=0.01)"
            )
        self.model, self.loss = model, loss
        self.partition = partition(model, modules, example=example)
        self.iteration, self._last = 0, len(self.partition) - 1
        seed = int(torch.randint(2**31, ()).item()) if self._last else None
        self._ranks = None if process_group is None else ranks_of(process_group)
        if self._ranks is not None:
            _check_size(self._ranks, self.partition)
            if example is not None and self._last:
                # Measured costs differ between ranks.
                starts = itertools.accumulate(len(part) for part in self.partition[:-1])
                self.partition = partition(model, self._ranks.check("start", {}, *starts)[0])
            seeds = self._ranks.check("start", self._facts(), seed or 0)
            seed = seeds[0][0] if self._last else None
        self._seed = seed
        here = range(self._last + 1) if self._ranks is None else [self._ranks.rank]
        self._parts = [
            DelayedPart(self.partition[number], number, self._last - number, optimizer, seed, recompute)
            for number in here
        ]
        #: Gradients for the modules before, which use them in the next iteration.
        self._gradients: dict[int, torch.Tensor] = {}
        #: Whether an update has begun that did not end.
        self._updating = False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimisers of the modules that this process trains."""
        return [part.optimizer for part in self._parts if part.optimizer is not None]

    @torch.enable_grad()
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
            Where `x` is no tensor, the loss no scalar, or a module returns anything but one floating-point tensor.
        RankError
            Where another rank fails, does not answer in the group's time, or has another batch.
        RuntimeError
            Where an earlier step failed after some modules were updated.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is {a_type(x)}; expected a torch.Tensor")
        if not len(x):
            raise ValueError("x has no samples; pass batches of at least one")
        if self._updating:
            raise RuntimeError("a step has failed after some modules were updated; load a state, or begin anew")
        incoming = self._exchange_gradients()
        try:
            output = self._forward(x)
            loss, of_output = (None, None) if output is None else self._loss(output, y)
        except BaseException:
            for part in self._parts:
                part.forget(self.iteration)
            raise
        gradients = dict(self._gradients) if self._ranks is None else {}
        if incoming is not None:
            gradients[self._parts[-1].number] = incoming.wait(self.iteration).to(x.device)
        if of_output is not None:
            gradients[self._last] = of_output
        self._updating = True
        with self._during("backward pass"):
            following = {part.number - 1: part.backward(gradients.get(part.number)) for part in self._parts}
        self._gradients = {number: value for number, value in following.items() if value is not None}
        if self._ranks is not None:
            self._ranks.flush()
        self._updating = False
        self.iteration += 1
        return loss

    def synchronize(self) -> None:
        """Bring the weights and buffers of all modules to all ranks; every rank has to call it."""
        if self._ranks is not None:
            for number, part in enumerate(self.partition):
                self._ranks.broadcast(tensors_of(part).values(), number)

    def state_dict(self, to: int | None = None) -> dict[str, Any]:
        """All that a training needs to go on bit for bit: weights, optimisers, and passes that wait for gradients.

        It is the same for both engines, and fits ``torch.save``. Like that of a module it has the tensors that training
        changes: copy it, to come back to it later.

        Parameters
        ----------
        to : int, optional
            The rank that gets it; an empty state is returned on the others. By default all ranks get it, which takes
            the memory of all modules on each. Every rank has to call this.
        """
        local: dict[str, dict[int, Any]] = {
            "parts": {part.number: part.state_dict() for part in self._parts},
            "gradients": dict(self._gradients),
        }
        states = [local] if self._ranks is None else self._ranks.gather(local, to)
        if not states:
            return {}
        joint = {name: {k: v for state in states for k, v in state[name].items()} for name in local}
        return {**joint, "iteration": self.iteration, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, of either engine; its tensors may be on any device.

        Raises
        ------
        ValueError
            Where it is of another split, model or optimiser; nothing has changed then.
        """
        missing = {"parts", "gradients", "iteration", "seed"} - set(state)
        if missing:
            raise ValueError(f"the state has no {', '.join(sorted(missing))}; pass what state_dict returned")
        if len(state["parts"]) != len(self.partition):
            raise ValueError(
                f"the state is of {len(state['parts'])} modules, and there are {len(self.partition)} here; split alike"
            )
        before = {part.number - 1 for part in self._parts}
        device = next((value.device for value in tensors_of(self.model).values()), torch.device("cpu"))
        gradients = {number: value.to(device) for number, value in state["gradients"].items() if number in before}
        for part in self._parts:
            part.check_state(state["parts"][part.number], state["iteration"])
        for part in self._parts:
            part.seed = state["seed"]
            part.load_state_dict(state["parts"][part.number], device)
        self._gradients = gradients
        self.iteration, self._seed, self._updating = state["iteration"], state["seed"], False

    def _loss(self, output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, detached, and its gradient."""
        output.requires_grad_()
        with self._during("loss"):
            loss = self.loss(output, y)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{a_type(loss)}"
                raise TypeError(f"the loss is {what}; expected a scalar tensor, as the mean over the batch")
            (gradient,) = torch.autograd.grad(loss, output)
        return loss.detach(), gradient

    def _forward(self, x: torch.Tensor) -> torch.Tensor | None:
        """The output of the last module; None where another rank has it."""
        phase, h = f"forward pass of iteration {self.iteration}", x
        check = 0 if self._ranks is None else _checksum(x)
        if self._parts[0].number:
            assert self._ranks is not None
            h = self._ranks.expect(self._parts[0].number - 1, phase).wait(self.iteration, check).to(x.device)
        with self._during("forward pass"):
            for part in self._parts:
                h = part.forward(h, self.iteration)
        if self._parts[-1].number == self._last:
            return h
        assert self._ranks is not None
        self._ranks.send(h, self._parts[-1].number + 1, phase, self.iteration, check)
        return None

    def _exchange_gradients(self) -> Incoming | None:
        """Send the last iteration's gradient to the rank before; what the next one sends is on its way."""
        if self._ranks is None:
            return None
        part, phase = self._parts[0], f"backward pass of iteration {self.iteration}"
        for number, value in self._gradients.items():
            self._ranks.send(value, number, phase, self.iteration)
        if not part.delay or self.iteration < part.delay:
            return None
        return self._ranks.expect(part.number + 1, phase)

    def _during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        if self._ranks is None:
            return contextlib.nullcontext()
        return self._ranks.during(f"{phase} of iteration {self.iteration}")

    def _facts(self) -> dict[str, Any]:
        """The layers and where modules begin, which are the same on all ranks."""
        facts: dict[str, Any] = {}
        for path, layer in layers_of(self.model).items():
            parameters = (f"{name} {tuple(p.shape)} {p.dtype}" for name, p in layer.named_parameters())
            facts[f"layer {path}"] = f"{layer!r}: {', '.join(parameters)}"
        return {**facts, "lengths of modules": [len(part) for part in self.partition]}


def _check_size(ranks: Ranks, parts: Sequence[nn.Module]) -> None:
    """Raise ValueError where there is not one rank for each module."""
    if ranks.size != len(parts):
        raise ValueError(
            f"there are {len(parts)} modules, and the process group has {ranks.size} ranks; start one process for "
            "each module"
        )


def _checksum(x: torch.Tensor) -> int:
    """A number that tells batches apart, from their shape and some of their elements."""
    flat = x.detach().flatten()
    some = flat[:: max(1, flat.numel() // 64)].to("cpu", torch.float64)
    return zlib.crc32(some.numpy().tobytes(), zlib.crc32(str(tuple(x.shape)).encode()))
