"""What a deployed model costs: `python -m tcomp.cli.footprint MODEL.tcomp INPUTS.npz` loads and runs one in a process that holds
nothing else, and prints {"load_s", "first_run_s", "import_peak_bytes", "peak_bytes"}."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def _peak() -> int:
    """Bytes of memory that this program has held at most (getrusage would count the process it was forked from)."""
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next((int(words[1]) << 10 for words in fields if words[:1] == ["VmHWM:"]), 0)


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
