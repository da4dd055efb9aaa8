"""Whole models: pruned layers become sparse where that is faster, and share the layout of blocks from end to end."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves

from ..runtime import RunTime, a_type, announced_where_long, is_exporting, run_times, uncompiled
from ..tracing import check_initialised, check_module
from . import operators
from .attention import UnpackedAttention, fuse_again, leave_fused, unpack_attentions
from .blocks import BlockOperators, BlockTensor
from .candidates import LayerInput, is_layer, obstacle_of, shared_parameters, sparse_class, weight_counts
from .costs import Use, expected_gain, expected_seconds
from .layers import SparseLayer, rename_state
from .layouts import enter
from .outputs import plain
from .processor import lanes_for

assert operators

#: How many times as fast a sparse layer has to be expected, as what is expected may be wrong by more than that.
_LEAST_EXPECTED = 1.25
#: Seconds after which a layer, all layers together, and a whole model are measured no longer.
_OF_LAYER, _OF_LAYERS, _OF_MODEL = 0.25, 20.0, 2.0
#: What a person can do where measurements tell nothing.
BUSY = "this machine is busy: rerun, or measure=False"


@dataclass(frozen=True)
class LayerChoice:
    """How a layer of a model runs, and why."""

    path: str
    kind: str
    #: Weights that are left, and all.
    left: int
    total: int
    #: Times of the dense and of the sparse layer; None where they were not measured.
    dense: RunTime | None
    sparse: RunTime | None
    is_sparse: bool
    reason: str
    #: Seconds that the dense and the sparse layer are expected to take by their sizes; None where nothing was chosen.
    expected: tuple[float, float] | None = None


@dataclass(frozen=True)
class SparsityReport:
    """How each layer of a model runs, and what the whole model takes."""

    layers: tuple[LayerChoice, ...]
    #: Whether forward and backward passes were measured, or forward passes alone.
    training: bool
    #: Times of the whole model, dense and with sparse layers; None where they were not measured.
    dense: RunTime | None
    sparse: RunTime | None
    reason: str
    #: Whether layers were chosen, and not all sparse that can be.
    is_chosen: bool = True

    def __str__(self) -> str:
        measured = "forward and backward" if self.training else "forward"
        lines = [f"{'layer':24} {'weights left':>22} {'dense ms':>15} {'sparse ms':>15}  runs"]
        for layer in self.layers:
            share = f"{layer.left} of {layer.total}"
            lines.append(
                f"{layer.path:24} {share:>22} {_shown(layer.dense)} {_shown(layer.sparse)}  "
                f"{'sparse' if layer.is_sparse else 'dense'}: {layer.reason}"
            )
        lines.append(f"{'whole model':24} {'':22} {_shown(self.dense)} {_shown(self.sparse)}  {self.reason}")
        lines.append(f"Milliseconds of {measured}: the fastest run, and by how much the fastest three differ.")
        return "\n".join(lines)


def _shown(time: RunTime | None) -> str:
    return f"{'-':>15}" if time is None else f"{str(time).replace(' ms', ''):>15}"


class SparseModel(nn.Module):
    """A model whose pruned layers run at the cost of the weights that are left; made by `sparsify`.

    Its parameters are those of `model`, a copy of the dense model in which some layers are `SparseConv2d` and
    `SparseLinear`. Their `state_dict` is that of the model with masks of ``torch.nn.utils.prune``, and is loaded from
    such a one.
    """

    def __init__(self, model: nn.Module, report: SparsityReport) -> None:
        super().__init__()
        self.model, self._report = model, report
        self.training = model.training
        rename_state(self, "model.", "")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; as of its layers, programs that are exported get PyTorch's operators."""
        if is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self.model(*args, **kwargs)
        return self._run(*args, **kwargs)

    @uncompiled
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if isinstance(output, Iterator):
            raise TypeError(
                f"{type(self.model).__name__} returns {a_type(output)}, whose layers run after the call has ended: "
                "return a list"
            )
        # A cache among the arguments may have got activations too.
        return plain((output, args, kwargs))[0]

    def report(self) -> SparsityReport:
        """Which layers are sparse, and why, with the weights that are left now."""
        parts = dict(self.model.named_modules())
        layers = []
        for layer in self._report.layers:
            part = parts.get(layer.path)
            layers.append(replace(layer, left=part.values.numel()) if isinstance(part, SparseLayer) else layer)
        return replace(self._report, layers=tuple(layers))


