"""Inputs of Whisper: the logarithms of the mel spectrogram of sound, and the samples of WAV files."""

from __future__ import annotations

import os
import wave
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.errors import InputError
from tcomp.generation.folder import features_config

Samples = np.ndarray[Any, Any]
_FLOOR = 1e-10  # of a power, before its logarithm
_RANGE = 8.0  # powers of ten below the loudest that are kept
_WIDEST = 4  # bytes of a sample
_TOP = 8000.0  # Hz, the highest frequency that filters reach
_MOST = {"feature_size": 1 << 10, "sampling_rate": 1 << 20, "n_fft": 1 << 16, "hop_length": 1 << 16, "chunk_length": 1 << 10}


@dataclass(frozen=True)
class LogMel:
    """How samples become features for Whisper (Radford et al. 2022): `mels` bands of frames of `window` samples, `hop` apart, of
    `seconds` of sound with `rate` samples a second. Defaults are those of all models but the large one of the third version (128 mels)."""

    mels: int = 80
    rate: int = 16000
    window: int = 400
    hop: int = 160
    seconds: int = 30

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> LogMel:
        """As preprocessor_config.json of a folder says. Raises `InputError` for impossible sizes."""
        path, found = Path(folder), list[int]()
        given = features_config(path)
        for (key, most), default in zip(_MOST.items(), (cls.mels, cls.rate, cls.window, cls.hop, cls.seconds), strict=True):
            value = given.get(key, default)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InputError(f"`{key}` is {value!r:.40}", where=str(path), why=f"a number from 1 to {most} is needed")
            found.append(value)
        return cls(*found)

    def features(self, samples: Samples, rate: int | None = None) -> Samples:
        """float32 [1, mels, frames] of samples [count] from -1 to 1: of `seconds` of them, with silence behind shorter ones. Raises
        `InputError` for another rate, other shapes, numbers that are not finite, and longer sound."""
        x, count = np.asarray(samples, np.float64), self.seconds * self.rate
        if rate is not None and rate != self.rate:
            raise InputError(f"sound of {rate} samples a second", why=f"the model takes {self.rate}", hint="resample it")
        if x.ndim != 1 or not 0 < x.size <= count or not np.isfinite(x).all():
            why = f"from 1 to {count} finite numbers, {self.seconds} seconds, are one piece"
            raise InputError(f"sound of the shape {list(x.shape)}", why=why, hint="mix channels, and cut longer sound into pieces")
        padded = np.pad(np.pad(x, (0, count - x.size)), self.window // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][: count // self.hop]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        power = np.abs(np.fft.rfft(frames * hann)) ** 2
        found = np.log10(np.maximum(power @ self._filters, _FLOOR)).T
        scaled: Samples = ((np.maximum(found, found.max() - _RANGE) + 4) / 4).astype(np.float32)
        return scaled[None]

    @cached_property
    def _filters(self) -> Samples:
        """[frequencies, mels]: triangles between neighbours on the scale of Slaney's Auditory Toolbox, each with an area of 1."""
        corners = _frequencies(np.linspace(0.0, _mel(_TOP), self.mels + 2))
        at = np.linspace(0, self.rate // 2, 1 + self.window // 2)[:, None]
        width = np.diff(corners)
        rising, falling = (at - corners[:-2]) / width[:-1], (corners[2:] - at) / width[1:]
        found: Samples = np.maximum(0, np.minimum(rising, falling)) * (2 / (corners[2:] - corners[:-2]))
        return found


def _mel(hertz: float) -> float:
    """Linear up to 1000 Hz, 15 mels; then 27 mels for a factor of 6.4."""
    return float(hertz * 3 / 200 if hertz < 1000 else 15 + np.log(hertz / 1000) * 27 / np.log(6.4))


def _frequencies(mels: Samples) -> Samples:
    found: Samples = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    return found


def read_wave(path: str | os.PathLike[str]) -> tuple[Samples, int]:
    """(samples float32 [count] from -1 to 1, the mean of channels; samples a second) of a WAV file of integers. Raises `InputError`."""
    try:
        with wave.open(os.fspath(path), "rb") as file:
            size, channels, rate, data = file.getsampwidth(), file.getnchannels(), file.getframerate(), file.readframes(file.getnframes())
            if size > _WIDEST:
                raise wave.Error(f"samples have {size} bytes, at most {_WIDEST} are read")
    except (OSError, EOFError, wave.Error) as error:
        raise InputError(
            "the sound cannot be read", where=os.fspath(path), why=str(error), hint="a WAV file of integers is needed"
        ) from None
    each: Samples = np.frombuffer(data[: len(data) // (size * channels) * size * channels], np.uint8).reshape(-1, size)
    if size == 1:
        each = each ^ np.uint8(0x80)  # the only integers without a sign
    wide = np.zeros((len(each), _WIDEST), np.uint8)
    wide[:, _WIDEST - size :] = each
    return wide.view("<i4").reshape(-1, channels).mean(1, dtype=np.float64).astype(np.float32) / np.float32(1 << 31), rate
