"""The tutorials run, and say what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
LAST_WORDS = {"01": "outside its range of 1 to 64", "02": "right", "03": "90-te.txt", "05": "of the peak", "06": "of the peak"}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_tutorial(path, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TCOMP_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert LAST_WORDS[path.name[:2]] in done.stdout.splitlines()[-1], done.stdout[-500:]
