"""Metrics of a run as JSON lines, one for each step, in a file that a killed run leaves readable.

A line is written and flushed before the checkpoint of its step, and a resumed run first drops the lines after its
checkpoint. The invariant: at the end every step has exactly one line.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tbx_envs.errors import ConfigError
from tbx_envs.files import append_line, read_records, refuse_record, write_lines

_WHAT = "metrics of a training run"
_TO_DO = "Restore the file from a copy, or choose another output_dir for a new run."


class MetricsLog:
    """The file, to be appended to.

    Args:
        path: path of the file; created if missing.
        last_step: last step whose line is kept; lines of later steps, and an incomplete line, are dropped first.

    Raises:
        ConfigError: lines of steps up to `last_step` are damaged or not there.
    """

    def __init__(self, path: pathlib.Path, *, last_step: int) -> None:
        rows = [row for row in read_metrics(path) if row["step"] <= last_step] if path.exists() else []
        if [row["step"] for row in rows] != list(range(1, last_step + 1)):
            raise ConfigError(
                f"{path}: it has lines of {len(rows)} steps, and the checkpoint is of step {last_step}. {_TO_DO}"
            )
        write_lines(path, map(_line, rows))
        self._path = path

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends the line of step `row["step"]`."""
        append_line(self._path, _line(row))


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without an incomplete last line (of a run that was killed while writing it).

    Raises:
        ConfigError: no such file, or a line that is no row.
    """
    rows = []
    for number, row in read_records(path, _WHAT, to_do=_TO_DO):
        if type(row.get("step")) is not int:
            refuse_record(path, number, _WHAT, f"'step' is {row.get('step')!r}", to_do=_TO_DO)
        try:
            _line(row)  # a resumed run writes the row again
        except ValueError as reason:
            refuse_record(path, number, _WHAT, reason, to_do=_TO_DO)
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False)
