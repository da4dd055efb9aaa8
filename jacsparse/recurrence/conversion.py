"""Models with this library's recurrent layers in the place of `torch.nn`'s, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..runtime import a_type
from .layers import GRU, LSTM, RNN
from .recurrent import Recurrent

#: Our layers that compute what those of `torch.nn` do.
_COUNTERPARTS: dict[type[nn.Module], type[Recurrent]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}


def convert(module: nn.Module, *, to: str = "jacsparse", **options: Any) -> nn.Module:
    """Put this library's recurrent layers in the place of `torch.nn`'s in a model, or back.

    Parameters
    ----------
    module : Module
        The model; the layers in it are replaced in place, as ``SyncBatchNorm.convert_sync_batchnorm`` does. Parameters
        are the same objects, so that an optimiser goes on, and the state_dict keeps its names.
    to : {"jacsparse", "torch"}
        Whose layers it is to have.
    **options
        Of the new layers: ``schedule``, ``forward``, ``chunk``, ``process_group``, ``exchange``, as `RNN` takes them.

    Returns
    -------
    Module
        The model, or the new layer where `module` is one itself.

    Raises
    ------
    TypeError, ValueError
        As `RNN.of`, with the layer's path, and where weights are neither float32 nor float64; nothing is replaced
        then.

    Notes
    -----
    Layers with projections, parametrised ones and those of other subclasses stay as they are. Tools that look for
    `torch.nn`'s own classes, such as ``torch.ao.quantization.quantize_dynamic``, pass over this library's layers:
    convert to ``"torch"`` first.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.ModuleDict({"encoder": torch.nn.GRU(3, 20), "head": torch.nn.Linear(20, 2)})
    >>> convert(model, schedule="chunked")
    ModuleDict(
      (encoder): GRU(3, 20, schedule='chunked')
      (head): Linear(in_features=20, out_features=2, bias=True)
    )
    >>> type(convert(model, to="torch")["encoder"]).__module__
    'torch.nn.modules.rnn'
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {a_type(module)}; expected a torch.nn.Module")
    if to not in ("jacsparse", "torch"):
        raise ValueError(f"to is {to!r}; expected 'jacsparse' or 'torch'")
    # Wrong options are an error for a model without such layers, too.
    RNN(1, 1, **options)
    layers: dict[nn.Module, nn.Module] = {}
    for path, part in module.named_modules():
        if to == "torch" and type(part) in (RNN, GRU, LSTM):
            layers[part] = part.to_torch()
        elif to == "jacsparse" and type(part) in _COUNTERPARTS and not part.proj_size:
            others = {weight.dtype for weight in part.parameters()} - {torch.float32, torch.float64}
            if others:
                raise TypeError(
                    f"{path or type(part).__name__}: its weights are {others.pop()}, and this library's layers take "
                    "float32 and float64: leave it torch.nn's, as convert(model, to='torch') does, or convert it by "
                    ".float() and call it under autocast"
                )
            try:
                layers[part] = _COUNTERPARTS[type(part)].of(part, **options)  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise type(error)(f"{path}: {error}" if path else str(error)) from None
    for before, after in layers.items():
        # A handle removes its hook from where it was put: the new layer has that very dict.
        after.__dict__.update((name, hooks) for name, hooks in before.__dict__.items() if "_hooks" in name)
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child in layers:
                parent._modules[name] = layers[child]
    return layers.get(module, module)
