"""What was computed before, in a folder (`$TCOMP_CACHE`, else `~/.cache/tcomp`): compiled kernels, layouts, figures of the machine.

One small file each: the SHA-256 of its name and content, a line's end, JSON. It is written to the side and renamed, so that any number of
processes may share the folder; a damaged file is as good as none. What is found is machine code that will be run, so nobody else may be
able to write it: the folder is made with mode 0700, and one that belongs to another user or is writable for others, or below such a folder
(unless that is sticky, as /tmp), is not used, and a warning says so. Files are named from the folder as it was opened and asked, and links,
devices and files of others in it are passed over. A key that signs the files would protect nothing more: who can write to the folder could
read the key. A folder that cannot be made or written costs only time.

The folder holds about `$TCOMP_CACHE_SIZE` (2 GiB by default; "500M", "4G") at most: what was used least recently goes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tcomp.errors import InputError

T = TypeVar("T")

DEFAULT_SIZE = 2 << 30  # bytes
_RECORD_LIMIT = 256 << 20  # bytes of a file that is read
_LOOK_AGAIN = 600.0  # seconds after which a process that stores something looks at the size of all
_LOOK_SHARE = 64  # and after it has stored the size limit divided by this
_LEFT = 0.8  # of the size limit, after what was used least recently is gone
_ABANDONED = 3600.0  # seconds after which a file that was not renamed is nobody's any more
_FILE = re.compile(r"(\.)?[0-9a-f]{1,64}\.json(?(1)\.[0-9a-f]{12}\.tmp)")
_KIND = re.compile(r"[a-z]{1,20}")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def folder() -> Path | None:
    """`$TCOMP_CACHE`, else `$XDG_CACHE_HOME/tcomp`, else `~/.cache/tcomp`; None for a user without a home."""
    if chosen := os.environ.get("TCOMP_CACHE"):
        return Path(chosen)
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcomp"
    return None


def size_limit() -> int:
    """`$TCOMP_CACHE_SIZE` in bytes. Raises `InputError` if that is not a size."""
    text = os.environ.get("TCOMP_CACHE_SIZE") or str(DEFAULT_SIZE)
    if (found := re.fullmatch(r"(\d{1,15})([KMGT]?)(i?B)?", text.strip())) is None:
        raise InputError(f"TCOMP_CACHE_SIZE is {text!r:.60}, which is not a size", hint="as in 500M or 4G")
    return int(found[1]) << _UNITS[found[2]]


@functools.cache
def source_version() -> str:
    """A digest of the compiler's sources and its LLVM: another compiler must not be handed what this one made."""
    import llvmlite  # not to describe a target, nor to find what was measured

    root = Path(__file__).parent
    digest = hashlib.sha256(str(llvmlite.__version__).encode())
    folders = ("ir", "ops", "schedules", "codegen", "backends")
    for path in (root / "machines.py", root / "target.py", *(path for part in folders for path in sorted((root / part).rglob("*.py")))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def name(*parts: str) -> str:
    """The name of what is computed from these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(kind: str, name: str) -> Any:
    """The record stored under a name, None if there is none."""
    try:
        with _opened() as root, _descriptor(_path(kind, name), os.O_RDONLY | os.O_NONBLOCK, root) as file:
            state = os.fstat(file)
            private = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not private or state.st_size > _RECORD_LIMIT:
                return None
            with open(file, "rb", closefd=False) as reader:
                data = reader.read(state.st_size)
            with suppress(OSError):
                os.utime(file)  # it was used now
        digest, content = data.split(b"\n", 1)
        return json.loads(content) if digest == _digest(kind, name, content) else None
    except (OSError, ValueError, RecursionError):
        return None


def store(kind: str, name: str, record: Any) -> None:
    """Keep a record, of what JSON can say."""
    content, path = json.dumps(record).encode(), _path(kind, name)
    data = _digest(kind, name, content) + b"\n" + content
    with suppress(OSError), _opened(create=True) as root:
        for depth in (1, 2):
            with suppress(FileExistsError):
                os.mkdir("/".join(path.split("/")[:depth]), 0o700, dir_fd=root)
        beside = f"{os.path.dirname(path)}/.{os.path.basename(path)}.{secrets.token_hex(6)}.tmp"
        try:
            with _descriptor(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root) as file, open(file, "wb", closefd=False) as writer:
                writer.write(data)
            os.rename(beside, path, src_dir_fd=root, dst_dir_fd=root)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside, dir_fd=root)
            raise
        _keep_limit(root, len(data))


def recall(kind: str, name: str, compute: Callable[[], T]) -> T:
    """The record stored under a name; if there is none it is computed, and stored."""
    found: T | None = load(kind, name)
    if found is None:
        found = compute()
        store(kind, name, found)
    return found


@dataclass(frozen=True)
class Entry:
    """A file of the cache: what `kind` of record it holds, its `path` in the folder, its `size` in bytes, when it was last `used` (seconds
    since 1970), and whether it is being written, or was abandoned then (`temporary`)."""

    kind: str
    path: str
    size: int
    used: float
    temporary: bool


def entries() -> list[Entry]:
    """All files of the cache, those first that were used least recently. Files that are none of the cache's are passed over. Raises
    `OSError` if the folder cannot be used."""
    with _opened() as root:
        return _entries(root)


def clean() -> tuple[int, int]:
    """Remove all files of the cache: how many were removed, and their bytes. Raises `OSError` if the folder cannot be used."""
    with _opened() as root:
        return _remove(root, _entries(root))


def problem() -> str:
    """Why the folder is not used, "" if it is, or would be made."""
    try:
        with _opened(create=True):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _entries(root: int) -> list[Entry]:
    found = []
    for kind in filter(_KIND.fullmatch, os.listdir(root)):
        with suppress(OSError), _descriptor(kind, os.O_RDONLY | os.O_DIRECTORY, root) as inner:
            for part in os.listdir(inner):
                with suppress(OSError), _descriptor(part, os.O_RDONLY | os.O_DIRECTORY, inner) as folder, os.scandir(folder) as files:
                    for file in files:
                        with suppress(OSError):
                            state = file.stat(follow_symlinks=False)
                            if _FILE.fullmatch(file.name) and not stat.S_ISDIR(state.st_mode):
                                temporary, path = file.name.startswith("."), f"{kind}/{part}/{file.name}"
                                found.append(Entry(kind, path, state.st_size, state.st_mtime, temporary))
    return sorted(found, key=lambda e: e.used)


def _remove(root: int, unwanted: list[Entry]) -> tuple[int, int]:
    removed = size = 0
    for entry in unwanted:
        with suppress(OSError):  # another process was quicker
            os.unlink(entry.path, dir_fd=root)
            removed, size = removed + 1, size + entry.size
    return removed, size


class _Written:
    """Bytes that this process has stored since it looked at the size of all."""

    bytes = 0


def _keep_limit(root: int, stored: int) -> None:
    """Now and then: remove what was used least recently if all together is too large."""
    _Written.bytes += stored
    try:
        limit = size_limit()
    except InputError as error:
        _warn(str(error))
        limit = DEFAULT_SIZE
    now = time.time()
    if _Written.bytes * _LOOK_SHARE < limit and 0 <= now - os.fstat(root).st_mtime < _LOOK_AGAIN:
        return
    _Written.bytes = 0
    os.utime(root)  # the folder's time says when the size was looked at
    found = _entries(root)
    unwanted = [e for e in found if e.temporary and e.used < now - _ABANDONED]
    size = sum(e.size for e in found)
    if size > limit:
        for entry in found:
            if size <= _LEFT * limit:
                break
            if not entry.temporary:
                unwanted.append(entry)
                size -= entry.size
    _remove(root, unwanted)


@contextmanager
def _opened(create: bool = False) -> Iterator[int]:
    """The folder, as a descriptor. Raises `OSError` if it is not there, or not this user's alone."""
    path = folder()
    if path is None:
        raise FileNotFoundError(0, "there is no home folder; set TCOMP_CACHE")
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _descriptor(path, os.O_RDONLY | os.O_DIRECTORY, follow=True) as root:
        state = os.fstat(root)
        if why := _danger(path, state) or _danger_above(path):
            why = f"the cache {path} is not used: {why}; set TCOMP_CACHE to a private folder"
            _warn(why)
            raise PermissionError(0, why)
        yield root


def _danger(folder: Path, state: os.stat_result, *others: int) -> str:
    """Who else may write to a folder, as a sentence; "" if only this user and `others` may."""
    if state.st_uid not in (os.geteuid(), *others):
        return f"{folder} belongs to user {state.st_uid}"
    return f"other users may write to {folder}" if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@functools.lru_cache(maxsize=16)
def _danger_above(path: Path) -> str:
    """As `_danger`, of all folders on the way there: who may put another folder in the place of this one."""
    top = os.stat("/").st_uid  # root, also in a container that has no such user
    for folder in sorted({*path.absolute().parents, *Path(os.path.realpath(path)).parents}):
        state = os.stat(folder)
        sticky = state.st_mode & stat.S_ISVTX and state.st_uid in (0, top, os.geteuid())
        if (why := _danger(folder, state, 0, top)) and not sticky:
            return why
    return ""


@functools.cache
def _warn(text: str) -> None:
    """Once in a process."""
    logging.getLogger("tcomp").warning(text)


@contextmanager
def _descriptor(path: str | Path, flags: int, root: int | None = None, follow: bool = False) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), 0o600, dir_fd=root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _path(kind: str, name: str) -> str:
    return f"{kind}/{name[:2]}/{name}.json"


def _digest(kind: str, name: str, content: bytes) -> bytes:
    return hashlib.sha256(f"{kind} {name}\n".encode() + content).hexdigest().encode()
