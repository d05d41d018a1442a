"""What a fuzz target is: what is damaged, how, and what reads the result."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory


class Target(ABC):
    """A reader."""

    @cached_property
    @abstractmethod
    def corpus(self) -> Sequence[bytes]:
        """What is damaged: valid files or texts."""

    @abstractmethod
    def damage(self, rng: Random, data: bytes) -> bytes: ...

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Raises a TcompError, or works."""

    def is_case(self, data: bytes) -> bool:
        """Whether damage may make this."""
        return True

    def show(self, data: bytes) -> str:
        """A case as a person reads it."""
        return repr(data)

    def case(self, rng: Random) -> bytes:
        return self.damage(rng, rng.choice(self.corpus))


class Folders(Target):
    """A reader of files that belong together: a case is all of them, by name."""

    @cached_property
    def _temporary(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="tcomp-fuzz-")  # removed with this object

    @property
    def folder(self) -> Path:
        """Where files are written. The corpus is made with it, before a process is forked, so that the first process removes it."""
        return Path(self._temporary.name)

    def is_case(self, data: bytes) -> bool:
        return data[:1] == b"{" and data[-1:] == b"}"

    def write(self, data: bytes) -> None:
        """The files of a case."""
        for name, content in unpacked(data).items():
            (self.folder / name).write_bytes(content)


def packed(files: Mapping[str, bytes]) -> bytes:
    """Files as one text: JSON, with a character for each byte."""
    return json.dumps({name: content.decode("latin-1") for name, content in files.items()}).encode()


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files in a text that `packed` made."""
    return {name: content.encode("latin-1") for name, content in json.loads(data).items()}
