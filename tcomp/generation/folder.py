"""What the folder of a language model says besides its weights: its tokenizer, the tokens that end a text, how a chat is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcomp.errors import ArtifactError, InputError
from tcomp.generation.chat_template import ChatTemplate
from tcomp.runtime.schema import load_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_TEMPLATE, _TOKENIZER_CONFIG, _CONFIGS = "chat_template.jinja", "tokenizer_config.json", ("generation_config.json", "config.json")
TEXT_FILES = (TOKENIZER, _TOKENIZER_CONFIG, _TEMPLATE, *_CONFIGS)  # all that text needs of a folder besides the model
_MAX_BYTES = 1 << 20  # of a file of JSON, or of a template


def read_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file tokenizer.json. Raises `InputError`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("text needs a package to become tokens", why=str(error), hint="pip install 'tcomp[generate]'") from error
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # noqa: BLE001  the package raises nothing more special
        raise InputError("the tokenizer cannot be read", where=os.fspath(path), why=str(error)[:200]) from None


def end_tokens(folder: Path) -> list[int]:
    """The tokens that end a text, as generation_config.json or config.json say; none where they do not."""
    return _tokens(folder, "eos_token_id")


def start_tokens(folder: Path) -> list[int]:
    """Those with which the text of a model with an encoder begins, likewise; 0, as T5 has it, where they do not say."""
    return _tokens(folder, "decoder_start_token_id") or [0]


def features_config(folder: Path) -> dict[str, Any]:
    """What preprocessor_config.json says; {} where there is none."""
    return _object(folder / "preprocessor_config.json")


def _tokens(folder: Path, key: str) -> list[int]:
    for name in _CONFIGS:
        value = _object(folder / name).get(key)
        listed = value if isinstance(value, list) else [value]
        if tokens := [t for t in listed if isinstance(t, int) and not isinstance(t, bool)]:
            return tokens
    return []


def chat_template(folder: Path) -> ChatTemplate | None:
    """That of chat_template.jinja or tokenizer_config.json; None where there is none. Raises `InputError` for one that cannot be read."""
    config = _object(folder / _TOKENIZER_CONFIG)
    source = _text(folder / _TEMPLATE) or config.get("chat_template")
    if isinstance(source, list):  # several with names
        source = next((s.get("template") for s in source if isinstance(s, dict) and s.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items() if key.endswith("_token")}
    return ChatTemplate(source, {key: value for key, value in names.items() if isinstance(value, str)})


def _text(path: Path) -> str:
    """What a file holds; "" where there is none, or no text of the size that such files have."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        return data.decode() if len(data) <= _MAX_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _object(path: Path) -> dict[str, Any]:
    """The object of JSON in a file; {} where there is none."""
    try:
        found = load_json(_text(path).encode(), path.name)
    except ArtifactError:
        return {}
    return found if isinstance(found, dict) else {}
