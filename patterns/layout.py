"""Where the samples of a batch are in a tensor, and where an operator moves them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch


class MixedSamplesError(Exception):
    """An operator's output for one sample depends on another sample.

    Its two arguments, if any, say what mixes the samples and what to do.
    """


@dataclass(frozen=True)
class Layout:
    """The axis of a tensor along which the samples of a batch lie, with `copies` elements for each sample.

    Attributes
    ----------
    axis : int
        An axis whose size is the batch times `copies`; -1 where the whole tensor is one sample.
    copies : int
        Number of images, heads or windows that the operator sees in a sample.
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
        """The tensor whose `split` is `samples`."""
        if self.axis < 0:
            # Only operators that work on each sample by itself are asked for several.
            return samples.squeeze(0)
        place = self.axis + 1 if self.minor else self.axis
        return samples.movedim(0, place).flatten(self.axis, self.axis + 1)

    def shape_of_sample(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape for a batch of one, from the shape for the whole batch."""
        if self.axis < 0:
            return tuple(shape)
        return (*shape[: self.axis], self.copies, *shape[self.axis + 1 :])


#: The layout for a batch of one.
WHOLE = Layout(-1)

#: A label for each axis of a tensor: axes of one label run together, element by element.
Labels = tuple[Hashable, ...]


def layouts_by_labels(
    shapes: Mapping[str, Sequence[int]],
    labels: Mapping[str, Labels],
    out_labels: Labels,
    layouts: Mapping[str, Layout],
) -> tuple[dict[str, Layout], Layout]:
    """Layouts of an operator's operands and of its output, from the labels of their axes and some operands' layouts.

    A tensor without labels has no axis in common with another. An axis whose label the output lacks is summed over, or
    mixed in another way. MixedSamplesError is raised where samples do not stay apart.
    """
    sample_axes = {(labels[name][layout.axis], layout.copies, layout.minor) for name, layout in layouts.items()}
    sizes = {shapes[name][layout.axis] for name, layout in layouts.items()}
    if len(sample_axes) != 1 or len(sizes) != 1:
        raise MixedSamplesError
    ((label, copies, minor),), (size,) = sample_axes, sizes
    if label not in out_labels:
        raise MixedSamplesError
    all_layouts = dict(layouts)
    for name, shape in shapes.items():
        if name in layouts or label not in labels.get(name, ()):
            continue
        axis = labels[name].index(label)
        if shape[axis] == size:
            # It differs between the samples, though it does not depend on the input.
            all_layouts[name] = Layout(axis, copies, minor)
        elif shape[axis] != 1:
            raise MixedSamplesError
    return all_layouts, Layout(out_labels.index(label), copies, minor)


def layouts_of_samples(samples: np.ndarray, batch: int) -> list[Layout]:
    """The layouts in which each element of a tensor belongs to its sample in `samples`, -1 for any sample."""
    layouts = []
    for axis, size in enumerate(samples.shape):
        if size == 0 or size % batch:
            continue
        copies = size // batch
        index = np.arange(size)
        for minor in (False, True) if copies > 1 else (False,):
            expected = (index % batch if minor else index // copies).reshape(-1, *[1] * (samples.ndim - axis - 1))
            if bool(((samples == expected) | (samples < 0)).all()):
                layouts.append(Layout(axis, copies, minor))
    return sorted(layouts, key=lambda layout: layout.copies)
