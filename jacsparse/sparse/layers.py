"""What layers whose parameters are the weights that are left have in common."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import prune

from ..runtime import a_type, is_exporting, is_traced, is_transformed, run_while_traced, uncompiled
from ..tracing import check_initialised, is_recording
from .blocks import BlockTensor
from .convolution import BlockConvolution
from .outputs import plain
from .weights import WeightPlaces
from .windows import Pair, Window

#: The most sizes of inputs and batches for which a layer holds index arrays.
_MOST_SIZES = 32


@run_while_traced
def warn_of_dense_program() -> None:
    """Warn that an exported program multiplies zeros; a strict export calls it once, as it traces."""
    warnings.warn(
        "the program that is traced here holds dense weights for sparse layers, and multiplies their zeros: serve the "
        "model by jacsparse.freeze(model, x), whose save(path) writes it; or export the dense model that it is, "
        "jacsparse.densify(model, masks=False)",
        stacklevel=2,
    )


class _Convolutions(dict[tuple[Pair, int, torch.dtype], BlockConvolution]):
    """A layer's convolutions for inputs of some sizes, which its copies share; other processes make them anew."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class SparseLayer(nn.Module):
    """What convolutions and linear layers of pruned weights share.

    `values` are the weights that are left, a parameter of one dimension, in the kernels' order: for each output
    channel, tap by tap. `mask` tells where they stand.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    #: Whether outputs stay in blocks, for the layers that follow in a model of `sparsify`.
    keeps_blocks: bool = False
    weight_shape: tuple[int, ...]

    @classmethod
    def _made_like(cls, layer: nn.Module, mask: torch.Tensor | None) -> Self:
        sparse = cls.__new__(cls)
        nn.Module.__init__(sparse)
        sparse._like(layer, mask)
        return sparse

    def _like(self, layer: Any, mask: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _take(self, layer: Any, mask: torch.Tensor | None) -> None:
        """Hold the weights of a dense layer that a mask leaves, copied."""
        weight, mask = _masked(layer, mask)
        self._structure = self._structure_of(check_mask(mask, self.weight_shape))
        values = weight.detach().flatten()[self._structure.places]
        if bool(values.isnan().any()):
            raise ValueError(
                f"the weight holds {int(values.isnan().sum())} NaN where the mask leaves it; start from weights that "
                "are numbers"
            )
        _check_dtype("the weight", values)
        self.values = nn.Parameter(values.clone(), requires_grad=weight.requires_grad)
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=layer.bias.requires_grad)
        self._convolutions = _Convolutions()
        self.train(layer.training)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; those that ``torch.nn.utils.prune`` would put in the weights' place are refused."""
        if name in ("weight_orig", "values_orig"):
            raise TypeError(
                f"torch.nn.utils.prune does not prune a {type(self).__name__}, which has only the weights that are "
                "left: give set_mask a mask with fewer, or prune the dense model of jacsparse.densify"
            )
        super().register_parameter(name, param)

    def to_dense(self) -> nn.Module:
        """The dense layer with copies of the weights, masked by ``torch.nn.utils.prune``."""
        raise NotImplementedError

    def _window(self) -> Window:
        raise NotImplementedError

    def _read_size(self, in_size: Pair) -> Pair:
        """Rows and columns that kernels read: those of an input, and of a border that is stored."""
        return in_size

    def out_size(self, in_size: Pair) -> Pair:
        """Rows and columns of the output, for those that are read."""
        raise NotImplementedError

    def _structure_of(self, mask: torch.Tensor) -> WeightPlaces:
        raise NotImplementedError

    @property
    def mask(self) -> torch.Tensor:
        """Which weights are left, bool, of the dense weight's shape."""
        mask = torch.zeros(math.prod(self.weight_shape), dtype=torch.bool)
        mask[self._structure.places] = True
        return mask.view(self.weight_shape)

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight, with zeros where it is pruned; gradients go to `values`."""
        dense = self.values.new_zeros(math.prod(self.weight_shape))
        return dense.index_put((self._structure.places.to(dense.device),), self.values).view(self.weight_shape)

    def set_mask(self, mask: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Prune weights, and let pruned ones grow again, from zero.

        `values` remains the same parameter, with another number of elements, and has no gradient afterwards. Backward
        passes of what the layer has computed before raise an error.

        Parameters
        ----------
        mask : Tensor of bool, or of zeros and ones
            Which weights are left from now on, of the dense weight's shape.
        optimizer : Optimizer, optional
            Its state of `values`, as a momentum, goes along with each weight that stays; that of others is zero.

        Raises
        ------
        TypeError, ValueError
            Where it is no mask of this layer's weight.

        Examples
        --------
        >>> from jacsparse.nn import SparseLinear
        >>> layer = SparseLinear(2, 2, mask=torch.eye(2))
        >>> layer.set_mask(torch.ones(2, 2))
        >>> (layer.weight != 0).tolist()
        [[True, False], [False, True]]
        """
        structure = self._structure_of(check_mask(mask, self.weight_shape))
        before = self._structure.places

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            dense = tensor.new_zeros(math.prod(self.weight_shape))
            dense[before] = tensor
            return dense[structure.places]

        state = {} if optimizer is None else optimizer.state.get(self.values, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == self.values.shape:
                state[name] = moved(value)
        values, self.values.grad = moved(self.values.data), None
        # What adds gradients to a parameter expects its first shape, and lives as long as any graph, unless its dtype
        # changes. Written to in place, the parameter is refused by the backward passes of graphs that were made before.
        self.values.data = values.new_empty(0, dtype=torch.float16)
        self.values.data = torch.empty_like(values)
        with torch.no_grad():
            self.values.copy_(values)
        self._structure, self._convolutions = structure, _Convolutions()

    def _convolution(self, in_size: Pair, lanes: int) -> BlockConvolution:
        key, convolutions = (in_size, lanes, self.values.dtype), self._convolutions
        convolution = convolutions.get(key)
        if convolution is None:
            if len(convolutions) >= _MOST_SIZES:
                convolutions.clear()
            out_size = self.out_size(in_size)
            convolution = BlockConvolution(self._structure, self._window(), in_size, out_size, lanes, self.values.dtype)
            convolutions[key] = convolution
        return convolution

    def forward(self, x: Any) -> Any:
        """The layer's output.

        Programs that torch.export and torch.jit.trace make get PyTorch's own operators with a dense weight; so do
        transforms of ``torch.func``, and `jacsparse.jacobian` and its like, which see no kernels of ours.
        """
        if is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            warn_of_dense_program()
            return self._by_operators(x)
        return self._run(x)

    @uncompiled
    def _run(self, x: Any) -> Any:
        if is_recording() or is_traced() or is_transformed():
            return self._by_operators(x)
        return self._by_kernels(x)

    def _by_operators(self, x: Any) -> Any:
        """The layer's output by PyTorch's operators alone."""
        raise NotImplementedError

    def _by_kernels(self, x: Any) -> Any:
        """The layer's output at the cost of the weights that are left; blocks, where the layer keeps them."""
        raise NotImplementedError

    def _of_blocks(self, x: BlockTensor) -> BlockTensor:
        """The layer's output, computed together with what follows."""
        in_size = x.sizes[2:] if len(x.sizes) == 4 else (1, 1)
        return self._convolution(in_size, x.memory.lanes)(x, self.values, self.bias)  # type: ignore[arg-type]

    def _takes(self, x: Any) -> bool:
        """Whether an input is in blocks of this layer's dtype."""
        return type(x) is BlockTensor and x.memory.content is not None and x.memory.dtype == self.values.dtype

    def _check(self, x: object) -> torch.Tensor:
        x = plain(x)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is {a_type(x)}; expected a tensor")
        for name, tensor in (("x", x), ("the layer", self.values)):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} is on {tensor.device}; {type(self).__name__} runs on the CPU alone: move it by .cpu(), or "
                    "make a dense layer for the GPU by to_dense()"
                )
        _check_dtype("x", x)
        if x.dtype != self.values.dtype:
            raise TypeError(f"x is {x.dtype} and the layer's values are {self.values.dtype}; convert one of them")
        return x

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "values"]
        weight, mask = self.weight, self.mask
        destination[prefix + "weight_orig"] = weight if keep_vars else weight.detach()
        destination[prefix + "weight_mask"] = mask.to(weight.dtype)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        dense, mask, weight = (prefix + name for name in ("weight_orig", "weight_mask", "weight"))
        name = dense if dense in state_dict or weight not in state_dict else weight
        if name not in state_dict:
            missing.append(name)
        else:
            try:
                self._load(state_dict[name], state_dict.get(mask))
            except (TypeError, ValueError) as error:
                errors.append(f"{name}: {error}")
        # The weights are taken; what is left for PyTorch is the bias.
        rest = {key: value for key, value in state_dict.items() if key not in (dense, mask, weight)}
        rest[prefix + "values"] = self.values.detach()
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)

    @torch.no_grad()
    def _load(self, weight: torch.Tensor, mask: torch.Tensor | None) -> None:
        if tuple(weight.shape) != self.weight_shape:
            raise ValueError(f"the weight has shape {tuple(weight.shape)}; expected {self.weight_shape}")
        if mask is not None:
            mask = check_mask(mask, self.weight_shape)
            if not torch.equal(mask, self.mask):
                self.set_mask(mask)
        elif bool((weight[~self.mask] != 0).any()):
            raise ValueError(
                "it has weights where this layer's mask has none; make the layer anew by from_dense, or give "
                "weight_orig and weight_mask"
            )
        self.values.copy_(weight.flatten()[self._structure.places])

    def _pruned(self, layer: nn.Module) -> nn.Module:
        """A dense layer with this one's weights, masked by ``torch.nn.utils.prune``."""
        layer = layer.to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.copy_(self.weight)  # type: ignore[union-attr, operator]
            if self.bias is not None:
                layer.bias.copy_(self.bias)  # type: ignore[union-attr, operator]
            # Within: a weight that autograd knows could not be copied.
            prune.custom_from_mask(layer, "weight", self.mask)
        layer.weight_orig.requires_grad_(self.values.requires_grad)  # type: ignore[union-attr, operator]
        if self.bias is not None:
            layer.bias.requires_grad_(self.bias.requires_grad)  # type: ignore[union-attr, operator]
        return layer.train(self.training)

    def _left(self) -> str:
        total = math.prod(self.weight_shape)
        return f"{len(self.values)} of {total} weights left"


