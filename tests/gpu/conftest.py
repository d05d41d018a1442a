"""The host that plays the device is shared with the tests of code generation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "codegen"))
