"""How a model looks from C: names, arguments and status codes, taken from the manifest of its artifact.

A function of the interface takes, in this order: the model; one `int64_t` for each symbolic size that the shapes of inputs tell; a pointer
for each input; a pointer for each output, followed, where only the run tells its extents, by a pointer to these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tcomp.errors import InputError, printable
from tcomp.runtime.manifest import Dim, Manifest, TensorSpec

_KEYWORDS = frozenset({
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum", "extern", "float", "for", "goto",
    "if", "inline", "int", "long", "register", "restrict", "return", "short", "signed", "sizeof", "static", "struct", "switch",
    "typedef", "union", "unsigned", "void", "volatile", "while", "bool", "true", "false", "and", "or", "not", "xor", "bitand", "bitor",
    "compl", "asm", "catch", "class", "delete", "explicit", "export", "friend", "mutable", "namespace", "new", "operator", "private",
    "protected", "public", "template", "this", "throw", "try", "typename", "using", "virtual", "main", "malloc", "free", "exit",
    "printf", "remove", "rename", "system", "signal", "time", "index", "NULL", "None", "True", "False", "as", "assert", "async",
    "await", "def", "del", "elif", "except", "finally", "from", "global", "import", "in", "is", "lambda", "nonlocal", "pass", "raise",
    "with", "yield",
})  # fmt: skip
"""Words that a name in C, C++ or Python must not be, or that the headers of the C library take."""

CODES = (
    ("OK", "no error"),
    ("STOPPED", "the run was stopped"),
    ("NO_MEMORY", "there is no memory for the arena or the threads"),
    ("ARENA_TOO_SMALL", "the arena that was given is too small for these sizes"),
    ("NULL_POINTER", "an argument is NULL"),
    ("BAD_THREADS", "the number of threads is not between 1 and 4096"),
    ("NO_WEIGHTS", "the weights are not loaded, cannot be read, or are those of another model"),
    ("TOO_SMALL", "these sizes are too small for the model"),
    ("TOO_LARGE", "these sizes are too large: memory cannot be addressed"),
)
"""Status codes that all models have, with their messages."""
FIRST_OWN = 16  # the first status that depends on the model: sizes out of range, then contradictions, then errors of a run

_C_TYPES = {
    "bool": "bool", "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t", "complex64": "float",
    "complex128": "double", **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


def c_type(dtype: str) -> str:
    """The C type of an element's bits; a complex element is two of them."""
    return _C_TYPES.get(dtype, "uint8_t")


def elements(dtype: str, shape: Sequence[int]) -> int:
    """How many values of `c_type` an array holds."""
    return prod(shape) * (2 if dtype.startswith("complex") else 1)


