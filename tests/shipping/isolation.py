"""A Python with NumPy and nothing else: no site-packages, no tcomp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np


def numpy_alone(folder: Path) -> Path:
    """A folder to import from that has NumPy alone."""
    root = Path(np.__file__).parents[1]
    found = folder / "numpy-alone"
    if not found.exists():
        found.mkdir()
        for name in ("numpy", "numpy.libs"):
            if (root / name).exists():
                (found / name).symlink_to(root / name)
    return found


def program(*paths: Path) -> list[str]:
    """The start of a command: Python, with these folders to import from; `-c` follows."""
    start = f"import sys; sys.path += {[str(p) for p in paths]!r}\n"
    return [sys.executable, "-I", "-S", "-B", "-c", start]


def run(text: str, *paths: Path, arguments: tuple[object, ...] = (), status: int = 0) -> str:
    """What a program prints, which imports from these folders alone."""
    command = program(*paths)
    command[-1] += text
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
