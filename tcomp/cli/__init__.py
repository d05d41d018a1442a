"""The `tcomp` command: thin; it parses, calls the compiler, and prints.

Results go to stdout (tables, or one JSON document with `--json`), everything else to stderr. Command modules import the compiler when they
run, not when they are loaded, so that `--help` and completion are quick.
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
