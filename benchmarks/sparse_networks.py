"""Pruned networks at the cost of the weights that are left: training steps and inference, beside dense PyTorch."""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import jacsparse

from ._calls import Call, in_mode
from ._context import Context
from ._experiment import Grid
from ._figures import COLOURS, Drawn, Line, Panel, Picture, Straight
from ._programs import package
from ._rows import Group, Row, where
from ._workloads import pruned_resnet18, whole_pruned_vgg11

SPARSEPROP, ONNX_RUNTIME, DEEPSPARSE = "SparseProp", "ONNX Runtime", "DeepSparse"
_DENSE, _COMPILED = "PyTorch, dense with masks", "PyTorch, dense, torch.compile"
_OURS, _FROZEN = "jacsparse.sparsify", "jacsparse.freeze"


def step_call(model: Any, x: torch.Tensor) -> Call:
    """A training step: forward pass, loss, backward pass, and SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    targets = torch.randint(0, 2, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), targets).backward()
        optimizer.step()

    return step


def forward_call(model: Any, x: torch.Tensor) -> Call:
    """A forward pass."""

    def inference() -> object:
        with torch.inference_mode():
            return model(x)

    return inference


@dataclass(frozen=True)
class PrunedNetwork:
    """A pruned network, and the batches that it is measured at."""

    name: str
    build: Callable[[], nn.Module]
    batches: tuple[int, ...]
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: How many times as fast as dense PyTorch, and as SparseProp or DeepSparse, jacsparse should be.
    dense: float = 1.0
    peer: float = 1.0


@dataclass(frozen=True)
class _PrunedGrid(Grid):
    """Calls of one network and batch that take turns."""

    networks: tuple[PrunedNetwork, ...] = ()
    #: Whether torch.compile is a peer, which takes a minute to compile each network.
    compiled: bool = True

    #: Whether networks are trained.
    training: ClassVar[bool]
    #: The rows of ours, the last of which has targets, and the peer for which there is one.
    ours: ClassVar[tuple[str, ...]]
    peer: ClassVar[str]

    def cases(self, context: Context) -> Iterable[tuple[PrunedNetwork, int]]:
        return [(network, batch) for network in self.networks for batch in network.batches]

    @abstractmethod
    def others(self, build: Callable[[], nn.Module], x: torch.Tensor, folder: str) -> dict[str, Callable[[], Call]]:
        """Functions that prepare further calls, or raise the reason why there are none, by label."""

    def measure(self, case: tuple[PrunedNetwork, int], context: Context) -> list[Row]:
        """A row for each function; those of our own model are compared with the others."""
        network, batch = case
        torch.manual_seed(0)
        x = torch.randn(batch, *network.input_shape)
        rows, call_of = Group(f"{network.name}, batch {batch}"), step_call if self.training else forward_call

        def build() -> nn.Module:
            return network.build().train(self.training)

        with tempfile.TemporaryDirectory() as folder:
            prepare: dict[str, Callable[[], Call]] = {
                _DENSE: lambda: call_of(build(), x),
                _OURS: lambda: call_of(jacsparse.sparsify(build(), x), x),
                **self.others(build, x, folder),
            }
            if self.compiled:
                prepare[_COMPILED] = lambda: call_of(torch.compile(build()), x)
            calls = {label: in_mode(prepared, "") for label, prepared in prepare.items()}
            rows.in_turns(context, calls, role={label: "peer" for label in calls if label not in self.ours})
        best = rows.fastest((_DENSE, _COMPILED))
        for ours in self.ours:
            name, has_targets = ours if len(self.ours) > 1 else "jacsparse", ours == self.ours[-1]
            if best is not None:
                target = network.dense if has_targets else None
                rows.compare(f"the better dense PyTorch / {name}", best.label, ours, at_least=target)
            for label in (SPARSEPROP, ONNX_RUNTIME, DEEPSPARSE):
                target = network.peer if has_targets and label == self.peer else None
                rows.compare(f"{label} / {name}", label, ours, at_least=target)
        if self.training:
            for label in (_DENSE, _OURS):
                call = prepare[label]()
                call()
                what, role = f"{label}: memory", rows[label].role
                rows.memory(what, call, runs=1, quantity="peak memory of a step", role=role)
            rows.compare("dense / jacsparse, memory", f"{_DENSE}: memory", f"{_OURS}: memory", at_least=1.0)
        return rows.rows()


@dataclass(frozen=True)
class SparseTraining(_PrunedGrid):
    """A whole step: forward pass, loss, backward pass, and SGD with momentum."""

    networks: tuple[PrunedNetwork, ...] = (
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (16,), dense=7.0, peer=3.0),
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (64,), dense=7.0, peer=2.6),
        PrunedNetwork("ResNet-18, 95 % pruned", pruned_resnet18, (64,), dense=3.0, peer=1.5),
    )

    training, ours, peer = True, (_OURS,), SPARSEPROP
    name = "sparse_training"
    title = "A training step of a pruned network"
    source = "Nikdan et al., SparseProp (2023): training at the cost of the weights that are left"

    def others(self, build: Callable[[], nn.Module], x: torch.Tensor, folder: str) -> dict[str, Callable[[], Call]]:
        return {SPARSEPROP: lambda: step_call(sparseprop_model(build(), tuple(x.shape)), x)}


@dataclass(frozen=True)
class SparseCrossover(Grid):
    """From which share of pruned weights on a step of sparse layers is faster, for small and large batches."""

    shares: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
    batches: tuple[int, ...] = (1, 4, 16, 64, 128)
    build: Callable[[float], nn.Module] = whole_pruned_vgg11
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: Of each function's runs.
    seconds: float = 1.0

    name = "sparse_crossover"
    title = "Training steps of VGG-11 by the share of pruned weights and by batch"
    source = "Nikdan et al., SparseProp (2023): from which sparsity on it is faster"

    def cases(self, context: Context) -> Iterable[tuple[int, float]]:
        return itertools.product(self.batches, self.shares)

    def measure(self, case: tuple[int, float], context: Context) -> list[Row]:
        batch, share = case
        rows, x = Group(f"batch {batch}, {100 * share:g} % pruned"), torch.randn(batch, *self.input_shape)
        data = {_OURS: {"share": share, "batch": batch}}
        models = {_DENSE: self.build(share).train(), _OURS: jacsparse.sparsify(self.build(share).train(), x)}
        steps = {label: step_call(model, x) for label, model in models.items()}
        rows.in_turns(context, steps, seconds=self.seconds, role={_DENSE: "peer"}, data=data)
        rows.compare("dense / jacsparse", _DENSE, _OURS, at_least=0.95)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        lines: list[Drawn] = [Straight(1.0)]
        for batch, colour in zip(self.batches, COLOURS, strict=False):
            of_batch = [row for row in where(rows, batch=batch) if row.comparisons]
            points = [(100 * (1 - row.data["share"]), row.comparisons[0].ratio) for row in of_batch]
            lines.append(Line.through(points, f"batch {batch}", colour, "o-"))
        # From all weights on the left to few on the right.
        left, speeds = [100 * (1 - share) for share in self.shares], (1, 2, 5, 10, 20)
        settings = {
            **{"xlim": (1.15 * max(left), 0.87 * min(left)), "xticks": left, "xticklabels": [f"{e:g}" for e in left]},
            **{"yticks": speeds, "yticklabels": [str(speed) for speed in speeds]},
        }
        x, y = "weights of the convolutions that are left, %", "times as fast as dense PyTorch with masks"
        return Picture(self.title, [Panel(lines, "", x, y, "xy", settings=settings)], (7.0, 4.4))


@dataclass(frozen=True)
class SparseInference(_PrunedGrid):
    """A forward pass in evaluation mode."""

    networks: tuple[PrunedNetwork, ...] = (
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (1,), dense=3.0, peer=0.5),
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (16, 64), dense=10.0),
        PrunedNetwork("ResNet-18, 95 % pruned", pruned_resnet18, (1, 16, 64), dense=3.0),
    )

    training, ours, peer = False, (_OURS, _FROZEN), DEEPSPARSE
    name = "sparse_inference"
    title = "Inference with a pruned network"
    source = "Kurtz et al. (2020), and DeepSparse: inference at the cost of the weights that are left"

    def others(self, build: Callable[[], nn.Module], x: torch.Tensor, folder: str) -> dict[str, Callable[[], Call]]:
        return {
            _FROZEN: lambda: forward_call(jacsparse.freeze(jacsparse.sparsify(build(), x), x), x),
            ONNX_RUNTIME: lambda: onnx_runtime_call(exported(build(), x, folder), x),
            DEEPSPARSE: lambda: deepsparse_call(build(), x, folder),
        }


# Peers that train or run pruned networks; each raises ImportError where it is not installed.


def unmasked(model: nn.Module) -> nn.Module:
    """A copy whose weights hold zeros where they are pruned."""
    return jacsparse.densify(model, masks=False)


def sparseprop_model(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The model with SparseProp's layers where these are faster, by its own choice, for a batch of that shape."""
    sparseprop = package("sparseprop.utils", SPARSEPROP, "pip install sparseprop")
    # It prints what it chooses.
    with contextlib.redirect_stdout(io.StringIO()):
        return sparseprop.swap_modules_with_sparse(unmasked(model), shape)  # type: ignore[no-any-return]


def onnx_runtime_call(path: str, x: torch.Tensor) -> Call:
    """A run of an exported model by ONNX Runtime on as many threads as PyTorch uses."""
    onnxruntime = package("onnxruntime", ONNX_RUNTIME, "pip install 'jacsparse[rivals]'")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, inputs)


def deepsparse_call(model: nn.Module, x: torch.Tensor, folder: str) -> Call:
    """A run of the model by DeepSparse, whose licence allows evaluation alone."""
    deepsparse = package("deepsparse", DEEPSPARSE, "it needs Python 3.11 and an environment of its own")
    # It reads no newer set of operators.
    path = exported(model, x, folder, opset=13)
    engine = deepsparse.compile_model(path, batch_size=len(x), num_cores=torch.get_num_threads())
    inputs = [x.numpy()]
    return lambda: engine.run(inputs)


def exported(model: nn.Module, x: torch.Tensor, folder: str, opset: int | None = None) -> str:
    """The path of the dense model in a folder, as ONNX."""
    package("onnx", "onnx", "pip install 'jacsparse[rivals]'")
    path = f"{folder}/model.onnx"
    torch.onnx.export(unmasked(model), (x,), path, dynamo=False, opset_version=opset, input_names=["x"])
    return path
