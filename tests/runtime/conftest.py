from __future__ import annotations

import pytest

from tests.runtime import native_models as models


@pytest.fixture(scope="session")
def affine_code() -> bytes:
    return models.affine_code()


@pytest.fixture(scope="session")
def affine(affine_code: bytes) -> bytes:
    """The artifact of y = s * x + w."""
    return models.packed(affine_code, models.AFFINE_MANIFEST, [("w", models.W)])


@pytest.fixture(scope="session")
def difference() -> bytes:
    """The artifact of y = s * x - w: of the same signature and size."""
    return models.packed(models.affine_code("fsub"), models.AFFINE_MANIFEST, [("w", models.W)])


@pytest.fixture(scope="session")
def filtering() -> bytes:
    """The artifact of a model with a data-dependent extent and an error."""
    return models.packed(models.filter_code(), models.FILTER_MANIFEST, [])
