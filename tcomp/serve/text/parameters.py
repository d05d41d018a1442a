"""What clients may ask of texts, by OpenAI's names; whatever has no effect here is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tcomp.generation import Generator, Grammar, Request, Sampling
from tcomp.serve.refusals import Refusal, bad_request

T = TypeVar("T")
_COMPLETION_TOKENS = 16  # the default of OpenAI's completions
_MOST_TEXTS = 128  # of one request
_MOST_STOPS = 16  # strings that end a text
_MOST_TOP = 20  # tokens whose probabilities are returned
_NEUTRAL: dict[str, tuple[object, ...]] = {  # values that ask for nothing; others are refused
    "best_of": (1,), "echo": (False,), "store": (False,), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"),
    "modalities": (["text"],), "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True, False),
}  # fmt: skip
_IGNORED = ("user", "safety_identifier", "prompt_cache_key", "metadata")  # who asks, and what for


def parameter_error(name: str, what: str, why: str = "") -> Refusal:
    """Status 400, with the name of the parameter."""
    return bad_request(f"the parameter `{name[:60]}` {what}", where=name[:60], why=why)


class _Fields:
    """An object of JSON, whose fields are taken out one by one."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {str(name): value for name, value in body.items() if value is not None}

    def take(self, name: str, kinds: type | tuple[type, ...], default: T) -> Any | T:
        """The value of a field, of one of these types."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            names = ", ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise parameter_error(name, "has a wrong type", f"it is {type(value).__name__}, not {names}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self.take(name, (int, float), default)
        if not low <= value <= high:
            raise parameter_error(name, "is out of range", f"it is {value:g}, not from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.take(name, int, default)
        if value is not None and not low <= value <= high:
            raise parameter_error(name, "is out of range", f"it is {value}, not from {low} to {high}")
        return value

    def end(self) -> None:
        """Raises Refusal for a field that nobody took, unless it asks for nothing."""
        for name, value in self._left.items():
            if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
                raise parameter_error(name, "is not supported" if name not in _NEUTRAL else "is not supported with this value")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for texts: `requests`, and how they are returned. `logprobs`: whether those of tokens are."""

    requests: tuple[Request, ...]
    stream: bool
    usage: bool
    logprobs: bool


def model_name(body: Mapping[str, Any]) -> str:
    """The model that a request names. Raises Refusal."""
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise parameter_error("model", "is missing", "GET /v1/models lists them")
    return name


def completion(body: Mapping[str, Any], generator: Generator) -> Asked:
    """A request for /v1/completions. Raises Refusal, or InputError for prompts that do not fit."""
    fields = _Fields(body)
    given = fields.take("prompt", (str, list), "")
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = [_prompt(prompt) for prompt in (given if several else [given])]
    top = fields.integer("logprobs", None, 0, _MOST_TOP)
    most = fields.integer("max_tokens", _COMPLETION_TOKENS, 0, 1 << 31)
    assert most is not None
    return _asked(fields, generator, prompts, most, top)


def chat(body: Mapping[str, Any], generator: Generator) -> Asked:
    """A request for /v1/chat/completions. Raises as `completion`."""
    fields = _Fields(body)
    messages = [_message(message) for message in fields.take("messages", list, [])]
    if not messages:
        raise parameter_error("messages", "is missing")
    logprobs, top = fields.take("logprobs", bool, False), fields.integer("top_logprobs", None, 0, _MOST_TOP)
    if top is not None and not logprobs:
        raise parameter_error("top_logprobs", "needs `logprobs`")
    most = fields.integer("max_completion_tokens", fields.integer("max_tokens", None, 1, 1 << 31), 1, 1 << 31)
    most = generator.context if most is None else most
    return _asked(fields, generator, [generator.chat_prompt(messages)], most, (top or 0) if logprobs else None)


def _asked(fields: _Fields, generator: Generator, prompts: list[str | list[int]] | list[list[int]], most: int, top: int | None) -> Asked:
    fields.take("model", str, "")
    each = fields.integer("n", 1, 1, _MOST_TEXTS) or 1
    if each * len(prompts) > _MOST_TEXTS:
        raise parameter_error("n", "is out of range", f"a request may have {_MOST_TEXTS} texts")
    given: Any = fields.take("stop", (str, list), [])
    stop: list[Any] = [given] if isinstance(given, str) else given
    if len(stop) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise parameter_error("stop", "is wrong", f"up to {_MOST_STOPS} strings can end a text")
    seed = fields.integer("seed", None, -(1 << 63), (1 << 63) - 1)
    how: dict[str, Any] = {
        "temperature": fields.number("temperature", 1.0, 0, 100),
        "top_p": fields.number("top_p", 1.0, 0, 1),
        "top_k": max(0, fields.integer("top_k", 0, -1, 1 << 31) or 0),
        "min_p": fields.number("min_p", 0.0, 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 1.0, 1e-6, 1e6),
        "presence_penalty": fields.number("presence_penalty", 0.0, -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, -2, 2),
        "bias": _bias(fields.take("logit_bias", dict, {})),
    }
    grammar = _grammar(fields.take("response_format", dict, {}))
    stream, options = fields.take("stream", bool, False), _Fields(fields.take("stream_options", dict, {}))
    usage = options.take("include_usage", bool, False)
    options.end()
    fields.end()
    requests = [
        generator.request(prompt, most, Sampling(**how, seed=None if seed is None else (seed + number) % (1 << 64)), stop, top, grammar)
        for prompt in prompts
        for number in range(each)  # texts of one prompt are to differ
    ]
    return Asked(tuple(requests), stream, usage, top is not None)


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < 1 << 31 for t in prompt)):
        return prompt
    raise parameter_error("prompt", "is wrong", "it is a string or a list of tokens, or a list of such")


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise parameter_error("messages", "is wrong", "a message is an object")
    fields = {name: value for name, value in message.items() if value is not None}
    if unknown := [name for name in fields if name not in ("role", "content", "name")]:
        raise parameter_error(f"messages[].{unknown[0]}", "is not supported")
    content = fields.get("content", "")
    if isinstance(content, list):
        if other := [p for p in content if not (isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str))]:
            kind = other[0].get("type") if isinstance(other[0], dict) else type(other[0]).__name__
            raise parameter_error("messages[].content", f"of the type {kind!r:.40} is not supported", "text is")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(fields.get("role"), str) or not isinstance(fields.get("name", ""), str):
        raise parameter_error("messages", "is wrong", "a message has a role and content, both of them strings")
    return {**fields, "content": content}


def _grammar(form: Mapping[str, Any]) -> Grammar | None:
    """What `response_format` asks for."""
    fields = _Fields(form)
    kind, given = fields.take("type", str, "text"), _Fields(fields.take("json_schema", dict, {}))
    fields.end()
    schema = given.take("schema", dict, None)
    for name, kinds in {"name": str, "description": str, "strict": bool}.items():  # schemas are kept to strictly, always
        given.take(name, kinds, None)
    given.end()
    if kind not in ("text", "json_object", "json_schema") or (schema is None) == (kind == "json_schema"):
        raise parameter_error("response_format", "is not supported", "text, json_object, and json_schema with a schema are")
    if kind == "text":
        return None
    return Grammar.json_schema({"type": "object"} if schema is None else schema)


def _bias(given: Mapping[str, Any]) -> dict[int, float]:
    found = {}
    for token, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
        if not number or not (token.isascii() and token.isdigit()) or len(token) > 10:
            raise parameter_error("logit_bias", "is wrong", "it is an object of tokens (their numbers) and numbers from -100 to 100")
        found[int(token)] = float(value)
    return found