def sparsify(model: nn.Module, x: torch.Tensor, *, training: bool | None = None, measure: bool = True) -> SparseModel:
    """A copy of a pruned model that runs at the cost of the weights that are left, on the CPU.

    Each pruned convolution and linear layer runs the way that is expected to be faster, by its sizes and the weights
    that are left, unless measurements clearly show the other way; on a busy machine they show nothing, and the report
    says so. A model that was measured to be slower with its sparse layers stays dense as a whole. Layers are measured
    for 20 seconds at most, those of equal sizes once, and the whole model for two; what is measured runs at least four
    times both ways. Layers that are left then are chosen by their sizes. Between sparse layers activations stay in
    blocks, with the samples last, through batch normalisation, activation functions, pooling, sums and flattening.

    Parameters
    ----------
    model : Module
        Its convolutions (``Conv1d``, ``Conv2d``), linear layers and attentions' projections have masks of
        ``torch.nn.utils.prune``, or zeros where they are pruned. It does not change.
    x : Tensor
        A batch of inputs, of the size that is to be fast.
    training : bool, optional
        Whether training steps shall be fast, or forward passes alone; by default, whether the model is in training
        mode.
    measure : bool
        Whether to choose, and to measure for it; otherwise all layers with a pruned weight become sparse.

    Returns
    -------
    SparseModel
        Make optimisers of its parameters. `SparseModel.report` tells how each layer runs, and why, and which pruned
        weights of other modules stay dense.

    Raises
    ------
    TypeError, ValueError
        Where the model is no module, is not on the CPU or holds weights that are not numbers, or `x` is no batch.

    Examples
    --------
    >>> from torch.nn.utils import prune
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    >>> _ = prune.l1_unstructured(model[0], "weight", 0.9)
    >>> sparse = sparsify(model, torch.randn(4, 3, 8, 8), measure=False)
    >>> sparse.report().layers[0].is_sparse, len(sparse.model[0].values)
    (True, 22)
    """
    check_module(model)
    check_initialised(model)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {a_type(x)}; expected a tensor: a batch of inputs")
    if x.ndim < 2 or not len(x):
        raise ValueError(f"x is of shape {tuple(x.shape)}; expected a batch of at least one input")
    for option, value in (("training", training), ("measure", measure)):
        if not isinstance(value, bool) and (option == "measure" or value is not None):
            raise TypeError(f"{option} is {a_type(value)}; expected a bool")
    training = model.training if training is None else training
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"{name} is on {parameter.device}; sparse layers run on the CPU alone: move it by .cpu()")
    until = time.monotonic() + _OF_LAYERS
    judge = functools.partial(_measured, training=training, until=until) if measure else None
    doing = f"measuring the layers of {type(model).__name__}, dense and sparse"
    with announced_where_long(doing) if measure else contextlib.nullcontext():
        choices = _choices(model, (x,), training, judge)
    paths = _sparse_paths(choices)
    if not paths:
        busy = any(each.dense and each.sparse and each.dense.over(each.sparse) is None for each in choices)
        reason = f"no layer is sparse by its sizes; {BUSY}" if busy else "no layer is sparse"
        return SparseModel(copied(model), SparsityReport(tuple(choices), training, None, None, reason))
    if not measure:
        report = SparsityReport(tuple(choices), training, None, None, "not measured", is_chosen=False)
        return SparseModel(convert(copied(model), paths), report)
    choices, result, times, reason = _of_whole_model(model, x, choices, training)
    return SparseModel(result, SparsityReport(tuple(choices), training, *times, reason))


def _of_whole_model(
    model: nn.Module, x: torch.Tensor, choices: list[LayerChoice], training: bool
) -> tuple[list[LayerChoice], nn.Module, tuple[RunTime, RunTime], str]:
    """Sparse as its layers were chosen, unless the whole model is slower: its layers, itself, its times, and why."""
    sparse = convert(copied(model), _sparse_paths(choices))
    # What is timed takes steps, and so is no copy to give away.
    dense, timed = copied(model), SparseModel(copied(sparse), SparsityReport((), training, None, None, ""))
    with torch.no_grad(), BlockOperators() as operators:
        timed(x)
    of_dense, of_sparse = run_times(
        *(_pass(each, x.detach().requires_grad_(x.requires_grad), training) for each in (dense, timed)), most=_OF_MODEL
    )
    speed = of_dense.over(of_sparse)
    if speed is None:
        seconds = [each.expected for each in choices if each.is_sparse and each.expected is not None]
        is_sparse = expected_gain(seconds, operators.count, operators.nbytes, _use(training)) >= _LEAST_EXPECTED
        reason = f"{'sparse' if is_sparse else 'too little is gained to be sparse'} by its sizes; {BUSY}"
    else:
        is_sparse = speed > 1
        reason = f"{speed:.1f} times as fast with sparse layers"
        reason = reason if is_sparse else "slower with sparse layers, and so all are dense"
    if is_sparse:
        return choices, sparse, (of_dense, of_sparse), reason
    lost = "faster by itself, and the whole model is not"
    choices = [replace(each, is_sparse=False, reason=lost) if each.is_sparse else each for each in choices]
    return choices, copied(model), (of_dense, of_sparse), reason


