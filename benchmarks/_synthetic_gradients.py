"""Training by synthetic gradients: each module's gradient is predicted (Jaderberg et al., 2017, DNI)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional

from jacsparse.training import in_eval_mode, partition


class GradientPredictor(nn.Module):
    """Predicts the gradient of an activation of a shape, without the batch, from the activation and the labels.

    Three convolutions of 5 × 5 with as many filters as the activation has channels, or three linear layers where it is
    flat; labels are further channels, one for each class. The last layer begins at zero, and so do the predictions.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        if len(shape) not in (1, 3):
            raise ValueError(
                f"an activation has shape {tuple(shape)}, without the batch; gradients are predicted of (channels, "
                "height, width) and of (units,): split elsewhere"
            )
        self.classes, width = classes, shape[0]
        layers: list[nn.Module] = []
        for into in (width + classes, width, width):
            layers += [nn.Conv2d(into, width, 5, padding=2) if len(shape) == 3 else nn.Linear(into, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        last = self.layers[-1]
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, activation: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The predicted gradient, of the activation's shape."""
        channels = functional.one_hot(labels, self.classes).to(activation)
        channels = channels.reshape(*channels.shape, *[1] * (activation.ndim - 2))
        channels = channels.expand(-1, -1, *activation.shape[2:])
        prediction: torch.Tensor = self.layers(torch.cat([activation, channels], dim=1))
        return prediction


class SyntheticGradients:
    """Trains a classifier whose modules use predicted gradients, and learn to predict them.

    A module updates its weights by the prediction of its output's gradient, and the gradient of its input, which
    follows from that, is what the predictor before it learns. This is the baseline DNI of Huo et al. (2018), section
    5.1; with one module it is plain training. `modules` and `optimizer` are as of
    `jacsparse.training.DelayedGradients`, and `example` is an input, which tells the shapes of activations.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: int | Sequence[int | str],
        classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        example: torch.Tensor,
    ) -> None:
        self.model = model
        self.partition = partition(model, modules)
        self.predictors = [
            GradientPredictor(output.shape[1:], classes).to(output) for output in _outputs(self.partition, example)
        ]
        trained = [module for module in (*self.partition, *self.predictors) if any(True for _ in module.parameters())]
        self.optimizers = [optimizer(module.parameters()) for module in trained]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on a batch; return its loss, detached."""
        inputs, outputs = [x.detach()], list[torch.Tensor]()
        for number, part in enumerate(self.partition):
            if number:
                inputs.append(outputs[-1].detach().requires_grad_())
            # Layers that work in place do so on a copy.
            outputs.append(part(inputs[-1].clone() if number else inputs[-1]))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = functional.cross_entropy(outputs[-1], y)
        predictions = [
            predictor(output.detach(), y) for predictor, output in zip(self.predictors, outputs[:-1], strict=True)
        ]
        loss.backward()
        for output, prediction in zip(outputs[:-1], predictions, strict=True):
            if output.requires_grad:
                output.backward(prediction.detach())
        for prediction, following in zip(predictions, inputs[1:], strict=True):
            if following.grad is not None:
                functional.mse_loss(prediction, following.grad).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def synchronize(self) -> None:
        """All weights are in this process."""


@torch.no_grad()
def _outputs(parts: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    """The activations between parts, in eval mode, so that nothing in the parts changes."""
    outputs = []
    for part in parts[:-1]:
        with in_eval_mode(part):
            x = part(x.clone())
        outputs.append(x)
    return outputs
