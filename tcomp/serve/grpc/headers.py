"""Headers of calls, as HTTP/2 compresses them (HPACK, RFC 7541)."""

from __future__ import annotations

from collections.abc import Mapping

from hpack import Decoder

_KNOWN = 4  # blocks that a connection remembers
_SHORT = 1 << 10  # bytes of a block that is remembered


class HeaderDecoder:
    """The headers of one connection. A client sends the same few bytes for every call, once both sides have its fields in their tables:
    what they mean is remembered until a block changes the table."""

    def __init__(self, limit: int) -> None:
        """`limit`: the most bytes of the headers of one call."""
        self._decoder = Decoder(max_header_list_size=limit)
        self._known: dict[bytes, Mapping[str, str]] = {}

    def decode(self, block: bytes) -> Mapping[str, str]:
        """The fields of a block. Raises HPACKError, InvalidTableIndex or UnicodeDecodeError for what is none."""
        if (known := self._known.get(block)) is not None:
            return known
        before = self._table()
        headers = {_text(name): _text(value) for name, value in self._decoder.decode(block)}
        after = self._table()
        changed = before[0] is not after[0] or before[1:] != after[1:]
        if changed or len(self._known) == _KNOWN:
            self._known.clear()
        if not changed and len(block) <= _SHORT:
            self._known[block] = headers
        return headers

    def _table(self) -> tuple[object, int, int]:
        """What tells the states of the table apart: its newest entry, how many there are, and how large it may be."""
        table = self._decoder.header_table
        return table.dynamic_entries[0] if table.dynamic_entries else None, len(table.dynamic_entries), table.maxsize


def _text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")
