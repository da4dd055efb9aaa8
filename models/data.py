"""Data sets: digits that need no download, CIFAR and IRMAS from files, bitstreams and tones."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch.nn import functional

from .dataset import Dataset

#: The data sets by name, and what follows the name after a colon.
DATA = {
    "digits": None, "cifar10": "DIR", "cifar100": "DIR", "bitstream": "STEPS", "irmas": "DIR", "tones": None,
    "file": "PATH",
}  # fmt: skip


def load_data(spec: str = "digits", *, features: str = "S", skip_damaged: bool = False) -> Dataset:
    """Load a data set.

    Parameters
    ----------
    spec : str
        ``digits``: scikit-learn's 1797 handwritten digits of 8 × 8, resized; every run tests with the same 360.
        ``cifar10:DIR``, ``cifar100:DIR``: the binary version, unpacked in that folder, from
        https://www.cs.toronto.edu/~kriz/cifar.html; CIFAR-100 with its fine labels.
        ``bitstream:STEPS``: random bits, as `bitstreams` draws them.
        ``irmas:DIR``: IRMAS' training data, unpacked in that folder, as `load_irmas` reads them.
        ``tones``: a small set of synthetic sounds in IRMAS' layout.
        ``file:PATH``: samples of one's own, a .safetensors file or a .pt file of a dict with floating-point ``inputs``,
        ``(n, channels, height, width)`` or ``(n, features, time)``, and integers ``labels``, ``(n,)``. The last fifth
        is tested with.
    features : {"S", "M", "L"}
        Row of the thesis' Table 4.2, for sounds.
    skip_damaged : bool
        Whether to leave out sounds that cannot be used.

    Raises
    ------
    ValueError
        Where there is no such data set, or its files are damaged.
    FileNotFoundError
        Where files are missing; the message names them, and says where to get them.
    ImportError
        Where digits need scikit-learn, or sounds need librosa, and it is not installed.

    Examples
    --------
    >>> load_data("digits")
    <Dataset digits: 1,437 images to train on, 360 to test, 10 classes>
    """
    name, argument = split_spec(spec)
    if name == "digits":
        return _digits()
    if name == "file":
        return _own(Path(argument).expanduser())
    if name == "bitstream":
        from .bitstream import bitstreams

        return bitstreams(int(argument))
    if name == "tones":
        from .tones import tones

        return tones(features)
    if name == "irmas":
        from .irmas import load_irmas

        return load_irmas(Path(argument).expanduser(), features, skip_damaged=skip_damaged)
    from .cifar10 import load_cifar

    return load_cifar(name, Path(argument).expanduser())


def split_spec(spec: str) -> tuple[str, str]:
    """Return a data set's name and its argument; raise ValueError where they are not of the form of `DATA`."""
    name, colon, argument = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    fits = bool(argument) if DATA.get(name) else not colon
    if DATA.get(name) == "STEPS":
        fits = argument.isascii() and argument.isdecimal() and int(argument) > 0
    if name not in DATA or not fits:
        forms = [f"{name}:{kind}" if kind else name for name, kind in DATA.items()]
        raise ValueError(f"data is {spec!r}; expected {', '.join(forms[:-1])} or {forms[-1]}")
    return name, argument


def _own(path: Path) -> Dataset:
    """Inputs and labels in a file; no code in the file runs."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; save inputs and labels by safetensors.torch.save_file")
    try:
        if path.suffix == ".safetensors":
            tensors: object = safetensors.torch.load_file(path)
        else:
            tensors = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        # The errors of safetensors and PyTorch for a damaged file share no base class.
        raise ValueError(f"{path} cannot be read: it is damaged, or holds more than tensors") from error
    inputs, labels = (tensors.get(name) if isinstance(tensors, dict) else None for name in ("inputs", "labels"))
    if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
        raise ValueError(f"{path} holds no tensors inputs and labels; save both by their names")  # noqa: TRY004
    if not inputs.is_floating_point() or inputs.ndim not in (3, 4):
        raise ValueError(
            f"{path}: inputs are {inputs.dtype} of shape {tuple(inputs.shape)}; expected floating-point images (n, "
            "channels, height, width) or sequences (n, features, time)"
        )
    if labels.dtype not in (torch.uint8, torch.int32, torch.int64) or labels.shape != inputs.shape[:1]:
        raise ValueError(
            f"{path}: labels are {labels.dtype} of shape {tuple(labels.shape)}; expected integers, one for each of "
            f"{len(inputs)} inputs"
        )
    test = len(inputs) // 5
    if not test:
        raise ValueError(
            f"{path} holds {len(inputs)} inputs; expected 5 at least, the last fifth of which is tested with"
        )
    if not inputs.isfinite().all():
        raise ValueError(f"{path}: inputs hold NaN or infinity; leave out such samples")
    if labels.min() < 0:
        raise ValueError(f"{path}: the least label is {int(labels.min())}; expected numbers of classes, from 0")
    inputs, labels = inputs.float(), labels.long()
    parts = (inputs[:-test], labels[:-test], inputs[-test:], labels[-test:])
    return Dataset(*parts, classes=int(labels.max()) + 1, source=path.name, mean=(), std=())


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'jacsparse[data]'") from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    images = functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels, train = images[order], labels[order], len(labels) * 4 // 5
    mean, std = images[:train].mean(), images[:train].std()
    images = ((images - mean) / std).repeat(1, 3, 1, 1)
    parts = (images[:train], labels[:train], images[train:], labels[train:])
    return Dataset(*parts, classes=10, source="digits", mean=(mean.item(),) * 3, std=(std.item(),) * 3)