def _use(training: bool) -> Use:
    return "training" if training else "inference"


def expected_frozen(model: SparseModel, inputs: tuple[torch.Tensor, ...]) -> SparseModel | None:
    """The model with those layers sparse that are expected to be faster without Python code of their own.

    None where these are its sparse layers, or where it was made without choosing.
    """
    if not model._report.is_chosen:
        return None
    dense = densify(model)
    paths = _sparse_paths(_choices(dense, inputs, False, _expected_frozen))
    if paths == {path for path, part in model.model.named_modules() if isinstance(part, SparseLayer)}:
        return None
    return SparseModel(convert(dense, paths), model._report)


def densify(model: nn.Module, *, masks: bool = True) -> nn.Module:
    """The dense model of a sparse one: a copy with masks of ``torch.nn.utils.prune``.

    Parameters
    ----------
    model : Module
        A `SparseModel`, or any module with sparse layers inside.
    masks : bool
        Whether the copy has masks; without them its weights hold zeros, and its `state_dict` is that of a model that
        was never pruned.

    Raises
    ------
    TypeError
        Where it is no module.

    Examples
    --------
    >>> from jacsparse.nn import SparseLinear
    >>> model = nn.Sequential(SparseLinear(3, 2, mask=torch.ones(2, 3)), nn.ReLU())
    >>> densify(model)
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=True)
      (1): ReLU()
    )
    """
    model = copied(check_module(model.model if isinstance(model, SparseModel) else model))
    dense: dict[nn.Module, nn.Module] = {
        part: part.to_dense() for part in model.modules() if isinstance(part, SparseLayer)
    }
    model = _replaced(model, dense)
    model = _replaced(model, {part: part.to_dense() for part in model.modules() if isinstance(part, UnpackedAttention)})
    fuse_again(model)
    if not masks:
        for part in model.modules():
            for hook in list(part._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(part, hook._tensor_name)  # type: ignore[attr-defined]
    return model


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also where masks have computed weights that autograd knows."""
    computed = [
        tensor
        for part in model.modules()
        for tensor in vars(part).values()
        if isinstance(tensor, torch.Tensor) and not tensor.is_leaf
    ]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})


def convert(model: nn.Module, paths: set[str]) -> nn.Module:
    """The model, in which the layers at some paths become sparse."""
    model = _replaced(model, unpack_attentions(model, {path.rpartition(".")[0] for path in paths}))
    model = _replaced(model, {part: _sparse(path, part) for path, part in model.named_modules() if path in paths})
    leave_fused(model)
    return model


def _sparse(path: str, layer: nn.Module) -> SparseLayer:
    made_of = sparse_class(layer)
    if made_of is None:
        raise ValueError(f"{path or 'the model'}: {a_type(layer)} has no sparse layer")
    try:
        sparse = made_of.from_dense(layer)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from None
    sparse.keeps_blocks = True
    return sparse


def _replaced(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]
    return others.get(model, model)


def _inputs(model: nn.Module, inputs: tuple[torch.Tensor, ...], training: bool) -> dict[str, LayerInput]:
    """The inputs of all convolutions and linear layers in a run of the model; it may change the model's buffers."""
    layer_inputs: dict[str, LayerInput] = {}

    def note(path: str, args: Any) -> None:
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            layer_inputs[path] = LayerInput(tuple(args[0].shape), args[0].dtype, args[0].requires_grad)

    hooks = [
        part.register_forward_pre_hook(lambda part, args, path=path: note(path, args))
        for path, part in model.named_modules()
        if is_layer(part)
    ]
    with torch.set_grad_enabled(training):
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return layer_inputs


#: Whether a layer is to be sparse, and why, by its path, itself and its input.
_Judge = Callable[[str, nn.Module, LayerInput], dict[str, Any]]


def _choices(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], training: bool, judge: _Judge | None
) -> list[LayerChoice]:
    """How each layer of a model is to run, by one copy of the model, which runs once."""
    opened = copied(model)
    opened = _replaced(opened, unpack_attentions(opened))
    leave_fused(opened)
    parts = [
        (path, part) for path, part in opened.named_modules() if is_layer(part) or weight_counts(part, pruned=True)
    ]
    layer_inputs, shared = _inputs(opened, inputs, training), shared_parameters(opened)
    judged: dict[Any, dict[str, Any]] = {}
    return [_choice(path, part, layer_inputs.get(path), shared, judge, judged) for path, part in parts]


