"""Native execution of kernels is shared with the tests of code generation; the benchmarks are a package beside the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "tests" / "codegen"), str(ROOT)]
