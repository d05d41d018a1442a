"""The values of a config.json, checked one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcomp.errors import ImportModelError, UnsupportedError

MAX_CONFIG_BYTES = 1 << 20
MAX_SIZE = 1 << 24  # of anything that is counted: of more, a file is not a config
MAX_LAYERS = 1 << 10  # each of them has inputs and outputs of the graph, before any weight is looked for
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu")


@dataclass(frozen=True, slots=True)
class Values:
    """What a config gives, those of `null` left out, and the file that it is of."""

    given: Mapping[str, Any]
    where: str

    def number(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A size. Raises `ImportModelError` for what is no number from 1 to `most`."""
        value = self.given.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ImportModelError(f"`{name}` is {value!r:.40}", where=self.where, why=f"a number from 1 to {most} is needed")
        return value

    def real(self, name: str, default: float | None = None, source: Mapping[str, Any] | None = None) -> float:
        """A number, of another object of the file if there is a `source`. Raises `ImportModelError` for what is none, or less than 0."""
        value = (self.given if source is None else source).get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e12:
            raise ImportModelError(f"`{name}` is {value!r:.40}", where=self.where, why="a positive number is needed")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether it is true."""
        return self.given.get(name, default) is True

    def activation(self, name: str, default: str) -> str:
        """One of ACTIVATIONS. Raises `UnsupportedError` for another one."""
        value = self.given.get(name, default)
        if value not in ACTIVATIONS:
            raise UnsupportedError(f"the activation {value!r:.40}", where=self.where, hint=f"{', '.join(ACTIVATIONS)} are supported")
        return str(value)


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ImportModelError` where there is none."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ImportModelError("this is not a config", where=str(path), why=f"it has more than {MAX_CONFIG_BYTES} bytes")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ImportModelError("the config cannot be read", where=str(path), why=str(error)) from None
    if not isinstance(found, dict):
        raise ImportModelError("the config is not a JSON object", where=str(path))
    return found