def _sparse_paths(choices: Sequence[LayerChoice]) -> set[str]:
    return {choice.path for choice in choices if choice.is_sparse}


def _choice(
    path: str, layer: Any, x: LayerInput | None, shared: set[int], judge: _Judge | None, judged: dict[Any, Any]
) -> LayerChoice:
    """How a layer is to run, as others of equal sizes; sparse where it can be, if nothing judges it."""
    left, total = (sum(counts) for counts in zip(*weight_counts(layer), strict=True))
    choice = LayerChoice(path, type(layer).__name__, left, total, None, None, False, "nothing is pruned")
    obstacle = obstacle_of(layer, x, shared)
    if obstacle is not None:
        return replace(choice, reason=obstacle)
    if choice.left == choice.total:
        return choice
    if judge is None:
        return replace(choice, is_sparse=True, reason="not measured")
    assert x is not None
    sizes = repr(layer), left, x
    if sizes not in judged:
        judged[sizes] = judge(path, layer, x)
    return replace(choice, **judged[sizes])


def _measured(path: str, layer: Any, x: LayerInput, training: bool, until: float) -> dict[str, Any]:
    """As its sizes let expect, unless measurements clearly show the other way; none begins after `until`."""
    sparse_layer, example = _sparse(path, layer), torch.randn(x.shape, dtype=x.dtype)
    seconds = expected_seconds(sparse_layer, x.shape, _use(training))
    expected = seconds[0] / seconds[1]
    if time.monotonic() > until:
        is_sparse = expected >= _LEAST_EXPECTED
        reason = f"{expected:.1f} times as fast as dense by its sizes; other layers took all time to measure"
        return {"is_sparse": is_sparse, "reason": reason if is_sparse else f"sparse is {reason}", "expected": seconds}
    example_blocks: Any = example
    if example.ndim == {nn.Conv2d: 4, nn.Conv1d: 3}.get(type(layer), 2):
        example_blocks = enter(example, lanes_for(len(example), x.dtype.itemsize)).requires_grad_(x.requires_grad)
    dense, sparse = run_times(
        _pass(copied(layer), example.requires_grad_(x.requires_grad), training),
        _pass(sparse_layer, example_blocks, training),
        most=_OF_LAYER,
    )
    is_sparse = sparse.clearly_below(dense) or (expected >= _LEAST_EXPECTED and not dense.clearly_below(sparse))
    reason = f"{expected:.1f} times as fast as dense by its sizes; this machine is busy"
    if (speed := dense.over(sparse)) is not None:
        reason = f"{speed:.1f} times as fast as dense, by its sizes {expected:.1f}"
    reason = reason if is_sparse else f"sparse is {reason}"
    return {"dense": dense, "sparse": sparse, "is_sparse": is_sparse, "reason": reason, "expected": seconds}


def _expected_frozen(path: str, layer: nn.Module, x: LayerInput) -> dict[str, Any]:
    """As its sizes let expect of a frozen layer."""
    dense, sparse = expected_seconds(_sparse(path, layer), x.shape, "frozen")
    return {"is_sparse": dense >= _LEAST_EXPECTED * sparse}


def _pass(module: nn.Module, x: Any, training: bool) -> Callable[[], None]:
    """A forward pass, or a training step's two passes."""

    def run() -> None:
        with torch.set_grad_enabled(training):
            results = [each for each in tree_leaves(module(x)) if isinstance(each, torch.Tensor)]
        for each in results:
            if isinstance(each, BlockTensor):
                _ = each.blocks
        targets = [result for result in results if result.requires_grad]
        if training and targets:
            # In a model, layers of blocks get gradients in blocks, and none is added to another one.
            torch.autograd.backward(targets, [_ones_like(target) for target in targets])
            module.zero_grad()
            x.grad = None

    return run


def _ones_like(x: torch.Tensor) -> torch.Tensor:
    return x.like(torch.ones_like(x.blocks)) if isinstance(x, BlockTensor) else torch.ones_like(x)
