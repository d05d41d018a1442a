"""`tcomp sign`: what it writes, and what it refuses."""

import pytest

from tcomp.errors import ArtifactError
from tcomp.runtime import Module

pytest.importorskip("cryptography", reason="signatures need the package cryptography")

from tests.runtime.test_signing import OTHER_PUBLIC, PRIVATE, PUBLIC


@pytest.fixture
def key(tmp_path):
    (tmp_path / "private.pem").write_bytes(PRIVATE)
    return tmp_path / "private.pem"


def test_sign_replaces_the_artifact_or_writes_another(tcomp, artifact, key, tmp_path):
    before = artifact.read_bytes()
    assert "wrote signed.tcomp, signed" in tcomp("sign", artifact, "--key", key, "-o", "signed.tcomp").stdout
    Module.load("signed.tcomp", trusted=PUBLIC)
    with pytest.raises(ArtifactError, match="trusted key"):
        Module.load("signed.tcomp", trusted=OTHER_PUBLIC)
    assert artifact.read_bytes() == before
    (tmp_path / "model.tcomp").write_bytes(before)
    assert tcomp.json("sign", "model.tcomp", "--key", key) == {"artifact": "model.tcomp"}
    assert (tmp_path / "model.tcomp").read_bytes() == (tmp_path / "signed.tcomp").read_bytes()


def test_run_of_a_trusted_model(tcomp, artifact, key, tmp_path):
    (tmp_path / "public.pem").write_bytes(PUBLIC)
    (tmp_path / "other.pem").write_bytes(OTHER_PUBLIC)
    tcomp("sign", artifact, "--key", key, "-o", "signed.tcomp")
    assert "first run" in tcomp("run", "signed.tcomp", "--trusted", "public.pem").stdout
    assert "trusted key" in tcomp("run", "signed.tcomp", "--trusted", "other.pem", status=2).output
    assert "not signed" in tcomp("run", artifact, "--trusted", "public.pem", status=2).output


def test_mistakes(tcomp, artifact, key, tmp_path):
    assert "not a tcomp artifact" in tcomp("sign", key, "--key", key, status=2).output
    assert "No such file" in tcomp("sign", artifact, "--key", tmp_path / "missing", status=2).output
    (tmp_path / "public.pem").write_bytes(PUBLIC)
    assert "cannot read the private key" in tcomp("sign", artifact, "--key", "public.pem", status=2).output
