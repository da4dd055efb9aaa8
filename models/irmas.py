"""IRMAS: MFCC features of instruments in music (thesis, section 4.2 and Table 4.2)."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..runtime import Shelf
from .arguments import check_one_of
from .dataset import Dataset

#: The folders of the training data set: cello, clarinet, flute, acoustic and electric guitar, organ, piano, saxophone,
#: trumpet, violin and voice.
INSTRUMENTS = ("cel", "cla", "flu", "gac", "gel", "org", "pia", "sax", "tru", "vio", "voi")

#: Features on disk, from earlier runs.
SOUNDS = Shelf("features", "features of sounds")

_WHERE = "get IRMAS-TrainingData from https://www.upf.edu/web/mtg/irmas and unpack it"
#: Seconds of a file.
_LENGTH = 3.0


@dataclass(frozen=True)
class Mfcc:
    """A row of Table 4.2."""

    # Coefficients of each channel, including the first one, which `mfcc` leaves out.
    coefficients: int
    # Samples of a Fourier transform, and from the start of one to the next.
    window: int
    hop: int


#: The rows of Table 4.2.
FEATURES = {"S": Mfcc(20, 4096, 512), "M": Mfcc(13, 2048, 256), "L": Mfcc(7, 1024, 128)}


def mfcc(samples: np.ndarray, rate: int, features: Mfcc) -> np.ndarray:
    """MFCC of both channels of `samples` ``(2, n)``, each with mean 0 and variance 1: float32, ``(rows, frames)``."""
    coefficients = _librosa().feature.mfcc(
        y=samples, sr=rate, n_mfcc=features.coefficients, n_fft=features.window, hop_length=features.hop
    )
    # The first coefficient of a channel is only its power.
    rows = coefficients[:, 1:].reshape(-1, coefficients.shape[-1])
    deviation = rows.std(axis=1, keepdims=True)
    centred = rows - rows.mean(axis=1, keepdims=True)
    # Silence has no deviation, and stays zero.
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0).astype(np.float32)


def load_irmas(folder: Path, features: str = "S", *, skip_damaged: bool = False) -> Dataset:
    """IRMAS' training data as features; a fifth of the recordings, with all their excerpts, is to test with.

    Parameters
    ----------
    folder : Path
        A folder with a folder of WAV files for each instrument, or one that contains it as ``IRMAS-TrainingData``.
    features : {"S", "M", "L"}
        Row of Table 4.2.
    skip_damaged : bool
        Whether to leave out files that cannot be used, with a warning instead of an error.

    Returns
    -------
    Dataset
        Inputs of shape ``(n, coefficients, frames)``: at 44.1 kHz 38 × 259, 24 × 517 or 12 × 1034.

    Raises
    ------
    FileNotFoundError
        Where there is no such folder, or an instrument's is missing or empty.
    ValueError
        Where there is an unknown folder, a file is unreadable, cut short, mono or of another length or rate.
    ImportError
        Where librosa is not installed.

    Notes
    -----
    Features are stored in the cache directory, for files of the same names, sizes and times, and the same row.
    """
    check_one_of("features", features, FEATURES)
    files, labels = wav_files(Path(folder))
    digest = hashlib.blake2b(f"3 {features} {skip_damaged}".encode(), digest_size=12)
    for path in files:
        status = path.stat()
        digest.update(f"{path.parent.name}/{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    rows = cached(digest.hexdigest(), lambda: extracted(files, labels, FEATURES[features], skip_damaged))
    return rows.dataset(f"irmas, set {features}")


@dataclass(frozen=True)
class Features:
    """Features of excerpts, their labels, whether to test with them, and messages about the files that were skipped."""

    # float32, (n, coefficients, frames); int64, (n,); bool, (n,).
    inputs: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    skipped: tuple[str, ...] = ()

    def dataset(self, source: str) -> Dataset:
        """The features as a data set, with warnings about the files that were skipped."""
        for message in self.skipped:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        test = self.test
        if test.all() or not test.any():
            # With few recordings, all may fall on one side: test with every fifth excerpt then.
            test = np.arange(len(test)) % 5 == 4
        inputs, labels = torch.from_numpy(self.inputs), torch.from_numpy(self.labels)
        parts = (inputs[~test], labels[~test], inputs[test], labels[test])
        return Dataset(*parts, len(INSTRUMENTS), source, mean=(), std=())


def cached(key: str, make: Callable[[], Features]) -> Features:
    """Features from the cache directory, or else what `make` returns, which is written there."""
    arrays = SOUNDS.load(key)
    if arrays is not None:
        return Features(arrays["inputs"], arrays["labels"], arrays["test"], tuple(arrays["skipped"].tolist()))
    features = make()
    arrays = {name: np.asarray(getattr(features, name)) for name in ("inputs", "labels", "test")}
    try:
        SOUNDS.save(key, {**arrays, "skipped": np.array(features.skipped, dtype=np.str_)})
    except OSError as error:
        warnings.warn(f"features cannot be kept: {error}", RuntimeWarning, stacklevel=2)
    return features


def _librosa() -> Any:
    try:
        import librosa
    except ImportError as error:
        raise ImportError("audio features need librosa: pip install 'jacsparse[audio]'") from error
    return librosa


def wav_files(folder: Path) -> tuple[list[Path], np.ndarray]:
    """The WAV files, and the label of each."""
    inner = folder / "IRMAS-TrainingData"
    home = inner if inner.is_dir() else folder
    if not home.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; {_WHERE} there")
    unknown = sorted(entry.name for entry in home.iterdir() if entry.is_dir() and entry.name not in INSTRUMENTS)
    if unknown:
        raise ValueError(
            f"{home / unknown[0]} is the folder of no instrument that IRMAS has: {', '.join(INSTRUMENTS)}; move it "
            "away, or name the right folder"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, instrument in enumerate(INSTRUMENTS):
        paths = sorted((home / instrument).glob("*.wav"))
        if not paths:
            raise FileNotFoundError(f"there is no WAV file in {home / instrument}; {_WHERE} as {folder}")
        files += paths
        labels += [label] * len(paths)
    return files, np.array(labels)


def extracted(files: Sequence[Path], labels: np.ndarray, features: Mfcc, skip_damaged: bool = False) -> Features:
    """Features of the files that can be used."""
    from rich.console import Console
    from rich.progress import track

    _librosa()
    rows: dict[int, np.ndarray] = {}
    skipped: list[str] = []

    def skip(number: int, reason: object) -> None:
        message = f"{files[number]} cannot be used: {reason}"
        if not skip_damaged:
            raise ValueError(f"{message}; replace it, or leave such files out: --skip-damaged, skip_damaged=True")
        skipped.append(message)

    for number in track(range(len(files)), "audio features", console=Console(stderr=True), transient=True):
        try:
            rate, samples = _read(files[number])
            rows[number] = mfcc(samples, rate, features)
        except (ValueError, OSError) as error:
            skip(number, error)
    # Files of another shape than most others are skipped.
    usual = Counter(row.shape for row in rows.values()).most_common(1)
    for number, row in list(rows.items()):
        if row.shape != usual[0][0]:
            skip(number, f"it has {row.shape[1]} frames, most have {usual[0][0][1]}")
            del rows[number]
    used = list(rows)
    missing = set(range(len(INSTRUMENTS))) - set(labels[used])
    if missing:
        raise ValueError(f"no file of {', '.join(INSTRUMENTS[label] for label in sorted(missing))} can be used")
    test = np.array([_is_test(files[number]) for number in used])
    return Features(np.stack(list(rows.values())), labels[used], test, tuple(skipped))


def _read(path: Path) -> tuple[int, np.ndarray]:
    """The rate, and samples ``(2, n)`` from -1 to 1, of a stereo WAV file of three seconds."""
    from scipy.io import wavfile

    with warnings.catch_warnings():
        # A file that ends too early is only a warning of SciPy's.
        warnings.simplefilter("error", wavfile.WavFileWarning)
        try:
            rate, samples = wavfile.read(path)
        except wavfile.WavFileWarning as warning:
            raise ValueError(f"it is damaged ({warning})") from warning
        except Exception as error:
            # The errors of a damaged header share no base class.
            raise ValueError(f"it is no WAV file ({error})") from error
    if samples.ndim != 2 or samples.shape[1] != 2:
        raise ValueError("it is mono, IRMAS is stereo" if samples.ndim == 1 else f"it has {samples.shape[1]} channels")
    if abs(len(samples) / rate - _LENGTH) > 0.01:
        raise ValueError(f"it lasts {len(samples) / rate:.2f} s, IRMAS' excerpts last {_LENGTH:g} s")
    if samples.dtype.kind == "i":
        return rate, samples.T.astype(np.float32) / np.float32(np.iinfo(samples.dtype).max + 1)
    if samples.dtype.kind != "f" or not np.isfinite(samples).all():
        raise ValueError(f"its samples are {samples.dtype}, or not finite")
    return rate, samples.T.astype(np.float32)


def _is_test(path: Path) -> bool:
    """Whether to test with a recording, whose excerpts are named ``...__1.wav``, ``...__2.wav`` and so on."""
    recording = path.stem.rpartition("__")[0] or path.stem
    return hashlib.blake2b(f"{path.parent.name}/{recording}".encode(), digest_size=4).digest()[0] % 5 == 0
