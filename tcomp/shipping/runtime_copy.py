"""Copies of parts of tcomp: the runtime under another name, whose files' imports of each other are rewritten; and what serves models.

So does the distribution `tcomp-runtime` get its package `tcomp_runtime` (runtime/hatch_build.py), and a packaged model its own. Such copies
know nothing of each other nor of tcomp: they can be installed side by side, in different versions, and each has a thread pool of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]  # of tcomp
_IMPORTED = re.compile(r"\btcomp\.(runtime|errors)\b")


def runtime_files(package: str) -> dict[str, str]:
    """Texts of the runtime's files, by their paths in a package of this dotted name."""
    runtime = _ROOT / "runtime"
    sources = {"errors.py": _ROOT / "errors.py", **{str(p.relative_to(runtime)): p for p in sorted(runtime.rglob("*.py"))}}
    renamed = {"runtime": package, "errors": f"{package}.errors"}
    texts = {name: _IMPORTED.sub(lambda found: renamed[found[1]], path.read_text("utf-8")) for name, path in sources.items()}
    return {**texts, "py.typed": ""}


def server_files() -> dict[str, str]:
    """Texts of the files that `tcomp serve` needs, by their paths: the command line, the server and the runtime, not the compiler."""
    folders = [p for folder in ("cli", "generation", "runtime", "serve") for p in sorted((_ROOT / folder).rglob("*.py"))]
    paths = [_ROOT / "__init__.py", _ROOT / "cache.py", _ROOT / "errors.py", *folders]
    return {str(path.relative_to(_ROOT.parent)): path.read_text("utf-8") for path in paths}
