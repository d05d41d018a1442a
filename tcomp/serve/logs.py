"""Logs as lines of JSON, for machines that collect them."""

from __future__ import annotations

import datetime
import json
import logging
import sys

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """A record as one object: time (UTC), level, logger, message, and all that was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        fields = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        fields |= {key: value for key, value in vars(record).items() if key not in _PLAIN}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write what this process logs to stderr, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
