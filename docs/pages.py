"""Pages that are made while the site is built: those at the root of the project, every tutorial with what it prints, and the reference.

Run by mkdocs-gen-files. A tutorial that fails stops the build.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md", "architecture.md": "ARCHITECTURE.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md", "benchmarks.md": "benchmarks/README.md", "examples.md": "examples/README.md",
}  # fmt: skip
TIMEOUT = 300  # seconds that a tutorial may take


def write(page: str, text: str, source: Path) -> None:
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)
    mkdocs_gen_files.set_edit_path(page, source.relative_to(ROOT))


def title(path: Path) -> str:
    """The first sentence of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem).splitlines()[0].rstrip(".")


def tutorial(path: Path) -> str:
    """A tutorial's source, and what it prints when it is run now."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{path} failed:\n{done.stderr}")
    source = path.read_text(encoding="utf-8").rstrip()
    return f"# {title(path)}\n\n```python\n{source}\n```\n\nIt prints:\n\n```text\n{done.stdout.rstrip()}\n```\n"


def main() -> None:
    for page, name in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for other, file in PAGES.items():
            text = text.replace(f"]({file})", f"]({other})")
        text = text.replace("](docs/", "](")
        write(page, text, ROOT / name)
    nav = mkdocs_gen_files.Nav()
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        write(f"tutorials/{path.stem}.md", tutorial(path), path)
        nav[title(path).replace("[", "(").replace("]", ")")] = f"{path.stem}.md"
    write("tutorials/SUMMARY.md", "".join(nav.build_literate_nav()), ROOT / "docs/pages.py")
    nav = mkdocs_gen_files.Nav()
    for path in sorted((ROOT / "tcomp").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        page = "/".join((*parts, "index.md") if path.stem == "__init__" else (*parts[:-1], f"{parts[-1]}.md"))
        write(f"reference/{page}", f"::: {'.'.join(parts)}\n", path)
        nav[parts] = page
    write("reference/SUMMARY.md", "".join(nav.build_literate_nav()), ROOT / "docs/pages.py")


main()
