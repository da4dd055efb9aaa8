"""IRMAS: instruments in music, as their MFCC features (thesis, section 4.2 and Table 4.2)."""

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
from jacsparse.patterns import _store

from ._checks import check_one_of
from ._data import Dataset

__all__ = ["FEATURES", "INSTRUMENTS", "Features", "Mfcc", "extracted", "kept", "load_irmas", "mfcc"]

#: The folders of the training data set: cello, clarinet, flute, acoustic and electric guitar, organ, piano, saxophone,
#: trumpet, violin and voice.
INSTRUMENTS = ("cel", "cla", "flu", "gac", "gel", "org", "pia", "sax", "tru", "vio", "voi")

_WHERE = "get IRMAS-TrainingData from https://www.upf.edu/web/mtg/irmas and unpack it"
_CHANNELS = 2
#: Seconds of a file.
_LENGTH = 3.0


@dataclass(frozen=True)
class Mfcc:
    """A row of Table 4.2.

    Attributes
    ----------
    coefficients : int
        Of a channel, the first one included, which is then left out.
    window, hop : int
        Samples of a Fourier transform, and from one to the next.
    """

    coefficients: int
    window: int
    hop: int


#: Table 4.2's sets.
FEATURES = {"S": Mfcc(20, 4096, 512), "M": Mfcc(13, 2048, 256), "L": Mfcc(7, 1024, 128)}


def mfcc(samples: np.ndarray, rate: int, features: Mfcc) -> np.ndarray:
    """Mel-frequency cepstral coefficients of both channels, each with mean 0 and variance 1 along the frames.

    Parameters
    ----------
    samples : ndarray of float32, (2, n)
        The waves.
    rate : int
        Samples a second.
    features : Mfcc
        How many, and of which windows.

    Returns
    -------
    ndarray of float32, (2 · (coefficients - 1), 1 + n // hop)
        The first coefficient, which is only the power, is left out.
    """
    librosa = _librosa()
    found = librosa.feature.mfcc(
        y=samples, sr=rate, n_mfcc=features.coefficients, n_fft=features.window, hop_length=features.hop
    )
    found = found[:, 1:].reshape(-1, found.shape[-1])
    spread = found.std(axis=1, keepdims=True)
    centred = found - found.mean(axis=1, keepdims=True)
    # Silence has no spread: it stays zero.
    return np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0).astype(np.float32)


