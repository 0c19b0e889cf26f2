"""Captures the beginning of what a test prints, for people."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

_NUM_CHARS = 20_000


class Prints:
    """Replaces stdout and stderr of a grade."""

    def __init__(self) -> None:
        self._bytes = _Bounded()
        self._file = io.TextIOWrapper(self._bytes, encoding="utf-8", errors="backslashreplace", write_through=True)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` of the test code; its output is captured here whatever `file` it names."""
        options.pop("file", None)
        print(*values, file=self._file, **options)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Also captures what fixtures and modules print in other ways."""
        with contextlib.redirect_stdout(self._file), contextlib.redirect_stderr(self._file):
            yield

    def text(self) -> str:
        text = self._bytes.getvalue().decode("utf-8", "replace")[:_NUM_CHARS]
        return text + (f"\n[{self._bytes.dropped} bytes more were printed]" if self._bytes.dropped else "")


class _Bounded(io.BytesIO):
    """Keeps the beginning of what is written and counts the rest."""

    dropped = 0

    def write(self, data: Any) -> int:
        kept = bytes(data)[: max(0, _NUM_CHARS - self.tell())]
        self.dropped += len(data) - len(kept)
        super().write(kept)
        return len(data)
