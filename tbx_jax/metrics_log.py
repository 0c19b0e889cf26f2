"""Metrics of a run as JSON lines, one for each step, in a file that a killed run leaves readable.

A line is written and flushed before the checkpoint of its step, and a resumed run first drops the lines after its
checkpoint. The invariant: at the end every step has exactly one line.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class MetricsLog:
    """The file, open for appending.

    Args:
        path: path of the file; created if missing.
        last_step: last step whose line is kept; lines of later steps, and an incomplete line, are dropped first.
    """

    def __init__(self, path: pathlib.Path, *, last_step: int) -> None:
        rows = [row for row in read_metrics(path) if row["step"] <= last_step] if path.exists() else []
        kept = path.with_suffix(".kept")
        kept.write_text("".join(_line(row) for row in rows), encoding="utf-8")
        os.replace(kept, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends the line of step `row["step"]`."""
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without an incomplete last line (of a run that was killed while writing it)."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
