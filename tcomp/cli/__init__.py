"""The `tcomp` command: thin; it parses, calls the driver, and prints. One command a file.

Results go to stdout (tables, or one JSON document with `--json`), everything else to stderr. Exit status: 0 all is well; 1 a finding
(unsupported nodes, a failed verification); 2 a mistake of the user's; 70 a bug of tcomp; 130 interrupted.
Command modules import the compiler when they run, not when they are loaded, so that `--help` and completion are quick.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `tcomp` command."""
    try:
        from tcomp.cli.app import app

        app(prog_name="tcomp")
    except KeyboardInterrupt:  # between commands; inside of one, `guarded` has more to say
        sys.exit(130)
