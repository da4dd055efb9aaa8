"""IRMAS' loader: the layout, Table 4.2's features, files that cannot be used, and a training that beats chance."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import librosa
import numpy as np
import pytest
import torch
from jacsparse.models import default_settings, load_data, load_irmas, train, write_tones
from jacsparse.models.irmas import FEATURES, INSTRUMENTS, mfcc
from scipy.io import wavfile


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One excerpt of each instrument."""
    home = tmp_path_factory.mktemp("irmas")
    write_tones(home / "IRMAS-TrainingData", recordings=1, excerpts=1)
    return home


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def editable(folder: Path, tmp_path: Path) -> Path:
    """A copy of the files that may be damaged."""
    import shutil

    return Path(shutil.copytree(folder / "IRMAS-TrainingData", tmp_path / "copy"))


def wav(folder: Path, instrument: str = "flu") -> Path:
    return next((folder / instrument).glob("*.wav"))


@pytest.mark.parametrize(("features", "shape"), [("S", (38, 259)), ("M", (24, 517)), ("L", (12, 1034))])
def test_shapes_of_table_4_2(folder: Path, features: str, shape: tuple[int, int]) -> None:
    data = load_irmas(folder, features)
    assert data.train_inputs.shape[1:] == shape and data.classes == 11
    assert len(data.train_labels) + len(data.test_labels) == 11
    both = torch.cat([data.train_inputs, data.test_inputs])
    assert both.mean(dim=2).abs().max() < 1e-4 and (both.std(dim=2, unbiased=False) - 1).abs().max() < 1e-3
    assert sorted(torch.cat([data.train_labels, data.test_labels]).tolist()) == list(range(11))


def test_features_are_librosas(folder: Path) -> None:
    rate, samples = wavfile.read(wav(folder / "IRMAS-TrainingData"))
    waves = samples.T.astype(np.float32) / 32768
    actual = mfcc(waves, rate, FEATURES["S"])
    for channel in range(2):
        expected = librosa.feature.mfcc(y=waves[channel], sr=rate, n_mfcc=20, n_fft=4096, hop_length=512)[1:]
        expected = (expected - expected.mean(axis=1, keepdims=True)) / expected.std(axis=1, keepdims=True)
        assert np.allclose(actual[19 * channel : 19 * (channel + 1)], expected, atol=1e-3)


def test_silence_has_features_too() -> None:
    actual = mfcc(np.zeros((2, 132_300), dtype=np.float32), 44_100, FEATURES["L"])
    assert np.isfinite(actual).all()


def test_features_are_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_irmas(folder)
    monkeypatch.setattr("jacsparse.models.irmas.mfcc", lambda *_: pytest.fail("computed again"))
    second = load_irmas(folder)
    assert torch.equal(first.train_inputs, second.train_inputs)
    (stored,) = (tmp_path / "cache" / "features").iterdir()
    stored.write_bytes(b"damaged")
    with pytest.raises(pytest.fail.Exception):
        load_irmas(folder)


def test_excerpts_of_a_recording_stay_together(tmp_path: Path) -> None:
    write_tones(tmp_path, recordings=3, excerpts=2, rate=8000)
    data = load_irmas(tmp_path, "L")
    # Labels come in order, two excerpts after one another.
    for labels in (data.train_labels, data.test_labels):
        assert all(int((labels == label).sum()) % 2 == 0 for label in range(11))
    assert len(data.test_labels) > 0


def test_damaged_files_are_named(editable: Path) -> None:
    path = wav(editable)
    original = path.read_bytes()
    rate, samples = wavfile.read(path)
    damages = {
        "it is no WAV file": lambda: path.write_bytes(b"not a wave"),
        r"it is damaged|it is no WAV file": lambda: path.write_bytes(original[: len(original) // 2]),
        "it is mono, IRMAS is stereo": lambda: wavfile.write(path, rate, samples[:, 0]),
        r"it lasts 1\.00 s": lambda: wavfile.write(path, rate, samples[:rate]),
        "it has 3 channels": lambda: wavfile.write(path, rate, np.repeat(samples[:, :1], 3, axis=1)),
        "frames, most have": lambda: wavfile.write(path, 22_050, samples[: 3 * 22_050]),
    }
    named = path.name.replace("[", ".").replace("]", ".")
    for message, damage in damages.items():
        damage()
        with pytest.raises(ValueError, match=rf"{named} cannot be used: .*({message})"):
            load_irmas(editable)
    with pytest.raises(ValueError, match="no file of flu can be used"):
        load_irmas(editable, skip_damaged=True)
    path.with_name("[flu]0001__1.wav").write_bytes(original)
    # When it comes from the cache, too.
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            data = load_irmas(editable, skip_damaged=True)
        assert len(data.train_labels) + len(data.test_labels) == 11


def test_the_first_file_may_be_the_odd_one(editable: Path) -> None:
    first = wav(editable, "cel")
    rate, samples = wavfile.read(first)
    first.with_name("[cel]0001__1.wav").write_bytes(first.read_bytes())
    wavfile.write(first, rate // 2, samples[: 3 * (rate // 2)])
    with pytest.warns(RuntimeWarning, match=r"\[cel\]0000__1.wav cannot be used: it has .* frames, most have"):
        data = load_irmas(editable, skip_damaged=True)
    assert len(data.train_labels) + len(data.test_labels) == 11


def test_wrong_folders(editable: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*; get IRMAS-TrainingData from https"):
        load_irmas(tmp_path / "none")
    (editable / "kazoo").mkdir()
    with pytest.raises(ValueError, match=r"kazoo is the folder of no instrument that IRMAS has: cel, cla"):
        load_irmas(editable)
    (editable / "kazoo").rmdir()
    wav(editable, "voi").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no WAV file in .*voi"):
        load_irmas(editable)
    with pytest.raises(ValueError, match="features is 'XL'; expected one of L, M, S"):
        load_irmas(editable, "XL")


@pytest.mark.full
def test_tones_are_learnt_both_ways(tmp_path: Path) -> None:
    home = tmp_path / "tones"
    write_tones(home, recordings=8, excerpts=2, rate=8000)
    data = load_data(f"irmas:{home}", features="S")
    settings = dataclasses.replace(default_settings("irmas"), epochs=30, lr=0.005)
    results = [train(dataclasses.replace(settings, backward=backward), data=data) for backward in ("bp", "scan")]
    # A chance guess is right once in eleven times.
    assert results[1].points[-1].train_loss < 0.5 * np.log(len(INSTRUMENTS))
    assert results[1].accuracy["trained"] > 4 / 11
    losses = [[point.train_loss for point in result.points[:20]] for result in results]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3


def test_the_thesis_settings() -> None:
    settings = default_settings("irmas")
    assert (settings.epochs, settings.batch, settings.optimizer, settings.data) == (400, 16, "adam", "tones")
