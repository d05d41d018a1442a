"""Signed artifacts: what a key vouches for, and every way in which something else is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime import Module, read_artifact
from tcomp.runtime.signing import check_signature, sign
from tests.runtime import native_models as models

pytest.importorskip("cryptography", reason="signatures need the package cryptography")

from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def texts(key: Ed25519PrivateKey | rsa.RSAPrivateKey, password: bytes | None = None) -> tuple[bytes, bytes]:
    """A private and its public key as files."""
    locked = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, locked), public


PRIVATE, PUBLIC = texts(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER_PRIVATE, OTHER_PUBLIC = texts(Ed25519PrivateKey.from_private_bytes(bytes(32)))


def signed(image: bytes, private: bytes = PRIVATE) -> bytes:
    signature = sign(read_artifact(image), private)
    return image[:112] + signature + image[176:]


@pytest.fixture(scope="session")
def long(affine_code: bytes) -> bytes:
    """Signed, with weights of several blocks and gaps between them."""
    more = [("a", np.arange(300_000, dtype=np.float32)), ("b", b"odd"), ("c", np.arange(5))]
    return signed(models.packed(affine_code, models.AFFINE_MANIFEST, [("w", models.W), *more]))


def test_a_model_signed_by_the_trusted_key_runs(affine: bytes, tmp_path: Path) -> None:
    (tmp_path / "public.pem").write_bytes(PUBLIC)
    read_artifact(affine).save(tmp_path / "model.tcomp", sign(read_artifact(affine), PRIVATE))
    x = np.ones((2, 4), np.float32)
    for source in (tmp_path / "model.tcomp", signed(affine), read_artifact(signed(affine))):
        for key in (PUBLIC, tmp_path / "public.pem", os.fspath(tmp_path / "public.pem")):
            assert np.array_equal(Module.load(source, trusted=key)(x, np.float32(2)), 2 * x + models.W)
    module = Module.load(tmp_path / "model.tcomp")
    module.save(tmp_path / "again.tcomp")  # keeps its signature
    check_signature(read_artifact(tmp_path / "again.tcomp"), PUBLIC)
    assert (tmp_path / "again.tcomp").read_bytes() == signed(affine)


def test_it_is_read_into_memory_so_that_what_was_checked_is_what_runs(affine: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(signed(affine))
    module = Module.load(path, trusted=PUBLIC)
    with open(path, "r+b") as file:
        file.write(bytes(len(affine)))
    x = np.ones((2, 4), np.float32)
    assert np.array_equal(module(x, np.float32(2)), 2 * x + models.W)


def test_others_are_refused_before_any_code_is_loaded(affine: bytes, difference: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcomp.runtime.module.NativeCode", None)
    for image, key, message in (
        (affine, PUBLIC, "not signed"),
        (signed(affine), OTHER_PUBLIC, "not by the trusted key"),
        (signed(affine, OTHER_PRIVATE), PUBLIC, "not by the trusted key"),
        (difference[:112] + signed(affine)[112:176] + difference[176:], PUBLIC, "not by the trusted key"),
    ):
        with pytest.raises(ArtifactError, match=message):
            Module.load(image, trusted=key)


def test_no_byte_of_a_signed_artifact_can_be_changed(long: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcomp.runtime.module.NativeCode", None)
    places = np.random.default_rng(0).integers(176, len(long), 300)
    for at in [*range(176), *range(len(long) - 128, len(long)), *map(int, places)]:
        damaged = bytearray(long)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(ArtifactError):
            Module.load(damaged, trusted=PUBLIC)


def test_damaged_weights_are_not_signed(affine: bytes) -> None:
    damaged = bytearray(affine)
    damaged[-65] ^= 1  # before the notes, which begin at the next multiple of 64
    with pytest.raises(ArtifactError, match="weight 'w'"):
        sign(read_artifact(damaged), PRIVATE)


def test_keys_of_other_kinds(affine: bytes, tmp_path: Path) -> None:
    rsa_private, rsa_public = texts(rsa.generate_private_key(65537, 2048))
    locked, _ = texts(Ed25519PrivateKey.from_private_bytes(bytes(32)), b"secret")
    for private, message in (
        (rsa_private, "not one of Ed25519"), (locked, "not encrypted"), (PUBLIC, "cannot read"), (b"", "cannot read"), ("a\0b", "null"),
        (tmp_path / "missing", "No such file"), (0, "cannot read"), (None, "cannot read"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            sign(read_artifact(affine), private)
    for public in (rsa_public, PRIVATE, b"\xff", tmp_path):
        with pytest.raises(InputError, match="the public key"):
            Module.load(signed(affine), trusted=public)


def test_without_cryptography_only_trusted_models_miss_it(affine: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    image = signed(affine)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    Module.load(image, verify=True)
    with pytest.raises(InputError, match=r"tcomp\[sign\]"):
        Module.load(image, trusted=PUBLIC)


def test_keys_of_openssl(affine: bytes, tmp_path: Path) -> None:
    """The commands that the documentation gives."""
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    try:
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no OpenSSL with Ed25519")
    Module.load(affine[:112] + sign(read_artifact(affine), private) + affine[176:], trusted=public)
