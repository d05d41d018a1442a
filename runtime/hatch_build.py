"""Builds the package `tcomp_runtime`: a copy of tcomp.runtime under another name, by `tcomp.shipping.runtime_copy`."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COPY = Path("tcomp", "shipping", "runtime_copy.py")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the package to a wheel or a source distribution that is made of the repository."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files; for editable installations as well."""
        root = Path(self.root)
        if (root / "tcomp_runtime").is_dir():  # a source distribution, whose files hatchling finds itself
            return
        spec = importlib.util.spec_from_file_location("runtime_copy", root.parent / _COPY)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._folder = tempfile.TemporaryDirectory()
        for name, text in module.runtime_files("tcomp_runtime").items():
            path = Path(self._folder.name, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
            build_data["force_include"][str(path)] = f"tcomp_runtime/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the distribution is written."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
