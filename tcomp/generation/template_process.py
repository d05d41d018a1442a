"""A program that writes chats as a template of Jinja says: in a process of its own, which can be ended.

Jinja's sandbox keeps a template from everything but what it is given, not from computing for ever or doubling a list until memory is full,
also in calls that nothing in the process can interrupt. So an alarm ends the process, and its memory is limited. It imports nothing of
tcomp: a start takes 0.1 s.

Read and written are lines of JSON. First comes {"source", "names", "seconds", "memory"}, then {"messages"} for each chat. The answers are
{"text"}, or {"refused"} with a reason, the first one for the template itself.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

MAX_PROMPT = 1 << 22  # characters that a template may write


class Template:
    """A template in its sandbox."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Raises whatever the package makes of text that is not a template."""
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        self._names, self._template = dict(names), sandbox.from_string(source)

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt. Raises whatever Python does in templates of unknown origin."""
        parts, size = [], 0
        for part in self._template.generate(messages=list(messages), add_generation_prompt=True, tools=None, **self._names):
            parts.append(part)
            if (size := size + len(part)) > MAX_PROMPT:
                raise ValueError(f"it writes more than {MAX_PROMPT} characters")
        return "".join(parts)


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who started this process ends it
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (first["memory"], first["memory"]))

    def told(compute: Any) -> dict[str, str]:
        signal.setitimer(signal.ITIMER_REAL, first["seconds"])  # which ends the process, wherever it is
        try:
            found: dict[str, str] = compute()
        except MemoryError:
            found = {"refused": "it takes too much memory"}
        except Exception as error:  # noqa: BLE001  templates of unknown origin may raise whatever Python does
            found = {"refused": str(error)[:200] or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return found

    def read() -> dict[str, str]:
        made.append(Template(first["source"], first["names"]))
        return {"text": ""}

    made: list[Template] = []
    answer = told(read)
    while True:
        out.write(json.dumps(answer) + "\n")
        out.flush()
        if not made or not (line := sys.stdin.readline()):
            return
        messages = json.loads(line)["messages"]
        answer = told(lambda messages=messages: {"text": made[0].text(messages)})


if __name__ == "__main__":
    _serve()
