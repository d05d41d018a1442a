"""What a deployed model costs: `python -m tcomp.cli.footprint MODEL.tcomp INPUTS.npz` loads and runs one in a process that holds
nothing else, and prints {"load_s", "first_run_s", "import_peak_bytes", "peak_bytes"}."""

from __future__ import annotations

import json
import sys
import time


def _peak() -> int:
    """Bytes of memory that this program has held at most (getrusage would count the process it was forked from)."""
    with open("/proc/self/status") as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def main() -> None:
    """Entry point of the measuring process."""
    import numpy as np

    from tcomp.runtime import load

    path, inputs = sys.argv[1:]
    with np.load(inputs, allow_pickle=False) as file:
        arrays = dict(file)
    imported = _peak()
    start = time.perf_counter()
    module = load(path)
    loaded = time.perf_counter()
    module.run(arrays)
    ran = time.perf_counter()
    print(json.dumps({"load_s": loaded - start, "first_run_s": ran - loaded, "import_peak_bytes": imported, "peak_bytes": _peak()}))


if __name__ == "__main__":
    main()
