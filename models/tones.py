"""Synthetic instruments: a small data set in IRMAS' layout, to be used without the real one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from .arguments import check_one_of
from .dataset import Dataset
from .irmas import FEATURES, INSTRUMENTS, Features, cached, extracted, wav_files


def write_tones(
    folder: Path, *, recordings: int = 8, excerpts: int = 2, rate: int = 44_100, seed: int = 0, seconds: float = 3.0
) -> None:
    """Write stereo WAV files of phrases that differ in melody, rhythm, attack and overtones, as instruments do.

    Parameters
    ----------
    folder : Path
        Where to make a folder for each of IRMAS' instruments.
    recordings, excerpts : int
        Recordings of each instrument, and excerpts of each recording.
    rate : int
        Samples per second.
    seed : int
        Seed of pitches and noise.
    seconds : float
        Length of a file.
    """
    from scipy.io import wavfile

    rng = np.random.default_rng(seed)
    time = np.arange(round(rate * seconds)) / rate
    for number, instrument in enumerate(INSTRUMENTS):
        home = folder / instrument
        home.mkdir(parents=True, exist_ok=True)
        for recording in range(recordings):
            for excerpt in range(1, excerpts + 1):
                wave = _melody(number, time, rng)
                samples = (0.9 * wave / np.abs(wave).max() * np.iinfo(np.int16).max).astype(np.int16)
                wavfile.write(home / f"[{instrument}]{recording:04d}__{excerpt}.wav", rate, samples.T)


def _melody(number: int, time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An instrument's phrase of four notes, repeated, in a random key and from a random note on: ``(2, samples)``."""
    # Features leave out what is constant along a sound, so that instruments must differ in phrase and rhythm. These are
    # the same for all recordings of an instrument.
    instrument = np.random.default_rng(1000 + number)
    overtones, phrase = instrument.dirichlet(np.full(12, 0.6)), instrument.uniform(-1, 1, 4)
    pause, attack, decay = 0.2 + 0.05 * number, instrument.uniform(0.005, 0.1), instrument.uniform(0.1, 0.6)
    key, first = 110 * 2 ** rng.uniform(0.8, 1.2), int(rng.integers(len(phrase)))
    wave = 0.005 * rng.standard_normal((2, len(time)))
    for note, start in enumerate(np.arange(rng.uniform(0, pause), time[-1], pause)):
        begin = int(np.searchsorted(time, start))
        after = time[begin:] - start
        pitch, side = key * 2 ** phrase[(first + note) % len(phrase)], rng.uniform(0.4, 0.6)
        tone = _with_overtones(overtones, 2 * np.pi * pitch * after)
        tone *= (1 - np.exp(-after / attack)) * np.exp(-after / decay)
        wave[:, begin:] += np.stack([side * tone, (1 - side) * tone])
    return wave


def _with_overtones(parts: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """The sum of ``parts[k] * sin((k + 1) * phase)``, by Clenshaw's recurrence."""
    twice, above, sums = 2 * np.cos(phase), np.zeros_like(phase), np.zeros_like(phase)
    for part in parts[::-1]:
        above, sums = sums, part + twice * sums - above
    return sums * np.sin(phase)


def tones(features: str = "S") -> Dataset:
    """Features of the files of `write_tones`, from the cache or, in a quarter of a minute, made anew."""
    check_one_of("features", features, FEATURES)

    def make() -> Features:
        with tempfile.TemporaryDirectory() as folder:
            write_tones(Path(folder))
            return extracted(*wav_files(Path(folder)), FEATURES[features])

    return cached(f"tones-3-{features}", make).dataset(f"tones, set {features}")
