"""Signed artifacts: who made one, and that nothing in it was changed since (Ed25519, RFC 8032, by the package `cryptography`).

A signature signs the start of the file: its layout, and the SHA-256 of header and manifest; the manifest has those of the code and of all
weights. It lies in the header, so that signing moves nothing. Keys are files in PEM, as OpenSSL makes them:

    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.artifact import Artifact

Key: TypeAlias = "str | os.PathLike[str] | bytes"  # a file in PEM, or its contents
_KEY_LIMIT = 1 << 16  # bytes of such a file that are read: it has about a hundred


def sign(artifact: Artifact, private: Key) -> bytes:
    """The signature of an artifact, which `Artifact.save` writes into it. Raises ArtifactError for damaged weights, InputError for what is
    no private key of Ed25519, or is encrypted."""
    key = _read_key(private, True)
    artifact.verify("sha256")
    signature: bytes = key.sign(artifact.signed)
    return signature


def check_signature(artifact: Artifact, trusted: Key) -> None:
    """Check that an artifact is, weights included, as the holder of a key signed it; `trusted` is the public key. Raises ArtifactError if
    it is not signed, signed by another key or was changed since; InputError for what is not a public key of Ed25519."""
    key = _read_key(trusted, False)
    from cryptography.exceptions import InvalidSignature

    if not any(artifact.signature):
        raise ArtifactError("the artifact is not signed", where=artifact.where, hint="tcomp sign MODEL.tcomp --key private.pem")
    try:
        key.verify(artifact.signature, artifact.signed)
    except InvalidSignature:
        why = "another key signed it, or it was changed since"
        raise ArtifactError("the signature of the artifact is not by the trusted key", where=artifact.where, why=why) from None
    artifact.verify("sha256")


def _read_key(key: Key, private: bool) -> Any:
    """An Ed25519PrivateKey or Ed25519PublicKey."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError as problem:
        raise InputError("signatures need the package cryptography", why=str(problem), hint="pip install 'tcomp[sign]'") from None
    what = f"the {'private' if private else 'public'} key"
    where = "" if isinstance(key, bytes) else str(key)
    try:
        if isinstance(key, bytes):
            text = key
        else:
            with open(os.fspath(key), "rb") as file:
                text = file.read(_KEY_LIMIT)
        found = load_pem_private_key(text, None) if private else load_pem_public_key(text)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as problem:  # TypeError: encrypted, or no path
        raise InputError(f"cannot read {what}", where=where, why=str(problem), hint="give a file in PEM that is not encrypted") from None
    if not isinstance(found, Ed25519PrivateKey if private else Ed25519PublicKey):
        raise InputError(f"{what} is not one of Ed25519", where=where, hint="openssl genpkey -algorithm ed25519 -out private.pem")
    return found
