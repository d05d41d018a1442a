"""Inputs of Whisper: features of transformers, WAV files of all widths, and what is refused."""

import json
import wave

import numpy as np
import pytest
from typer.testing import CliRunner

from tcomp.cli.app import app
from tcomp.errors import InputError
from tcomp.generation import LogMel, SequenceToSequence, read_wave
from tests.language_models.test_encoder_decoder import small_model

RNG = np.random.default_rng(7)
SOUND = (0.3 * np.sin(np.arange(20000) ** 1.3 / 40) + 0.01 * RNG.normal(size=20000)).astype(np.float32)


def write_wave(path, samples, size=2, channels=1, rate=16000):
    """Samples [count] from -1 to 1 as integers of `size` bytes, the same in all channels."""
    integers = np.round(samples.astype(np.float64) * (2 ** (8 * size - 1) - 1)).astype("<i4").repeat(channels)
    data = integers.view(np.uint8).reshape(-1, 4)[:, :size]
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, size, rate, 0, "NONE", ""))
        file.writeframes((data ^ 0x80 if size == 1 else data).tobytes())


@pytest.mark.parametrize("changes", [{}, {"feature_size": 128}, {"n_fft": 200, "hop_length": 80, "chunk_length": 2}])
def test_features_are_those_of_transformers(changes, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    theirs = transformers.WhisperFeatureExtractor(**changes)
    wanted = theirs(SOUND, sampling_rate=16000, return_tensors="np").input_features
    theirs.save_pretrained(tmp_path)
    found = LogMel.load(tmp_path).features(SOUND, 16000)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_a_tone_is_loudest_in_its_band():
    tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    found = LogMel(seconds=1).features(tone)[0]
    assert found.shape == (80, 100)
    loudest = found[:, 50].argmax()
    assert 440 == pytest.approx(200 / 3 * (loudest + 1) * (15 + np.log(8) * 27 / np.log(6.4)) / 81, rel=0.05)
    np.testing.assert_allclose(LogMel(seconds=1).features(np.zeros(5)), (np.log10(1e-10) + 4) / 4, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_files_of_sound_are_read(size, channels, tmp_path):
    write_wave(tmp_path / "a.wav", SOUND, size, channels, 8000)
    samples, rate = read_wave(tmp_path / "a.wav")
    assert rate == 8000 and samples.dtype == np.float32 and samples.shape == SOUND.shape
    np.testing.assert_allclose(samples, SOUND, atol=2.0 ** (1 - 7 * min(size, 2)) + 1e-6)


def test_what_is_no_sound_is_refused(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFFnothing")
    with pytest.raises(InputError, match="cannot be read"):
        read_wave(tmp_path / "a.wav")
    with pytest.raises(InputError, match="cannot be read"):
        read_wave(tmp_path / "b.wav")
    with wave.open(str(tmp_path / "c.wav"), "wb") as file:
        file.setparams((1, 4, 8000, 0, "NONE", ""))
        file.writeframes(bytes(32))
    wide = bytearray((tmp_path / "c.wav").read_bytes())
    wide[32:36] = (8).to_bytes(2, "little") + (64).to_bytes(2, "little")  # bytes of a frame, bits of a sample
    (tmp_path / "c.wav").write_bytes(wide)
    with pytest.raises(InputError, match="cannot be read"):
        read_wave(tmp_path / "c.wav")
    for samples in (np.zeros((2, 5)), np.zeros(0), np.zeros(16001), np.array([np.nan])):
        with pytest.raises(InputError, match="sound of the shape"):
            LogMel(seconds=1).features(samples)
    with pytest.raises(InputError, match="8000 samples a second"):
        LogMel().features(SOUND, 8000)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"hop_length": 0}), encoding="utf-8")
    with pytest.raises(InputError, match="hop_length"):
        LogMel.load(tmp_path)


def test_the_command_writes_down_sound(tmp_path):
    settings = {"feature_size": 10, "hop_length": 800, "chunk_length": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token_id": 1}), encoding="utf-8")
    write_wave(tmp_path / "a.wav", SOUND[:16000])
    small_model(True).artifact.save(tmp_path / "whisper.tcomp")
    given = ["generate", str(tmp_path), "--artifact", str(tmp_path / "whisper.tcomp"), "--max-tokens", "4", "--audio"]
    found = json.loads(CliRunner().invoke(app, [*given, str(tmp_path / "a.wav"), "--json"]).stdout)
    features = LogMel.load(tmp_path).features(*read_wave(tmp_path / "a.wav"))
    wanted = SequenceToSequence(small_model(True), start_tokens=(1,)).complete(features, 4).pieces
    assert features.shape == (1, 10, 20) and [t["token"] for t in found["tokens"]] == [p.token for p in wanted]
