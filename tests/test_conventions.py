"""What CONTRIBUTING.md asks of every file and no linter checks: docstrings of public names, reasons of constants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "tcomp"
FILES = sorted(ROOT.rglob("*.py"))


def undocumented(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """Public classes and functions in a scope that have no docstring."""
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            decorated = {name.id for d in node.decorator_list for name in ast.walk(d) if isinstance(name, ast.Name)}
            if ast.get_docstring(node) is None and "overload" not in decorated:
                yield f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node, f"{prefix}{node.name}.")


def test_public_names_have_docstrings() -> None:
    missing = [
        f"{path.relative_to(ROOT.parent)}: {name}"
        for path in FILES
        for name in undocumented(ast.parse(path.read_text(encoding="utf-8")), "")
    ]
    assert not missing, "\n".join(missing)


def is_number(node: ast.expr) -> bool:
    """Whether an expression is written with numbers alone."""
    parts = list(ast.walk(node))
    numbers = [p for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, int | float) and not isinstance(p.value, bool)]
    return bool(numbers) and all(
        isinstance(p, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Tuple | ast.expr_context) for p in parts
    )


def unexplained(path: Path) -> Iterator[str]:
    """Module-level numbers without a comment on their line or the line before, and without a docstring below."""
    text = path.read_text(encoding="utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    for node, following in zip(body, [*body[1:], None], strict=False):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or not is_number(value):
            continue
        explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str)
        around = "\n".join(lines[max(0, node.lineno - 2) : node.end_lineno])
        if not explained and not re.search(r"# \S", around):
            yield f"{path.relative_to(ROOT.parent)}:{node.lineno}: {lines[node.lineno - 1]}"


def test_constants_of_schedules_and_passes_have_a_unit_and_a_reason() -> None:
    found = [line for path in FILES if path.relative_to(ROOT).parts[0] in ("schedules", "passes") for line in unexplained(path)]
    assert not found, "\n".join(found)
