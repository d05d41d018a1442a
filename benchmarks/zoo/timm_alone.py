"""timm without torchvision, whose wheels fit one build of PyTorch each: models need nothing of it but a layer that they do not use here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Named(type):
    """Classes whose attributes are their names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(types.ModuleType):
    """A module in which every name is a class without meaning."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = list[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = fullname == "torchvision" or fullname.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_timm() -> Any:
    """The module `timm`, with a stand-in for torchvision while it is imported, if that is not there. Raises `ImportError` without timm."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # not there, or made for another PyTorch
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            import timm
        finally:
            sys.meta_path.remove(finder)
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]  # others ask whether it is there
        return timm
    import timm

    return timm
