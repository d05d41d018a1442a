"""Backends, which generate machine code: one protocol, and a file for each kind of target."""

from __future__ import annotations

from tcomp.backends.cpu import CpuBackend
from tcomp.backends.cuda import CudaBackend
from tcomp.backends.protocol import Backend, GraphOptions
from tcomp.target import CpuTarget, CudaTarget, Target

__all__ = ["Backend", "GraphOptions", "backend_of"]


def backend_of(target: Target | Backend | str | None = None) -> Backend:
    """The backend of a target, given itself or as its line of text (default: this machine). Raises `TargetError` for an unknown one."""
    match target:
        case Backend():
            return target
        case CpuTarget():
            return CpuBackend(target)
        case CudaTarget():
            return CudaBackend(target)
        case str() | None:
            return backend_of(Target.parse(target or "cpu"))
    raise TypeError(f"{target!r} is not a target")
