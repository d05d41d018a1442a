"""Small damage to bytes, JSON, tokens and protobuf messages, drawn from a seeded generator: the same seed, the same damage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.message import Message

Path = tuple[str | int, ...]

INTEGERS = (0, 1, -1, 2, 3, 7, 64, 255, 256, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32, 1 << 40, (1 << 62), (1 << 62) + 1,
            (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1, 1 << 64, 10**30)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1e-45, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "n",
    "x",
    "..",
    "/etc/passwd",
    "../../x",
    "a\0b",
    "\x1b[31m",
    "é",
    "\U0001f600",
    "%s%n",
    "1",
    "-1",
    "nan",
    "n*n",
    "A" * 5000,
)


def count(rng: Random, most: int) -> int:
    """How often to damage: mostly once, so that what is right up to there is read as well."""
    return 1 if rng.randrange(3) else rng.randint(2, most)


def integer(rng: Random, old: int = 0) -> int:
    """An interesting number, or one near the old one."""
    match rng.randrange(5):
        case 0:
            return old + rng.choice((-1, 1, 2, 16))
        case 1:
            return -old
        case 2:
            return old << rng.randrange(1, 40)
        case 3:
            return rng.getrandbits(rng.randrange(1, 65))
    return rng.choice(INTEGERS)


def text(rng: Random, old: str, known: Sequence[str]) -> str:
    """Another text: of those known, or damaged."""
    match rng.randrange(4):
        case 0 | 1 if known:
            return rng.choice(known)
        case 2:
            at = rng.randint(0, len(old))
            return old[:at] + rng.choice(TEXTS) + old[at + rng.randrange(3) :]
    return rng.choice(TEXTS)


def damaged_bytes(rng: Random, data: bytes, times: int = 3) -> bytes:
    """Bits flipped, bytes replaced, ranges removed, repeated or cut off."""
    out = bytearray(data)
    for _ in range(count(rng, times)):
        if not out:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(9)))
        at = rng.randrange(len(out))
        size = min(len(out) - at, 1 << rng.randrange(8))
        match rng.randrange(7):
            case 0 | 1:
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = out[at : at + size]
            case 5:
                word = integer(rng) & ((1 << 64) - 1)
                out[at : at + 8] = word.to_bytes(8, "little")[: len(out) - at]
            case 6 if rng.randrange(4) == 0:
                del out[at:]
    return bytes(out)


# ---------------------------------------------------------------- JSON


def damaged_json(rng: Random, data: bytes, times: int = 3) -> bytes:
    """Fields changed, removed, repeated, swapped with others of the same document; now and then damaged as bytes."""
    if rng.randrange(20) == 0:
        return damaged_bytes(rng, data)
    root = [json.loads(data)]
    for _ in range(count(rng, times)):
        _damage(rng, root)
    encoded = json.dumps(root[0]).encode()
    return encoded if len(encoded) < 100_000 else data


def _damage(rng: Random, root: list[Any]) -> None:
    places: list[tuple[Any, Any]] = []  # (container, key)
    words: list[str] = []

    def visit(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            places.append((value, key))
            if isinstance(inner, str):
                words.append(inner)
            elif isinstance(inner, dict | list):
                visit(inner)

    visit(root)
    container, key = rng.choice(places)
    old = container[key]
    match rng.randrange(8):
        case 0 if container is not root:
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, old)
        case 2:
            other, place = rng.choice(places)
            container[key] = json.loads(json.dumps(other[place]))
        case 3:
            container[key] = rng.choice((None, True, False, [], {}, "", [old], {"x": old}, 1.5, [[old, old]]))
        case 4 if isinstance(container, dict):
            container[text(rng, str(key), words)] = container.pop(key)
        case 5 if isinstance(old, list | dict) and rng.randrange(4) == 0:
            for _ in range(rng.choice((10, 70, 300))):
                old = [old]
            container[key] = old
        case _:
            if isinstance(old, str):
                container[key] = text(rng, old, words)
            elif isinstance(old, int):
                container[key] = integer(rng, old)
            else:
                container[key] = rng.choice((*INTEGERS, *FLOATS[:6], *TEXTS))


# ---------------------------------------------------------------- texts

_TOKENS = re.compile(r"\s+|[A-Za-z_][\w.]*|\d+(?:\.\d+)?\w*|\"[^\"\n]*\"|`[^`\n]*`|\.\.|->|//|<<|>>|<=|==|!=|\+=|.", re.DOTALL)


def damaged_text(rng: Random, data: bytes, times: int = 4) -> bytes:
    """Tokens removed, repeated, swapped, replaced by others of the same text; lines moved; now and then damaged as bytes."""
    source = data.decode(errors="replace")
    if rng.randrange(20) == 0:
        return damaged_bytes(rng, data).decode(errors="replace").encode()
    tokens = _TOKENS.findall(source)
    for _ in range(count(rng, times)):
        if not tokens:
            break
        at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        match rng.randrange(8):
            case 0:
                del tokens[at]
            case 1:
                tokens[at] = tokens[other]
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens.insert(at, tokens[other])
            case 4:
                first, last = sorted((at, other))
                tokens[first:first] = tokens[first : min(last, first + 40)]
            case 5:
                numbers = [n for n, token in enumerate(tokens) if token[:1].isdigit()]
                if numbers:
                    tokens[rng.choice(numbers)] = str(abs(integer(rng)))
            case 6:
                names = [n for n, token in enumerate(tokens) if token[:1].isalpha()]
                if len(names) > 1:
                    tokens[rng.choice(names)] = tokens[rng.choice(names)]
            case 7:
                match rng.randrange(6):
                    case 0:
                        tokens[at] = rng.choice(("(", "-", "(-", "~", "{", "[", "let x = ")) * rng.choice((3, 50, 2000))
                    case _:
                        tokens[at] = text(rng, tokens[at], tokens[:40])
    result = "".join(tokens)
    return (result if len(result) < 50_000 else result[:50_000]).encode(errors="replace")


# ---------------------------------------------------------------- protobuf messages


def damaged_message(rng: Random, message: Message, times: int = 3) -> None:
    """Fields of a message, or of one inside it, changed, cleared, repeated, swapped, exchanged with those of the same type elsewhere."""
    for _ in range(count(rng, times)):
        inner = messages(message)
        _damage_message(rng, rng.choice(inner), inner)


def messages(message: Message) -> list[Message]:
    """A message and all messages inside of it."""
    found, waiting = [], [message]
    while waiting:
        m = waiting.pop()
        found.append(m)
        for field, value in m.ListFields():
            if field.type == field.TYPE_MESSAGE:
                waiting += value if _repeated(field) else [value]
    return found


def _repeated(field: Any) -> bool:
    return bool(getattr(field, "is_repeated", None) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _damage_message(rng: Random, m: Message, everywhere: Sequence[Message]) -> None:
    used = [field for field, _ in m.ListFields()]
    fields = used if used and rng.randrange(4) else list(m.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    name = field.name
    alike = [other for other in everywhere if other.DESCRIPTOR is m.DESCRIPTOR]
    if rng.randrange(8) == 0:
        m.ClearField(name)
        return
    if rng.randrange(8) == 0:
        donor = rng.choice(alike)
        copied = type(donor).FromString(donor.SerializeToString())
        m.MergeFrom(copied) if rng.randrange(2) else m.CopyFrom(copied)
        return
    if field.type == field.TYPE_MESSAGE:
        if not _repeated(field):
            getattr(m, name).SetInParent()
            return
        items = getattr(m, name)
        match rng.randrange(3):
            case 0 if items:
                del items[rng.randrange(len(items))]
            case 1 if items:
                items.add().CopyFrom(type(items[0]).FromString(rng.choice(items).SerializeToString()))
            case _:
                if len(items) > 1:
                    order = list(items)
                    rng.shuffle(order)
                    copies = [type(x).FromString(x.SerializeToString()) for x in order]
                    m.ClearField(name)
                    getattr(m, name).extend(copies)
                else:
                    items.add()
        return
    value = _scalar_maker(rng, field, everywhere)
    if not _repeated(field):
        setattr(m, name, value(getattr(m, name)))
        return
    items = getattr(m, name)
    match rng.randrange(4):
        case 0 if items:
            del items[rng.randrange(len(items))]
        case 1:
            items.append(value(items[0] if items else None))
        case 2 if items:
            items.extend(list(items)[: 1 << rng.randrange(6)])
        case _:
            if items:
                at = rng.randrange(len(items))
                items[at] = value(items[at])


def _scalar_maker(rng: Random, field: Any, everywhere: Sequence[Message]) -> Callable[[Any], Any]:
    """What makes a new value of a field from the old one."""
    if field.type == field.TYPE_STRING:
        known = [v for m in everywhere for f, v in m.ListFields() if f.type == f.TYPE_STRING and isinstance(v, str)]
        return lambda old: text(rng, old or "", known).encode(errors="replace").decode(errors="replace")
    if field.type == field.TYPE_BYTES:
        return lambda old: damaged_bytes(rng, old or b"")
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return lambda old: rng.choice((*FLOATS[:4], *FLOATS[6:], -(old or 1.0)))
    if field.type == field.TYPE_BOOL:
        return lambda old: not old
    if field.type == field.TYPE_ENUM:
        return lambda old: rng.choice([v.number for v in field.enum_type.values])
    bits = 31 if field.type in (field.TYPE_INT32, field.TYPE_UINT32) else 63
    lowest = 0 if field.type in (field.TYPE_UINT32, field.TYPE_UINT64) else -(1 << bits)
    return lambda old: max(lowest, min(integer(rng, int(old or 0)), (1 << bits) - 1))
