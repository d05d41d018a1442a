"""Runs the device tests under compute-sanitizer's memcheck, racecheck, synccheck and initcheck:

    python tests/gpu/sanitize.py [arguments of pytest, as in -k softmax]

Needs a GPU and compute-sanitizer (of the CUDA toolkit, or `pip install nvidia-cuda-sanitizer-api`). Ends with status 1 if any tool reports
an error, 2 if it cannot run. The tools slow kernels down a hundredfold: the largest sizes are left out, unless arguments say what to run.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from tcomp.errors import DeviceError
from tcomp.runtime.cuda import CupyDevice

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TESTS = Path(__file__).with_name("test_device.py")
USUAL = ("-k", "not 2048 and not 10000019")


def sanitizer() -> str | None:
    """compute-sanitizer: on the PATH, of an installed package, or of the toolkit at its usual place."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    places = [found for folder in packages for found in folder.glob("*/bin/compute-sanitizer")]
    places.append(Path("/usr/local/cuda/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or next((str(p) for p in places if p.exists()), None)


def main() -> int:
    program = sanitizer()
    if program is None:
        print("there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api, or put the toolkit's on the PATH", file=sys.stderr)
        return 2
    try:
        CupyDevice()
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 2
    failed = []
    for tool in TOOLS:
        # The illegal access of one test is wanted; it happens in a process of its own, which is not followed.
        check = [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts="]
        print(f"== {tool}", flush=True)
        if subprocess.run([*check, *pytest, str(TESTS), *(sys.argv[1:] or USUAL)], check=False).returncode:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "no errors")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
