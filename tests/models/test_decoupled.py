"""`train` by delayed gradients, and by a trainer of one's own."""

import dataclasses

import pytest
from jacsparse.models import default_settings, load_data, train

from jacsparse.training import Backpropagation


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_resnet8_by_delayed_gradients_is_as_accurate_as_by_back_propagation():
    settings = dataclasses.replace(default_settings("resnet8"), epochs=30, decay="steps")

    def mean_accuracy(**changes):
        runs = [train(dataclasses.replace(settings, seed=seed, **changes)) for seed in range(3)]
        return sum(run.accuracy["trained"] for run in runs) / len(runs)

    plain = mean_accuracy()
    assert plain >= 0.95
    assert mean_accuracy(backward="ddg", modules=2) >= plain - 0.01


@pytest.mark.parametrize("trainer", [None, lambda model, optimizer: Backpropagation(model, optimizer=optimizer)])
def test_resumed_training_is_the_uninterrupted_one(trainer, tmp_path):
    digits = load_data("digits")
    data = dataclasses.replace(
        digits,
        train_inputs=digits.train_inputs[:64],
        train_labels=digits.train_labels[:64],
        test_inputs=digits.test_inputs[:32],
        test_labels=digits.test_labels[:32],
    )
    settings = dataclasses.replace(
        default_settings("resnet8"), epochs=2, batch=16, backward="ddg", modules=3, plot=False
    )
    whole = train(dataclasses.replace(settings, out=tmp_path / "whole.safetensors"), data=data, trainer=trainer)

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.epoch == 2:
            raise StopError

    parts = dataclasses.replace(settings, out=tmp_path / "parts.safetensors")
    with pytest.raises(StopError):
        train(parts, data=data, progress=stop, trainer=trainer)
    resumed = train(parts, data=data, resume=True, trainer=trainer)
    assert [point.train_loss for point in resumed.points] == [point.train_loss for point in whole.points]
    assert resumed.accuracy == whole.accuracy


def test_fewer_iterations_than_modules():
    settings = dataclasses.replace(default_settings("resnet8"), epochs=1, batch=1437, backward="ddg", modules=3)
    with pytest.raises(ValueError, match="there are 1 iterations and 3 modules, of which the first has its first"):
        train(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backward": "ddg"}, "backward is 'ddg'; set modules, as in 2, or where they begin"),
        ({"backward": "ddg", "modules": 99}, "modules is 99; expected 1 to 9"),
        ({"backward": "ddg", "modules": ["group4"]}, "there is no layer 'group4'"),
        ({"modules": 2}, "modules is 2, but backward is 'bp'; set backward to 'ddg', or no modules"),
        ({"backward": "ddg", "modules": ["group1.0.body.1"]}, "is inside 'group1.0', where"),
    ],
)
def test_bad_modules(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(default_settings("resnet8"), **changes)


def test_recurrent_networks_have_no_modules():
    with pytest.raises(ValueError, match="bitstream has a single recurrent layer; choose bp or scan"):
        dataclasses.replace(default_settings("bitstream"), backward="ddg", modules=2)


@pytest.mark.parametrize(("decay", "rates"), [("steps", [1, 1, 0.1, 0.01]), ("diminishing", [1, 1 / 2, 1 / 3, 1 / 4])])
def test_learning_rates(decay, rates, monkeypatch):
    from jacsparse.models import training

    seen = []
    monkeypatch.setattr(
        training._Run, "_step", lambda run, _: seen.append(run.trainer.optimizers[0].param_groups[0]["lr"]) or 0.0
    )
    train(dataclasses.replace(default_settings("lenet5"), epochs=4, batch=1437, lr=1.0, decay=decay))
    assert seen == pytest.approx(rates)
