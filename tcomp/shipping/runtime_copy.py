"""The runtime under another name: the same files, whose imports of each other are rewritten.

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