def load_irmas(folder: Path, features: str = "S", *, skip_damaged: bool = False) -> Dataset:
    """IRMAS' training data as features: a fifth of the recordings to test with, all excerpts of one on the same side.

    Parameters
    ----------
    folder : Path
        That holds a folder of WAV files for each instrument, or holds ``IRMAS-TrainingData``, which does.
    features : {"S", "M", "L"}
        Row of Table 4.2.
    skip_damaged : bool
        Whether files that cannot be used are left out, with a warning, in place of an error.

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
    Features are kept in the cache directory, for the same files, by name, size and time, and the same set.
    """
    check_one_of("features", features, FEATURES)
    files, labels = _files(Path(folder))
    digest = hashlib.blake2b(f"3 {features} {skip_damaged}".encode(), digest_size=12)
    for path in files:
        about = path.stat()
        digest.update(f"{path.parent.name}/{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    rows = kept(digest.hexdigest(), lambda: _extracted(files, labels, FEATURES[features], skip_damaged))
    return rows.dataset(f"irmas, set {features}")


@dataclass(frozen=True)
class Features:
    """Features of excerpts.

    Attributes
    ----------
    inputs : ndarray of float32, (n, coefficients, frames)
    labels : ndarray of int64, (n,)
    test : ndarray of bool, (n,)
        Which are tested with.
    skipped : tuple of str
        What was left out, and why.
    """

    inputs: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    skipped: tuple[str, ...] = ()

    def dataset(self, source: str) -> Dataset:
        """As what to train on; warns of what was left out."""
        for message in self.skipped:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        test = self.test
        if test.all() or not test.any():
            # So few recordings that all fall on one side: every fifth excerpt then.
            test = np.arange(len(test)) % 5 == 4
        inputs, labels = torch.from_numpy(self.inputs), torch.from_numpy(self.labels)
        held, other = torch.from_numpy(test), torch.from_numpy(~test)
        return Dataset(
            inputs[other], labels[other], inputs[held], labels[held], len(INSTRUMENTS), source, mean=(), std=()
        )


def kept(key: str, make: Callable[[], Features]) -> Features:
    """Features from the cache directory, or made and kept there."""
    arrays = _store.find("features", key)
    if arrays is not None:
        return Features(arrays["inputs"], arrays["labels"], arrays["test"], tuple(arrays["skipped"].tolist()))
    made = make()
    skipped = np.array(made.skipped, dtype=np.str_)
    try:
        _store.keep(
            "features", key, {"inputs": made.inputs, "labels": made.labels, "test": made.test, "skipped": skipped}
        )
    except OSError as error:
        warnings.warn(f"features cannot be kept: {error}", RuntimeWarning, stacklevel=2)
    return made


def _librosa() -> Any:
    try:
        import librosa
    except ImportError as error:
        raise ImportError("audio features need librosa: pip install 'jacsparse[audio]'") from error
    return librosa


def _files(folder: Path) -> tuple[list[Path], np.ndarray]:
    """The WAV files, and each one's instrument."""
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
        found = sorted((home / instrument).glob("*.wav"))
        if not found:
            raise FileNotFoundError(f"there is no WAV file in {home / instrument}; {_WHERE} as {folder}")
        files += found
        labels += [label] * len(found)
    return files, np.array(labels)


def extracted(folder: Path, features: str) -> Features:
    """Of a folder, not kept."""
    return _extracted(*_files(folder), FEATURES[features], False)


def _extracted(files: Sequence[Path], labels: np.ndarray, features: Mfcc, skip_damaged: bool) -> Features:
    """Of the files that can be used."""
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
    # Most files say what is usual.
    usual = Counter(row.shape for row in rows.values()).most_common(1)
    for number, row in list(rows.items()):
        if row.shape != usual[0][0]:
            skip(number, f"it has {row.shape[1]} frames, most have {usual[0][0][1]}")
            del rows[number]
    used = list(rows)
    missing = set(range(len(INSTRUMENTS))) - set(labels[used])
    if missing:
        raise ValueError(f"no file of {', '.join(INSTRUMENTS[label] for label in sorted(missing))} can be used")
    return Features(
        np.stack(list(rows.values())), labels[used], np.array([_side(files[number]) for number in used]), tuple(skipped)
    )


def _read(path: Path) -> tuple[int, np.ndarray]:
    """Rate and samples, ``(2, n)`` from -1 to 1, of a stereo WAV file of three seconds."""
    from scipy.io import wavfile

    with warnings.catch_warnings():
        # A file that ends too early is an error here.
        warnings.simplefilter("error", wavfile.WavFileWarning)
        try:
            rate, samples = wavfile.read(path)
        except wavfile.WavFileWarning as warning:
            raise ValueError(f"it is damaged ({warning})") from warning
        except Exception as error:
            # What a damaged header raises shares no base class.
            raise ValueError(f"it is no WAV file ({error})") from error
    if samples.ndim != 2 or samples.shape[1] != _CHANNELS:
        raise ValueError("it is mono, IRMAS is stereo" if samples.ndim == 1 else f"it has {samples.shape[1]} channels")
    if abs(len(samples) / rate - _LENGTH) > 0.01:
        raise ValueError(f"it lasts {len(samples) / rate:.2f} s, IRMAS' excerpts last {_LENGTH:g} s")
    if samples.dtype.kind == "i":
        return rate, samples.T.astype(np.float32) / np.float32(np.iinfo(samples.dtype).max + 1)
    if samples.dtype.kind != "f" or not np.isfinite(samples).all():
        raise ValueError(f"its samples are {samples.dtype}, or not finite")
    return rate, samples.T.astype(np.float32)


def _side(path: Path) -> bool:
    """Whether a recording is tested with; its excerpts are named ``...__1.wav``, ``...__2.wav`` and so on."""
    recording = path.stem.rpartition("__")[0] or path.stem
    return hashlib.blake2b(f"{path.parent.name}/{recording}".encode(), digest_size=4).digest()[0] % 5 == 0
