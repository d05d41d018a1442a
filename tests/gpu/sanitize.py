"""Runs the device tests under compute-sanitizer's memcheck, racecheck, synccheck and initcheck: python tests/gpu/sanitize.py

Needs a GPU and compute-sanitizer (part of the CUDA toolkit). Ends with status 1 if any tool reports an error, 2 if it cannot run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TESTS = Path(__file__).with_name("test_device.py")


def main() -> int:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH", file=sys.stderr)
        return 2
    failed = []
    for tool in TOOLS:
        # The illegal access of one test is wanted; it happens in a process of its own, which is not followed.
        check = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-o", "addopts=", str(TESTS)]
        print(f"== {tool}", flush=True)
        if subprocess.run([*check, *pytest], check=False).returncode:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "no errors")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
