"""What several processes print, on one console: each line with the name of who wrote it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_LINE = 1 << 16


class PrefixedLines:
    """Writes what one process prints, line by line and at once, each line with its name.

    Progress bars return to the beginning of their line; here that ends it.

    Args:
        name: of the process, as in `[ps 0] `; none for the only one.
        number: of the process, which chooses the colour on a terminal.
    """

    def __init__(self, name: str, number: int, target: TextIO) -> None:
        prefix = f"[{name}] " if name else ""
        if name and target.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._prefix = prefix.encode()
        self._target = target
        self._rest = b""
        self._after_return = False  # the line end \r\n may come in two parts
        self._works = True

    def feed(self, data: bytes) -> bool:
        """Take what the process has written; False if it cannot be passed on any more."""
        if self._after_return and data:
            data = data.removeprefix(b"\n")
            self._after_return = False
        lines = _LINE_END.split(self._rest + data)
        self._after_return = self._after_return or data.endswith(b"\r")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return self._works

    def end(self) -> None:
        """Write the last line, if it has no end."""
        self._write([self._rest] if self._rest else [])
        self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            self._target.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._target.flush()
        except OSError:  # the reader has gone, as in `hvps launch ... | head`
            self._works = False
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._target.fileno())
