"""Where the samples of a batch are in a tensor, and where an operator takes them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["WHOLE", "Labels", "Layout", "MixedSamplesError", "layouts_by_labels", "layouts_of_samples"]


class MixedSamplesError(Exception):
    """An operator's output for one sample depends on another sample.

    Its arguments, where it has any: what mixes them, and what to do.
    """


@dataclass(frozen=True)
class Layout:
    """The axis of a tensor along which the samples of a batch lie, `copies` elements of it for each.

    Attributes
    ----------
    axis : int
        Its size is the batch times `copies`; -1 where the whole tensor is one sample.
    copies : int
        How many images, heads or windows a sample is to the operator.
    minor : bool
        Whether the sample is the faster index of the two.
    """

    axis: int
    copies: int = 1
    minor: bool = False

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as ``(batch, *shape for a batch of one)``."""
        if self.axis < 0:
            return tensor.unsqueeze(0)
        if not self.axis and self.copies == 1:
            return tensor.unsqueeze(1)
        batch = tensor.shape[self.axis] // max(1, self.copies)
        if self.minor:
            return tensor.unflatten(self.axis, (self.copies, batch)).movedim(self.axis + 1, 0)
        return tensor.unflatten(self.axis, (batch, self.copies)).movedim(self.axis, 0)

    def join(self, samples: torch.Tensor) -> torch.Tensor:
        """The tensor of which `samples` is the `split`."""
        if self.axis < 0:
            # Several samples: only operators that work on each by itself are asked for them.
            return samples.squeeze(0)
        place = self.axis + 1 if self.minor else self.axis
        return samples.movedim(0, place).flatten(self.axis, self.axis + 1)

    def shape_of_sample(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that a tensor of this shape has for a batch of one."""
        if self.axis < 0:
            return tuple(shape)
        return (*shape[: self.axis], self.copies, *shape[self.axis + 1 :])


#: Of a batch of one: there is nothing to keep apart.
WHOLE = Layout(-1)

#: A label for each axis of a tensor: axes of one label run together, element by element.
Labels = tuple[Hashable, ...]


def layouts_by_labels(
    shapes: Mapping[str, Sequence[int]],
    labels: Mapping[str, Labels],
    out_labels: Labels,
    layouts: Mapping[str, Layout],
) -> tuple[dict[str, Layout], Layout]:
    """Layouts of an operator's operands and of its output, from the labels of their axes.

    Parameters
    ----------
    shapes : mapping of str to sequence of int
        Of all tensors that the operator is given, by name.
    labels : mapping of str to tuple
        Of their axes; a tensor that is left out has no axis in common with another.
    out_labels : tuple
        Of the output's axes. What has no label there is summed over, or mixed in another way.
    layouts : mapping of str to Layout
        Of the operands that depend on the input.

    Raises
    ------
    MixedSamplesError
        Where samples do not stay apart.
    """
    found = {(labels[name][layout.axis], layout.copies, layout.minor) for name, layout in layouts.items()}
    if len(found) != 1:
        raise MixedSamplesError
    ((label, copies, minor),) = found
    sizes = {shapes[name][layout.axis] for name, layout in layouts.items()}
    if label not in out_labels or len(sizes) != 1:
        raise MixedSamplesError
    (size,) = sizes
    every = dict(layouts)
    for name, shape in shapes.items():
        if name in layouts or label not in labels.get(name, ()):
            continue
        axis = labels[name].index(label)
        if shape[axis] == size:
            # Another for each sample, though it does not depend on the input.
            every[name] = Layout(axis, copies, minor)
        elif shape[axis] != 1:
            raise MixedSamplesError
    return every, Layout(out_labels.index(label), copies, minor)


def layouts_of_samples(samples: np.ndarray, batch: int) -> list[Layout]:
    """The layouts by which the elements of a tensor belong to these samples; -1 for an element of none."""
    found = []
    for axis, size in enumerate(samples.shape):
        if size == 0 or size % batch:
            continue
        copies = size // batch
        index = np.arange(size)
        for minor in (False, True) if copies > 1 else (False,):
            own = (index % batch if minor else index // copies).reshape(-1, *[1] * (samples.ndim - axis - 1))
            if bool(((samples == own) | (samples < 0)).all()):
                found.append(Layout(axis, copies, minor))
    return sorted(found, key=lambda layout: layout.copies)