def identifier(text: str, taken: set[str], otherwise: str) -> str:
    """A name for C that resembles `text` and is none of those `taken`, to which it is added."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or otherwise
    name = f"{otherwise[0]}_{name}" if name[0].isdigit() else name
    unique, number = name, 2
    while unique in taken or unique in _KEYWORDS:
        unique, number = f"{name}_{number}", number + 1
    taken.add(unique)
    return unique


def comment(text: str) -> str:
    """Text that cannot end a comment in C or JavaScript, nor control a terminal; names in models are of unknown origin."""
    return printable(text).replace("*/", "* /").replace("/*", "/ *").replace("\n", " ").replace("\\", "/")


def package_name(text: str, given: bool) -> str:
    """The name of a package, valid in C and Python: `text` itself if it was `given`, else one that resembles it. Raises InputError for a
    given one that is not valid."""
    close = identifier(text, set(), "model").lower()
    if not given:
        return close
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", text) or text in _KEYWORDS:
        why = "a name has at most 64 ASCII letters, digits and underscores, begins with a letter, and is not a word of C or its library"
        raise InputError(f"`{text}` cannot be the name of a package", where="--name", why=why, hint=f"--name {close[:64]}")
    return text


def check_alone(manifest: Manifest, language: str) -> None:
    """Refuse a model that needs more around its code than arrays: the runtime's own steps, or outputs that begin with what inputs hold.
    Raises InputError that says it cannot be packaged for `language`."""
    if (host := manifest.host) is not None:
        names = ", ".join(f"{step.name} ({step.operator})" for step in host.computing)
        why = f"the runtime computes in Python what machine code cannot: {names}"
        what = f"a model with host steps cannot be packaged for {language}"
        raise InputError(what, why=why, hint="cut these operators off, and compile the rest")
    if manifest.state:
        why = f"it continues {', '.join(pair.input for pair in manifest.state)} in place"
        raise InputError(f"a model with state cannot be packaged for {language}", why=why, hint="compile it without `state`")


@dataclass(frozen=True)
class Tensor:
    """An input or output: its name in C, and its extents, with the names of sizes where these are free."""

    name: str
    spec: TensorSpec
    counted: bool = False  # whether only the run tells extents

    @property
    def type(self) -> str:
        """The C type of its elements."""
        return c_type(self.spec.dtype)

    @property
    def elements(self) -> int | None:
        """How many there are, where that is fixed."""
        fixed = [d for d in self.spec.shape if isinstance(d, int)]
        return elements(self.spec.dtype, fixed) if len(fixed) == len(self.spec.shape) else None

    @property
    def parameter(self) -> str:
        """As an argument, without `const`."""
        if self.elements:
            extents = ["2"] * self.spec.dtype.startswith("complex") + [str(d) for d in self.spec.shape]
            return f"{self.type} {self.name}[{' * '.join(extents) or 1}]"
        return f"{self.type} *{self.name}"


@dataclass(frozen=True)
class CInterface:
    """The interface of one model. `weights`: bytes of the weights section; `beside`: whether they are in a file of their own; `threaded`:
    whether the code has a thread pool."""

    name: str
    manifest: Manifest
    weights: int
    beside: bool
    threaded: bool

    @cached_property
    def _names(self) -> tuple[list[str | None], list[str], list[str]]:
        """Names of the sizes (by dim; None where the caller does not give it), inputs and outputs."""
        m, taken = self.manifest, {"model", self.name, *[f"{self.name}_{end}" for end in _FUNCTIONS]}
        inputs = [identifier(t.name, taken, f"input{n}") for n, t in enumerate(m.inputs)]
        outputs = [identifier(t.name, taken, f"output{n}") for n, t in enumerate(m.outputs)]
        sizes = [identifier(d.name, taken, f"size{n}") if _given(d) else None for n, d in enumerate(m.dims)]
        return sizes, inputs, outputs

    @property
    def sizes(self) -> list[tuple[str, int, Dim]]:
        """(name in C, number, dim) of the sizes that callers give."""
        return [(name, n, d) for n, (name, d) in enumerate(zip(self._names[0], self.manifest.dims, strict=True)) if name is not None]

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The inputs, in the order of the graph."""
        return [Tensor(name, spec) for name, spec in zip(self._names[1], self.manifest.inputs, strict=True)]

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The outputs, in the order of the graph."""
        late = {d.name for d in self.manifest.dims if d.data_dependent}

        def counted(spec: TensorSpec) -> bool:
            return any(not late.isdisjoint(re.findall(r"[\w.]+", d)) or d in late for d in spec.shape if isinstance(d, str))

        return [Tensor(name, spec, counted(spec)) for name, spec in zip(self._names[2], self.manifest.outputs, strict=True)]

    @property
    def binds(self) -> bool:
        """Whether values of inputs give sizes."""
        return any(d.what for d in self.manifest.dims)

    @property
    def free(self) -> bool:
        """Whether some size is not fixed."""
        return bool(self.manifest.dims)

    @property
    def deciding(self) -> list[Tensor]:
        """The inputs whose values give sizes."""
        names = {name for d in self.manifest.dims for name in d.values}
        return [t for t in self.inputs if t.spec.name in names]

    @cached_property
    def messages(self) -> dict[int, str]:
        """What each status means."""
        m, found = self.manifest, {n: text for n, (_, text) in enumerate(CODES)}
        ranges = [f"{d.what or d.name} must be {allowed(d)}" for d in m.dims]
        return found | dict(enumerate([*ranges, *m.checks, *(f"the model stopped: {e}" for e in m.errors)], FIRST_OWN))

    @property
    def first_check(self) -> int:
        """The status of the first contradiction among sizes."""
        return FIRST_OWN + len(self.manifest.dims)

    @property
    def first_error(self) -> int:
        """The status of the first error of a run."""
        return self.first_check + len(self.manifest.checks)

    @property
    def exports(self) -> list[str]:
        """The functions of the library."""
        absent = set() if self.free else {"shapes", "arena_bytes"}
        absent |= set() if self.threaded else {"set_threads", "after_fork"}
        absent |= set() if self.beside else {"open"}
        return [f"{self.name}_{end}" for end in _FUNCTIONS if end not in absent]


_FUNCTIONS = ("run", "shapes", "arena_bytes", "open", "set_threads", "after_fork", "stop", "message", "free")


def _given(d: Dim) -> bool:
    return not d.data_dependent and not d.what


def allowed(d: Dim) -> str:
    """The range of a size, in words."""
    return f"at least {d.min}" if d.max is None else f"between {d.min} and {d.max}" if d.max > d.min else str(d.min)
