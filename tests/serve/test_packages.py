"""Whether these tests ran."""

import pytest

from tests.serve.conftest import MISSING


def test_the_server_has_its_packages():
    """All other files of this folder are left out where this test is skipped."""
    if MISSING:
        pytest.skip(f"the server needs {', '.join(MISSING)}: pip install 'tcomp[serve]'")
