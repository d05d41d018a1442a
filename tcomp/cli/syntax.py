"""The syntax of options: NAME=VALUE, sizes, shapes, lists, times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tcomp.errors import InputError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}  # of each unit of time


def assignments(texts: Iterable[str] | None, option: str, form: str, hint: str) -> Iterator[tuple[str, str, str]]:
    """(NAME, VALUE, where it was said) of each NAME=VALUE. Raises `InputError` for another form, and for a name that is given twice."""
    names = set()
    for text in texts or ():
        name, _, value = (part.strip() for part in text.rpartition("="))
        if not name or not value:
            raise InputError(f"`{text}` is not of the form {form}", where=option, hint=hint)
        if name in names:
            raise InputError(f"`{name}` is given twice", where=f"{option} {text}")
        names.add(name)
        yield name, value, f"{option} {text}"


def parse_dims(texts: Iterable[str] | None, option: str = "--dim") -> dict[str, int | tuple[int, int]]:
    """`batch=1` fixes a dim, `seq=1..512` bounds it. Raises `InputError`."""
    dims: dict[str, int | tuple[int, int]] = {}
    for name, value, where in assignments(texts, option, "NAME=N", f"{option} batch=1 or {option} seq=1..512"):
        match = re.fullmatch(r"(\d{1,15})(?:\.\.(\d{1,15}))?", value)
        if match is None:
            raise InputError(f"`{value}` is no size", where=where, hint="a number (batch=1) or a range (seq=1..512)")
        lo, hi = int(match[1]), int(match[2] or match[1])
        if lo > hi:
            raise InputError(f"the range {value} is empty", where=where, hint=f"{name}={hi}..{lo}")
        dims[name] = (lo, hi) if match[2] else lo
    return dims


def parse_shapes(texts: Iterable[str] | None) -> dict[str, tuple[int | str, ...]]:
    """`x=1x3x224x224`, or `ids=batch,128` where sizes may be names. `x=[]` is a scalar. Raises `InputError`."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, value, where in assignments(texts, "--shape", "INPUT=AxBxC", "--shape input=1x3x224x224"):
        inner = re.fullmatch(r"\[(.*)\]|\((.*)\)", value)
        value = next(group for group in inner.groups() if group is not None).strip() if inner else value
        parts = [p.strip() for p in (value.split(",") if "," in value or not re.fullmatch(r"[\dxX]*", value) else re.split("[xX]", value))]
        if not all(re.fullmatch(r"\d{1,15}|[^\W\d].*", p) for p in parts) and not (inner and parts == [""]):
            hint = f"sizes separated by x or commas: {name}=1x3x224x224 or {name}=batch,128"
            raise InputError(f"`{value}` is no shape", where=where, hint=hint)
        shapes[name] = tuple(int(p) if p.isdigit() else p for p in parts if p)
    return shapes


def parse_choices(text: str | None, known: Sequence[str], option: str) -> tuple[str, ...]:
    """A comma-separated selection from `known`, without repetitions. Raises `InputError`."""
    chosen = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not chosen:
        raise InputError("nothing is chosen", where=option, hint=f"some of {', '.join(known)}")
    for part in chosen:
        if part not in known:
            raise InputError(f"unknown choice `{part}`", where=f"{option} {text}", hint=f"some of {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))


def parse_threads(text: str | None) -> tuple[int | None, ...]:
    """`1,2`: several numbers of threads; (None,), the default number, if there are none. Raises `InputError`."""
    if text is None:
        return (None,)
    numbers = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,4}\s*", n) and 1 <= int(n) <= 4096 for n in numbers):
        raise InputError(f"`{text}` is no list of thread counts", where="--threads", hint="numbers from 1 to 4096, as in --threads 1,2")
    return tuple(dict.fromkeys(map(int, numbers)))


def parse_time(text: str) -> float:
    """Seconds of `90`, `90s`, `1.5m`, `2h`. Raises `InputError`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise InputError(f"`{text}` is no time", where="--budget", hint="a number of seconds, or as in 60s, 10m, 1h")
    return float(found[1]) * _SECONDS[found[2]]
