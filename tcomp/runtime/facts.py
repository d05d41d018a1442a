"""What an artifact says of its kernels beside their code, for profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tcomp.errors import ArtifactError
from tcomp.runtime.manifest import Manifest
from tcomp.runtime.plan import size_of

_WORK = ("flops", "slots", "divisions", "bytes")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel. `work` is what all its calls of a run have to do: "flops" (floating-point and integer operations), "slots" (lanes of 32
    bits in vector instructions), "divisions" (lanes of divisions and roots), "bytes" (that must be moved); None where that depends on
    data. `layout` is that of its results where it is not row-major; `not_fused` says why they are stored instead of passed on.
    """

    name: str
    work: dict[str, int] | None
    layout: str
    not_fused: tuple[str, ...]


def kernel_facts(manifest: Manifest, dims: Sequence[int]) -> list[KernelFacts]:
    """The facts of every kernel, in program order, for these values of the dims. Raises ArtifactError if they are missing or malformed."""
    names, facts = manifest.notes.get("kernels"), manifest.notes.get("facts")
    if not isinstance(names, list) or not isinstance(facts, list) or len(names) != len(facts):
        raise ArtifactError("the artifact says nothing of its kernels", hint="compile it again")
    return [_facts(str(name), fact, dims) for name, fact in zip(names, facts, strict=True)]


def _facts(name: str, fact: Any, dims: Sequence[int]) -> KernelFacts:
    if not isinstance(fact, dict):
        raise ArtifactError("the facts of a kernel are malformed", where=name)
    work, reasons = fact.get("work"), fact.get("not_fused")
    known = {key: size_of(work[key], dims) for key in _WORK} if isinstance(work, dict) and work.keys() >= set(_WORK) else None
    return KernelFacts(name, known, str(fact.get("layout", "")), tuple(map(str, reasons if isinstance(reasons, list) else ())))
