"""A recurrent layer of any cell: what it is given, the recurrences of its layers and directions, and what it gives."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from ..patterns import UnsupportedOperatorError
from ..runtime import (
    a_type,
    active_backend,
    is_exporting,
    is_traced,
    is_transformed,
    on_device,
    uncompiled,
)
from ..schedule import Schedule
from ..tracing import is_recording
from .across_ranks import SequencePart, SequenceRanks
from .cells import CELLS, Cell, cell_on, check_cell, obstacle_on
from .layer_arguments import ChosenSolvers, Given, recurrence_names, warm_states
from .layer_autograd import run_layer, run_small_layers
from .layer_recurrences import LayerPass
from .recurrences_cuda import LARGEST
from .reference import recurrent_layer
from .reports import PassOfReports, Report
from .sequences import Sequences
from .small_layer import small_layers
from .solvers import CHUNK, check_stages
from .torch_kernels import FEW, OPERATORS, LeftToTorch, by_torch, ours_are_faster

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_OutputAndLast = tuple[torch.Tensor, torch.Tensor]

_requires_grad = attrgetter("requires_grad")

#: Held while a pass has its weights made: another thread's are of another graph. A parametrisation may call layers.
_MAKING_WEIGHTS = threading.RLock()

#: Of the options that `RNN` adds.
_DEFAULTS: dict[str, Any] = {
    "schedule": "auto", "forward": "auto", "chunk": CHUNK, "process_group": None, "exchange": "auto"
}  # fmt: skip


class Recurrent(nn.RNNBase):
    """A recurrent layer of any cell: layers of `torch.nn`'s kind, computed by a cell's kernels, or by its steps.

    A subclass says which `cell`, as in the example; `RNN`, `GRU` and `LSTM` have those of `torch.nn`.

    Parameters
    ----------
    input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype
        As `torch.nn.RNN` takes them.
    schedule, forward, chunk, process_group, exchange
        As `RNN` takes them; it has `reports` and `boundaries`, too.

    Notes
    -----
    On the CPU a cell without kernels goes through its steps one by one, in PyTorch's operations. On a CUDA device
    kernels are printed of its `step`; where they cannot be, steps go one by one there too, and `reports` says why.

    Examples
    --------
    A minimal gated unit (Zhou and others, 2016), whose candidate is gated after its product:

    >>> import torch
    >>> from jacsparse.recurrence import Cell
    >>> class MinimalGatedCell(Cell):
    ...     mode, gates = "MGU", 2
    ...
    ...     def step(self, input_projection, recurrent_projection, state):
    ...         (f, n), (of_f, of_n) = input_projection.chunk(2, dim=1), recurrent_projection.chunk(2, dim=1)
    ...         f = torch.sigmoid(f + of_f)
    ...         return state + f * (torch.tanh(n + f * of_n) - state)
    >>> class MGU(Recurrent):
    ...     cell = MinimalGatedCell()
    >>> layer = MGU(3, 20, bidirectional=True, schedule="chunked")
    >>> output, last = layer(torch.randn(50, 4, 3))
    >>> output.shape, last.shape
    (torch.Size([50, 4, 40]), torch.Size([2, 4, 20]))
    """

    def __init__(
        self,
        *args: Any,
        schedule: Schedule | str = "auto",
        forward: str = "auto",
        chunk: int = CHUNK,
        process_group: ProcessGroup | None = None,
        exchange: str = "auto",
        **options: Any,
    ) -> None:
        if self._kind() is not nn.RNNBase:
            super().__init__(*args, **options)
        else:
            # PyTorch makes a tanh RNN's weights; those of a cell have as many rows for each of its gates.
            super().__init__("RNN_TANH", *args, **options)
            check_cell(self.cell, type(self).__name__)
            self.mode, rows = self.cell.mode, self.cell.gates * self.hidden_size
            for name in self._flat_weights_names:
                parameter = getattr(self, name)
                setattr(self, name, nn.Parameter(parameter.new_empty(rows, *parameter.shape[1:])))
            self.reset_parameters()
        self._set_up(schedule, forward, chunk, process_group, exchange)

    @property
    def cell(self) -> Cell:
        """What a step computes."""
        return CELLS[self.mode]

    @property
    def _is_torchs(self) -> bool:
        """Whether PyTorch has an operator for the cell: another cell may have the mode of one."""
        return self.mode in OPERATORS and self.cell is CELLS[self.mode]

    @property
    def _names(self) -> tuple[str, ...]:
        return recurrence_names(self.num_layers, self.bidirectional)

    def _set_up(
        self, schedule: Schedule | str, forward: str, chunk: int, process_group: ProcessGroup | None, exchange: str
    ) -> None:
        if self.proj_size:
            raise ValueError(
                f"proj_size is {self.proj_size}, which is not supported; use torch.nn.LSTM for projections"
            )
        self.schedule, self.forward_method, self.chunk = schedule, forward, chunk
        self._chosen = ChosenSolvers.of(schedule, forward, chunk)
        self._across = SequenceRanks.of(process_group, exchange)
        self._pass: PassOfReports | LeftToTorch = PassOfReports()

    @property
    def reports(self) -> list[Report]:
        """How the recurrences of the last pass were solved; on a CUDA device this waits for them."""
        return self._pass.reports

    @property
    def boundaries(self) -> list[torch.Tensor | None]:
        """The states at the chunks' boundaries of the last pass, by layer and direction; None where there are none."""
        return self._pass.boundaries

    @classmethod
    def of(cls, layer: nn.RNNBase, **options: Any) -> Self:
        """A layer of `torch.nn` as one of ours, whose parameters are the same objects.

        Parameters
        ----------
        layer : Module
            The layer.
        **options
            Those that `RNN` adds.

        Raises
        ------
        TypeError
            Where it is a layer of another kind, or its weights are made of others by a parametrisation.
        """
        kind = cls._kind()
        if kind is nn.RNNBase:
            raise TypeError(f"torch.nn has no layer with the cell of {cls.__name__}; make one by its constructor")
        if not isinstance(layer, kind) or type(layer).forward not in (kind.forward, Recurrent.forward):
            raise TypeError(f"layer is {a_type(layer)}; expected a torch.nn.{kind.__name__}")
        other = _alike(layer, cls)
        other._set_up(**{**_DEFAULTS, **options})
        return other

    @classmethod
    def _kind(cls) -> type[Any]:
        """The layer of `torch.nn` whose place it takes; RNNBase where there is none."""
        return next(base for base in cls.__mro__ if base.__module__.startswith("torch.nn"))

    def to_torch(self) -> nn.RNNBase:
        """The same layer of `torch.nn`, whose parameters are the same objects.

        Raises
        ------
        TypeError
            Where `torch.nn` has no such layer, or its weights are made of others by a parametrisation.
        """
        if self._kind() is nn.RNNBase:
            raise TypeError(f"torch.nn has no layer with the cell of {type(self).__name__}")
        other = _alike(self, self._kind())
        for name in ("schedule", "forward_method", "chunk", "_chosen", "_across", "_pass"):
            del other.__dict__[name]
        return other

    def __prepare_scriptable__(self) -> None:
        raise TypeError(
            f"torch.jit.script cannot compile a jacsparse.nn.{type(self).__name__}; script "
            "jacsparse.nn.convert(model, to='torch'), or trace the model"
        )

    def forward(
        self,
        input: torch.Tensor | PackedSequence,
        hx: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        warm: Sequence[torch.Tensor | None] | None = None,
    ) -> tuple[Any, Any]:
        """As `torch.nn`'s layer: outputs and last states of sequences, padded, packed or a single one.

        Parameters
        ----------
        input : Tensor or PackedSequence
            ``(time, batch, features)``, ``(batch, time, features)`` where `batch_first`, or ``(time, features)``.
        hx : Tensor, or pair of them for LSTM, optional
            First states, ``(layers · directions, batch, hidden)``; zeros where left out.
        warm : list of Tensor, optional
            `boundaries` of an earlier pass over the same samples.

        Raises
        ------
        TypeError, ValueError
            Where an argument's kind, dtype, device or shape does not fit; the message names it.

        Notes
        -----
        Programs that torch.export, torch.onnx, torch.jit.trace and make_fx make get `torch.nn`'s own operators; so do
        `jacsparse.jacobian` and `jacsparse.nn.Scan`, which have rules for those. PyTorch 2.6 exports them with
        ``strict=False`` alone, and compiles them as `torch.nn`'s.
        """
        if is_recording() or is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self._by_operators(input, hx)
        return self._solved(input, hx, warm)

    def _by_operators(self, input: Any, hx: Any) -> Any:
        """As `_solved`, by PyTorch's operators alone, for programs that are made of them."""
        if self._across is not None:
            raise UnsupportedOperatorError(
                f"{a_type(self)} across ranks cannot be recorded, exported or traced; make one without process_group"
            )
        return super().forward(input, hx) if self._is_torchs else self._unrolled(input, hx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = object.__new__(type(self))
        # Weights that a pass has made of others are results of operations, which cannot be copied: the next pass makes
        # them anew.
        weights = [weight if isinstance(weight, nn.Parameter) else torch.empty(0) for weight in self._flat_weights]
        other.__dict__.update(copy.deepcopy({**self.__dict__, "_flat_weights": weights}, memo))
        return other

    def flatten_parameters(self) -> None:
        """As `torch.nn`'s; cuDNN has nothing to do for other cells."""
        if self._is_torchs:
            super().flatten_parameters()

    @uncompiled
    def _solved(self, input: Any, hx: Any, warm: Sequence[torch.Tensor | None] | None) -> Any:
        """As `forward`, by our kernels or, where these are usually slower and nothing asks for them, by PyTorch's."""
        if is_traced():
            return self._by_operators(input, hx)
        # PyTorch's kernels may take as long as a few lines here: nothing is done for them that need not be.
        if (options := (self.schedule, self.forward_method, self.chunk)) != self._chosen.options:
            self._chosen = ChosenSolvers.of(*options)
        weights = self._weights()
        across = self._across is not None
        given = Given.of(input, weights[0], self.input_size, batch_first=self.batch_first, may_be_empty=across)
        x, steps, batch, packed = given.x, given.steps, given.batch, given.packed
        if self._chosen.backward.schedule is not None and not across:
            check_stages(self._chosen.backward, steps)
        if packed is None and not across and on_device(x) and not is_transformed():
            result = self._by_small_layers(given, hx, warm, weights)
            if result is not None:
                return given.results(*result)
        states = self._states(given, hx)
        part = None if self._across is None else self._part(self._across, given, states)
        if part is not None:
            states = [*map(part.joined, states)]
        if warm is None and part is None and (left := self._left_to_torch(given, states, weights)):
            hx = states if self.mode == "LSTM" else states[0]
            arguments = (weights, self.bias, self.num_layers, self.dropout, self.training, self.bidirectional)
            output, *last = by_torch(self.mode, x, packed, hx, arguments)
            self.__dict__["_pass"] = left
            return given.results(output, last)
        sequences = Sequences.equal(steps, batch) if packed is None else Sequences.packed(packed.batch_sizes)
        this, names = PassOfReports(), self._names
        cell, obstacle, chosen = cell_on(self.cell, x), obstacle_on(self.cell, x), self._chosen
        warm_starts = warm_states(warm, len(names))

        def run(x: torch.Tensor, initial: torch.Tensor, direction: int, place: int) -> _OutputAndLast:
            solvers = chosen.forward, chosen.backward
            layer = LayerPass(
                cell, sequences, direction, *solvers, warm_starts[place], names[place], this, part, obstacle=obstacle
            )
            return run_layer(layer, x, initial, self._parameters_at(place, weights))

        output, last = self._stacked(x.reshape(-1, self.input_size), states, run)
        if part is not None:
            output, *last = part.whole(2 if self.bidirectional else 1, output, *last)
        # Module.__setattr__ looks for parameters first.
        self.__dict__["_pass"] = this
        return given.results(output if packed else output.unflatten(0, (steps, batch)), last)

    def _by_small_layers(
        self, given: Given, hx: Any, warm: Any, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]] | None:
        """As `_stacked`, where layers of small states take equal lengths on a device; None where others do."""
        x, time, batch, *_ = given
        chosen, directions = self._chosen, 2 if self.bidirectional else 1
        layers = small_layers(
            self.cell.frozen, time, batch, self.input_size, self.hidden_size, self.num_layers, directions, self.bias,
            chosen.forward[:2], chosen.backward[:2], x.dtype, x.device, active_backend(),
        )  # fmt: skip
        if layers is None:
            return None
        starts = [None] * self.cell.states if hx is None else self._states(given, hx)
        count, this = len(layers) * directions, PassOfReports()
        guesses = [None] * count if warm is None else warm_states(warm, count)
        result = run_small_layers(layers, this, given.x, starts, weights, guesses, self.dropout * self.training)
        self.__dict__["_pass"] = this
        return result

    def _part(self, across: SequenceRanks, given: Given, states: Sequence[torch.Tensor]) -> SequencePart:
        """This rank's part of the sequences, once all ranks have said that they call alike."""
        if given.packed is not None:
            raise ValueError(
                "input is packed, and the steps of the sequences are on several ranks; pass padded parts of them"
            )
        names = ("mode", "input_size", "hidden_size", "num_layers", "bias", "bidirectional", "forward_method")
        facts = {name: getattr(self, name) for name in names}
        facts["schedule"] = getattr(self.schedule, "name", self.schedule)
        facts["frozen weights"] = [name for name, weight in self.named_parameters() if not weight.requires_grad]
        facts |= {"batch": given.batch, "dtype": str(given.x.dtype)}
        return across.part(facts, given.steps, (given.x, *states))

    def _unrolled(self, input: Any, hx: Any) -> Any:
        """As `_solved`, step after step in PyTorch's operations, which can be recorded, exported and traced."""
        weights = self._weights()
        given = Given.of(input, weights[0], self.input_size, batch_first=self.batch_first, may_be_empty=False)
        if given.packed is not None:
            raise UnsupportedOperatorError(
                f"a packed input of {type(self).__name__} cannot be recorded, exported or traced; pass a padded one"
            )

        def run(x: torch.Tensor, initial: torch.Tensor, direction: int, place: int) -> _OutputAndLast:
            return recurrent_layer(self.cell, x, initial, self._parameters_at(place, weights), reverse=direction < 0)

        return given.results(*self._stacked(given.x, self._states(given, hx), run))

    def _stacked(
        self,
        x: torch.Tensor,
        states: Sequence[torch.Tensor],
        run: Callable[[torch.Tensor, torch.Tensor, int, int], _OutputAndLast],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output and the last states of all layers and directions, each of which `run` computes."""
        initial, ends = torch.cat(tuple(states), dim=2), []
        directions = (1, -1) if self.bidirectional else (1,)
        for layer in range(self.num_layers):
            outputs = []
            for place, direction in enumerate(directions, layer * len(directions)):
                output, end = run(x, initial[place], direction, place)
                outputs.append(output)
                ends.append(end)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if self.dropout and self.training and layer < self.num_layers - 1:
                x = functional.dropout(x, self.dropout)
        joint = torch.stack(ends)
        return x, [*map(torch.Tensor.contiguous, joint.tensor_split(joint.shape[2] // self.hidden_size, 2))]

    def _weights(self) -> Sequence[torch.Tensor]:
        """The weights of a pass, in PyTorch's order.

        What was put in the place of a parameter is asked for as often as `torch.nn`'s layers ask for it, which is more
        than once: spectral normalisation takes a power iteration each time.
        """
        weights: Any = self._flat_weights
        expected = self.num_layers * (2 if self.bidirectional else 1) * (4 if self.bias else 2)
        if len(weights) != expected:
            raise ValueError(
                f"the layer was made with {len(weights)} weights, and num_layers={self.num_layers}, bias={self.bias}, "
                f"bidirectional={self.bidirectional} take {expected}; make a new layer with these"
            )
        # Whether these are the layer's parameters, one by one.
        if all(map(is_, map(self._parameters.get, self._flat_weights_names), weights)):
            return weights  # type: ignore[no-any-return]
        with _MAKING_WEIGHTS:
            self._update_flat_weights()
            return list(self._flat_weights)  # type: ignore[arg-type]

    def _left_to_torch(
        self, given: Given, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> LeftToTorch | None:
        """What PyTorch's own kernels compute, for they are faster and nobody asked for others; None where ours do."""
        if self.schedule != "auto" or self.forward_method not in ("auto", "sequential") or not self._is_torchs:
            return None
        x, steps, batch, size, trains = given.x, given.steps, given.batch, self.hidden_size, torch.is_grad_enabled()
        if on_device(x):
            return None if size <= LARGEST else LeftToTorch(self._names, steps, batch, size, trains, True)
        # PyTorch's kernels would compute in low precision under autocast.
        if weights is not self._flat_weights or torch.is_autocast_enabled("cpu"):
            return None
        trains = trains and any(map(_requires_grad, (*weights, x, *states)))
        # Within transforms PyTorch's operators have derivatives in forward mode, too.
        may_be_ours = steps >= FEW or not is_transformed()
        if may_be_ours and ours_are_faster(self.mode, x.dtype, steps, batch, size, trains=trains):
            return None
        return LeftToTorch(self._names, steps, batch, size, trains, False)

    def _states(self, given: Given, hx: Any) -> list[torch.Tensor]:
        """First states of each kind, ``(layers · directions, batch, hidden)``."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        return given.states(hx, places, self.cell.states, self.hidden_size)

    def _parameters_at(self, place: int, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Those of one layer and direction, as `run_layer` takes them."""
        count = 4 if self.bias else 2
        return (*weights[count * place : count * (place + 1)], *([] if self.bias else [None, None]))

    def extra_repr(self) -> str:
        """PyTorch's own, and the arguments that are not the defaults."""
        options = {"schedule": self.schedule, "forward": self.forward_method, "chunk": self.chunk}
        changed = [f"{name}={value!r}" for name, value in options.items() if value != _DEFAULTS[name]]
        across = [] if self._across is None else [f"exchange={self._across.exchange!r} across ranks"]
        return ", ".join([super().extra_repr(), *changed, *across])


def _alike(layer: nn.RNNBase, kind: type[Any]) -> Any:
    """A layer of another class with the same parameters, not copied."""
    if is_parametrized(layer):
        raise TypeError(
            f"the weights of the {type(layer).__name__} are parametrised; parametrise the new layer instead, or remove "
            "it first with torch.nn.utils.parametrize.remove_parametrizations"
        )
    other = object.__new__(kind)
    nn.Module.__init__(other)
    for name, value in layer.__dict__.items():
        # Hooks, buffers and the like are each layer's own; parameters are the same objects.
        other.__dict__[name] = copy.copy(value) if isinstance(value, dict | list) else value
    other._init_flat_weights()
    return other
