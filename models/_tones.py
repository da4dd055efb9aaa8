"""Made-up instruments: a small data set in IRMAS' layout, for where the real one is not at hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from ._checks import check_one_of
from ._data import Dataset
from ._irmas import FEATURES, INSTRUMENTS, Features, extracted, kept

__all__ = ["tones", "write_tones"]


def write_tones(
    folder: Path, *, recordings: int = 8, excerpts: int = 2, rate: int = 44_100, seed: int = 0, seconds: float = 3.0
) -> None:
    """Write stereo WAV files of tones that differ in their overtones, attack, vibrato and noise, as instruments do.

    Parameters
    ----------
    folder : Path
        Gets a folder for each of IRMAS' instruments.
    recordings, excerpts : int
        Of each instrument, and of each recording.
    rate : int
        Samples a second.
    seed : int
        Of pitches and noise.
    seconds : float
        Of a file.
    """
    from scipy.io import wavfile

    rng = np.random.default_rng(seed)
    time = np.arange(round(rate * seconds)) / rate
    for number, instrument in enumerate(INSTRUMENTS):
        # What makes a timbre, the same for all its notes.
        character = np.random.default_rng(1000 + number)
        overtones = character.dirichlet(np.full(12, 0.6))
        attack, decay, vibrato, noise = character.uniform([0.005, 0.2, 0, 0.001], [0.2, 2.0, 0.02, 0.03])
        home = folder / instrument
        home.mkdir(parents=True, exist_ok=True)
        for recording in range(recordings):
            for excerpt in range(1, excerpts + 1):
                wave = np.zeros((2, len(time)))
                for start in np.arange(0, seconds, 0.75):
                    pitch, side = 110 * 2 ** rng.uniform(0, 2), rng.uniform(0.3, 0.7)
                    after = np.clip(time - start, 0, None)
                    envelope = (1 - np.exp(-after / attack)) * np.exp(-after / decay)
                    phase = 2 * np.pi * pitch * (after + vibrato / 5 * np.sin(2 * np.pi * 5 * after))
                    tone = envelope * sum(part * np.sin((k + 1) * phase) for k, part in enumerate(overtones))
                    wave += np.stack([side * tone, (1 - side) * tone])
                wave += noise * rng.standard_normal(wave.shape)
                samples = (0.9 * wave / np.abs(wave).max() * np.iinfo(np.int16).max).astype(np.int16)
                wavfile.write(home / f"[{instrument}]{recording:04d}__{excerpt}.wav", rate, samples.T)


def tones(features: str = "S") -> Dataset:
    """`write_tones`' files as features, which are kept: making both takes half a minute."""
    check_one_of("features", features, FEATURES)

    def make() -> Features:
        with tempfile.TemporaryDirectory() as folder:
            write_tones(Path(folder))
            return extracted(Path(folder), features)

    return kept(f"tones-1-{features}", make).dataset(f"tones, set {features}")
