"""How the messages of a chat become one text: the template of a model, in a process that is ended where it takes too long."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcomp.errors import InputError

_SECONDS = 5.0  # that a template may take; those of models take less than a millisecond
_MEMORY = 1 << 30  # bytes of its process
_PROGRAM = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A template of Jinja, which reaches nothing but what it is given (see `template_process`). Any thread may use it."""

    def __init__(self, source: str, names: Mapping[str, str], seconds: float = _SECONDS) -> None:
        """`names` are special tokens, bos_token and the like. Raises `InputError` for what is not a template."""
        if importlib.util.find_spec("jinja2") is None:
            raise InputError("chats need a package to become text", why="there is no jinja2", hint="pip install 'tcomp[generate]'")
        self._seconds = seconds
        self._first = json.dumps({"source": source, "names": dict(names), "seconds": seconds, "memory": _MEMORY})
        self._one_at_a_time = threading.Lock()
        self._process: _Process | None = None
        with self._one_at_a_time:
            self._started()

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for an answer to messages, each with a `role` and `content`. Raises `InputError` where the template refuses them, or
        takes too long or too much memory."""
        try:
            line = json.dumps({"messages": list(messages)})
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError("the messages of a chat are not JSON", why=str(error)[:200]) from None
        with self._one_at_a_time:
            process = self._started()
            answer = process.ask(line)
            if answer is None:
                self._process = None
        what = "the template of chats refuses these messages"
        if answer is None:
            raise InputError(what, why=process.death(self._seconds))
        if "refused" in answer:
            raise InputError(what, why=answer["refused"])
        return answer["text"]

    def _started(self) -> _Process:
        """The process, which has read the template."""
        if self._process is None:
            process = _Process()
            weakref.finalize(self, process.end)
            answer = process.ask(self._first)
            if answer is None or "refused" in answer:
                why = process.death(self._seconds) if answer is None else answer["refused"]
                process.end()
                raise InputError("the template of chats cannot be read", why=why)
            self._process = process
        return self._process


class _Process:
    """One process of `template_process`. It ends when its input does."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-P", str(_PROGRAM)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def ask(self, line: str) -> dict[str, str] | None:
        """The answer; None where the process has died, which it does in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, str] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            return None
        return answer

    def death(self, seconds: float) -> str:
        """Why it died."""
        self.end()
        status = self._process.returncode
        return f"it takes more than {seconds:g} s" if status == -signal.SIGALRM else f"its process ended with exit status {status}"

    def end(self) -> None:
        """End the process, and wait for that."""
        for file in (self._process.stdin, self._process.stdout):
            if file is not None:
                try:
                    file.close()
                except OSError:  # what is left in the buffer cannot be written
                    pass
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
