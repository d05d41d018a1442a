"""The host that plays the device is shared with the tests of code generation, programs to tune with those of autotuning."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("codegen", "autotune")]
