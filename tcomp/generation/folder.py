"""What the folder of a language model says besides its weights: its tokenizer, the tokens that end a text, how a chat is written."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.schema import load_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_TEMPLATE, _TOKENIZER_CONFIG, _CONFIGS = "chat_template.jinja", "tokenizer_config.json", ("generation_config.json", "config.json")
TEXT_FILES = (TOKENIZER, _TOKENIZER_CONFIG, _TEMPLATE, *_CONFIGS)  # all that text needs of a folder besides the model
_MAX_BYTES = 1 << 20  # of a file of JSON, or of a template
_MAX_PROMPT = 1 << 22  # characters that a template may write


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
    for name in _CONFIGS:
        value = _object(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        if tokens := [t for t in listed if isinstance(t, int) and not isinstance(t, bool)]:
            return tokens
    return []


class ChatTemplate:
    """How the messages of a chat become one text: a template of Jinja, in whose sandbox it reaches nothing but what it is given."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """`names` are special tokens, bos_token and the like. Raises `InputError` for a template that is none."""
        try:
            from jinja2 import TemplateError
            from jinja2.exceptions import SecurityError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise InputError("chats need a package to become text", why=str(error), hint="pip install 'tcomp[generate]'") from error

        class Sandbox(ImmutableSandboxedEnvironment):
            """Also without products, which make long strings of short templates."""

            intercepted_binops = frozenset({"*", "**", "%"})

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                if not all(isinstance(x, int) and abs(x) < 1 << 31 for x in (left, right)) or operator == "**":
                    raise SecurityError(f"`{operator}` of {type(left).__name__} and {type(right).__name__}")
                return super().call_binop(context, operator, left, right)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(str(message)[:200])

        sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        sandbox.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        sandbox.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
        self._names = dict(names)
        try:
            self._template = sandbox.from_string(source)
        except Exception as error:  # noqa: BLE001  whatever the package makes of text that is not a template
            raise InputError("the template of chats cannot be read", why=str(error)[:200]) from None

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for an answer to messages, each with a `role` and `content`. Raises `InputError` where the template refuses them."""
        parts, size = [], 0
        try:
            for part in self._template.generate(messages=list(messages), add_generation_prompt=True, tools=None, **self._names):
                parts.append(part)
                if (size := size + len(part)) > _MAX_PROMPT:
                    raise InputError("the template of chats writes too much", why=f"more than {_MAX_PROMPT} characters")
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  templates of unknown origin may raise whatever Python does
            raise InputError("the template of chats refuses these messages", why=str(error)[:200]) from None
        return "".join(parts)


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
