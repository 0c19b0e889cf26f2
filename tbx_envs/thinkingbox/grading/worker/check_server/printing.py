"""What a test prints, kept for people: the first characters of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

_NUM_CHARS = 20_000


class Prints:
    """Stands in for the outputs of a grade."""

    def __init__(self) -> None:
        self._bytes = _Bounded()
        self._file = io.TextIOWrapper(self._bytes, encoding="utf-8", errors="backslashreplace", write_through=True)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` of the test code; whatever file it names, it is kept here."""
        options.pop("file", None)
        print(*values, file=self._file, **options)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """What is printed in other ways, by fixtures or modules, is kept too."""
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