def rename_state(module: nn.Module, inner: str, outer: str) -> None:
    """Let the names of a module's state begin with `outer` where those of its parts begin with `inner`."""
    module.register_state_dict_post_hook(functools.partial(_renamed, inner, outer))
    module.register_load_state_dict_pre_hook(functools.partial(_renamed, outer, inner))


def _renamed(before: str, after: str, module: nn.Module, state: Any, prefix: str, *arguments: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + before)]:
        state[prefix + after + name.removeprefix(prefix + before)] = state.pop(name)


def check_mask(mask: object, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask as bool on the CPU.

    Raises
    ------
    TypeError, ValueError
        Where it is no tensor, has another shape, or holds what is neither 0 nor 1.
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"the mask is {a_type(mask)}; expected a tensor of bool, or of zeros and ones")
    if tuple(mask.shape) != shape:
        raise ValueError(f"the mask has shape {tuple(mask.shape)}; expected the weight's, {shape}")
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise ValueError(f"the mask holds {other[0].item()}; expected zeros and ones: a weight is left, or it is not")
    return (mask != 0).cpu()


def _masked(layer: nn.Module, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's weight, before the mask of its own is applied, and the mask to take."""
    check_initialised(layer)
    if hasattr(layer, "bias_mask"):
        raise ValueError("the bias is pruned too; make that permanent by torch.nn.utils.prune.remove(layer, 'bias')")
    original, own = getattr(layer, "weight_orig", None), getattr(layer, "weight_mask", None)
    weight = layer.weight if original is None else original
    assert isinstance(weight, torch.Tensor)
    if weight.device.type != "cpu":
        raise ValueError(f"the weight is on {weight.device}; sparse layers run on the CPU alone: move it by .cpu()")
    if mask is None:
        mask = weight != 0 if own is None else own
    return weight, mask


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        remedy = "convert it by .float()"
        if tensor.dtype in (torch.float16, torch.bfloat16):
            remedy += ", and leave sparse layers out of autocast"
        raise TypeError(f"{name} is {tensor.dtype}; expected float32 or float64: {remedy}")
