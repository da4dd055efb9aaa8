"""One module of a network that is trained by delayed gradients: its waiting passes and its optimiser."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..runtime import a_type
from .modes import in_modes, modes_of

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class _Pass:
    """A forward pass of one part, whose gradient is still to come."""

    x: torch.Tensor
    #: Parameters and buffers as they were before it.
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    #: Of the module's parts, as `modes_of` returns them.
    modes: list[bool]
    iteration: int
    #: None where it is to be computed again.
    output: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files have no graph of autograd's.
        return {**self.__dict__, "output": None}


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

    Raises
    ------
    TypeError
        Where `optimizer` makes something else.
    ValueError
        Where a parameter has hooks, which would not be called, or the optimiser runs the forward pass itself.
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
        self.seed, self.recompute = seed, recompute and delay > 0
        for name, value in module.named_parameters():
            if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parameter {name} of part {number} has hooks, which delayed gradients do not call; change "
                    "gradients in optimizer.register_step_pre_hook, or use a module without them"
                )
        parameters = list(module.parameters())
        self.optimizer = optimizer(parameters) if parameters else None
        if parameters and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer returned {a_type(self.optimizer)}; expected a torch.optim.Optimizer of the "
                "parameters that it takes"
            )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError("the optimiser is LBFGS, which runs the forward pass several times; take another one")  # noqa: TRY004
        self.passes: deque[_Pass] = deque()

    def forward(self, x: torch.Tensor, iteration: int) -> torch.Tensor:
        """The part's output, detached; the pass waits for its gradient."""
        # The caller may write to its input before the gradient comes.
        x = x.detach().clone() if self.delay and not self.number else x.detach()
        if self.number:
            x.requires_grad_()
        if self.delay:
            copies: dict[int, torch.Tensor] = {}
            parameters = {
                name: copies.setdefault(id(value), value.detach().clone().requires_grad_(value.requires_grad))
                for name, value in _named(self.module, "_parameters")
            }
            buffers = {name: value.clone() for name, value in _named(self.module, "_buffers")}
        else:
            parameters, buffers = dict(_named(self.module, "_parameters")), {}
        past = _Pass(x, parameters, buffers, modes_of(self.module), iteration)
        with torch.set_grad_enabled(not self.recompute):
            output = self._computed(past, writes=True)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"part {self.number} returns {a_type(output)}; parts pass on one tensor")
        if not output.is_floating_point():
            raise TypeError(f"part {self.number} returns {output.dtype}; gradients are of floating-point numbers")
        past.output = None if self.recompute else output
        self.passes.append(past)
        # Both engines pass on the same layout, on which the rounding of what follows may depend.
        return output.detach().contiguous() if self.delay else output.detach()

    def _computed(self, past: _Pass, *, writes: bool) -> torch.Tensor:
        """The output of a pass; running statistics and other buffers are written to where `writes`."""
        # Layers that work in place do so on a copy: others have this tensor too.
        x = past.x.clone() if self.number or self.delay else past.x
        if not self.delay:
            with self._random(past):
                output: torch.Tensor = self.module(x)
            return output
        # Autograd holds these copies, and the module's own buffers may change.
        buffers = {name: value.clone() for name, value in past.buffers.items()}
        with self._random(past):
            output = functional_call(self.module, {**past.parameters, **buffers}, (x,), tie_weights=False)
        if writes:
            with torch.no_grad():
                for name, value in _named(self.module, "_buffers"):
                    value.copy_(buffers[name])
        return output

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Update the weights by the oldest pass' gradient; return that of its input. Without a gradient it is zero."""
        parameters = dict(_named(self.module, "_parameters"))
        if gradient is None:
            for value in parameters.values():
                value.grad = torch.zeros_like(value) if value.requires_grad else None
            with _without_decay(self.optimizer):
                self._update()
            return None
        past = self.passes.popleft()
        if (output := past.output) is None:
            with in_modes(self.module, past.modes):
                output = self._computed(past, writes=False)
        leaves = {name: value for name, value in past.parameters.items() if value.requires_grad}
        wanted = [*leaves.values(), *([past.x] if self.number else [])]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if output.requires_grad:
            gradients = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for value in parameters.values():
            value.grad = None
        for name, of_parameter in zip(leaves, gradients, strict=False):
            if parameters[name].requires_grad:
                parameters[name].grad = of_parameter
        self._update()
        if not self.number:
            return None
        return torch.zeros_like(past.x) if gradients[-1] is None else gradients[-1].contiguous()

    def forget(self, iteration: int) -> None:
        """Forget the pass of an iteration that failed, if there is one."""
        if self.passes and self.passes[-1].iteration == iteration:
            self.passes.pop()

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    @contextlib.contextmanager
    def _random(self, past: _Pass) -> Iterator[None]:
        """Random numbers that depend on the part and the iteration alone, wherever it runs and however often."""
        if self.seed is None:
            yield
            return
        seed, device = (self.seed * 1_000_003 + past.iteration) * 1_009 + self.number, past.x.device
        generator = torch.cuda.default_generators[device.index] if past.x.is_cuda else torch.default_generator
        with torch.random.fork_rng(devices=[device] if past.x.is_cuda else []):
            generator.manual_seed(seed)
            yield

    def state_dict(self) -> dict[str, Any]:
        """The part's weights, its optimiser's state and its waiting passes, as tensors and plain values."""
        return {
            "tensors": tensors_of(self.module),
            "algorithm": _algorithm(self.optimizer),
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "passes": [
                {
                    "x": past.x.detach(),
                    "parameters": {name: value.detach() for name, value in past.parameters.items()},
                    "buffers": past.buffers,
                    "modes": list(past.modes),
                    "iteration": past.iteration,
                }
                for past in self.passes
            ],
        }

    def check_state(self, state: Mapping[str, Any], iteration: int) -> None:
        """Raise ValueError where a state does not fit, before anything changes."""
        there, here = state["algorithm"], _algorithm(self.optimizer)
        if there != here:
            raise ValueError(
                f"part {self.number} was optimised by {there}, and has {here} here; pass what makes the same"
            )
        passes, modes = state["passes"], modes_of(self.module)
        iterations = [int(past["iteration"]) for past in passes]
        if iterations != list(range(max(0, iteration - self.delay), iteration)) and self.delay:
            raise ValueError(
                f"part {self.number} has passes of iterations {iterations} after {iteration}, with a delay of "
                f"{self.delay}; the state is of another split, or damaged"
            )
        for past in passes:
            if len(past["modes"]) != len(modes):
                raise ValueError(
                    f"part {self.number} is {len(past['modes'])} modules in the state, and {len(modes)} in the model"
                )
        shapes = _shapes(tensors_of(self.module))
        for tensors in (state["tensors"], *({**past["parameters"], **past["buffers"]} for past in passes)):
            others = _shapes(tensors)
            for name in {**shapes, **others}:
                if others.get(name) != shapes.get(name):
                    raise ValueError(
                        f"{name} of part {self.number} is {others.get(name, 'missing')} in the state, and "
                        f"{shapes.get(name, 'missing')} in the model"
                    )

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from what `state_dict` returned; passes go on on a device."""
        with torch.no_grad():
            for name, value in tensors_of(self.module).items():
                value.copy_(state["tensors"][name])
        if self.optimizer is not None:
            # The optimiser would share these tensors with whoever else has them.
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        frozen = {name for name, value in _named(self.module, "_parameters") if not value.requires_grad}
        self.passes = deque(
            _Pass(
                past["x"].to(device, copy=True).requires_grad_(self.number > 0),
                {
                    name: value.to(device, copy=True).requires_grad_(name not in frozen)
                    for name, value in past["parameters"].items()
                },
                {name: value.to(device, copy=True) for name, value in past["buffers"].items()},
                list(past["modes"]),
                int(past["iteration"]),
            )
            for past in state["passes"]
        )


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters, and all its buffers."""
    return {name: value.detach() for kind in ("_parameters", "_buffers") for name, value in _named(module, kind)}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tuple(value.shape)} {value.dtype}" for name, value in tensors.items()}


def _algorithm(optimizer: torch.optim.Optimizer | None) -> str:
    """What an optimiser's state is of: its class, and the parameters in each of its groups."""
    if optimizer is None:
        return "no optimiser"
    groups = ", ".join(str(len(group["params"])) for group in optimizer.param_groups)
    return f"{type(optimizer).__name__} of {groups} parameters"


def _named(module: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Parameters or buffers by name: of a layer that occurs twice once, of two layers that share one both names."""
    for path, part in module.named_modules():
        for name, value in getattr(part, kind).items():
            if value is not None:
                yield f"{path}.{name}" if path else name, value


@contextlib.contextmanager
def _without_decay(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A context in which weight decay rests, which ASGD calls lambd."""
    groups = [] if optimizer is None else optimizer.param_groups
    decays: list[dict[str, Any]] = [
        {name: group[name] for name in ("weight_decay", "lambd") if name in group} for group in groups
    ]
    for group, decay in zip(groups, decays, strict=True):
        group.update(dict.fromkeys(decay, 0.0))
    try:
        yield
    finally:
        for group, decay in zip(groups, decays, strict=True):
            group.update(decay)
