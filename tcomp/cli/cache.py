"""`tcomp cache`: what is kept of earlier compilations, and how to be rid of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from tcomp import cache
from tcomp.cli import options as opt, output
from tcomp.errors import InputError


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise InputError("there is no cache", why=error.strerror or "", where=str(cache.folder() or "")) from None
    except OSError as error:
        raise InputError("the cache cannot be used", why=error.strerror or str(error), where=str(cache.folder() or "")) from None


def show(as_json: opt.Json = False) -> None:
    """Show the folder of the cache, its size and its limit, and what it holds."""
    with _usable():
        found = cache.entries()
    size, limit, counts, sizes = sum(e.size for e in found), cache.size_limit(), Counter[str](), Counter[str]()
    for entry in found:
        counts[entry.kind] += 1
        sizes[entry.kind] += entry.size
    if as_json:
        kinds = {kind: {"files": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)}
        return output.print_json({"folder": cache.folder(), "bytes": size, "limit": limit, "files": len(found), "kinds": kinds})
    oldest = datetime.fromtimestamp(found[0].used).strftime("%Y-%m-%d %H:%M") if found else "-"
    used = f"{output.size(size)} of {output.size(limit)} in {output.count(len(found), 'file')}"
    output.facts("cache", {"folder": cache.folder(), "size": used, "used least recently": oldest})
    if found:
        output.line()
        output.table("", ("kind", "files>", "size>"), [(kind, counts[kind], output.size(sizes[kind])) for kind in sorted(counts)])


def clean(as_json: opt.Json = False) -> None:
    """Remove all that the cache holds. Whoever is compiling meanwhile compiles some kernels again."""
    with _usable():
        removed, size = cache.clean()
    output.answer(f"removed {output.count(removed, 'file')}, {output.size(size)}", {"files": removed, "bytes": size}, as_json)
