"""Console output of a training run: one line for each step, with headings repeated every few lines.

Programs read the same figures, and more, from `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

# Heading, width, and the text of a figure in the row of metrics.
_COLUMNS: tuple[tuple[str, int, Callable[[Mapping[str, Any], int], str]], ...] = (
    ("step", 9, lambda row, steps: f"{row['step']}/{steps}"),
    ("reward", 7, lambda row, _: f"{row['reward']:.3f}"),
    ("passed", 7, lambda row, _: f"{row['pass_rate']:.1%}"),
    ("groups", 7, lambda row, _: f"{row['groups_used']}/{row['groups_rolled']}"),
    ("replaced", 9, lambda row, _: str(row["groups_replaced"])),
    ("void", 5, lambda row, _: str(row["voids"])),
    ("tokens/s", 9, lambda row, _: f"{row['sampled_tokens_per_s']:,.0f}"),
    ("policy", 8, lambda row, _: f"{row['seconds']['policy']:.2f} s"),
    ("envs", 8, lambda row, _: f"{row['seconds']['environment']:.2f} s"),
    ("update", 8, lambda row, _: f"{row['seconds']['update']:.2f} s"),
    ("logp gap", 9, lambda row, _: "" if row["logp_gap_max"] is None else f"{row['logp_gap_max']:.1e}"),
)
_HEADINGS_EVERY = 20


class StepLines:
    """Prints a line for each row of metrics.

    Args:
        num_steps: number of steps of the whole run.
        file: stream to print on; None is standard output.
    """

    def __init__(self, num_steps: int, file: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._file = file
        self._num_lines = 0

    def say(self, words: str) -> None:
        """Prints a sentence between the lines."""
        print(words, file=self._file, flush=True)  # a log is read while the run goes on

    def step(self, row: Mapping[str, Any]) -> None:
        """Prints the line of one step, and a sentence for anything that needs attention."""
        if self._num_lines % _HEADINGS_EVERY == 0:
            self.say("".join(f"{name:>{width}}" for name, width, _ in _COLUMNS))
        self._num_lines += 1
        self.say("".join(f"{show(row, self._num_steps):>{width}}" for _, width, show in _COLUMNS))
        if not row["updated"]:
            self.say(f"step {row['step']}: no group had mixed outcomes; the update was skipped")
        if row["set_aside"]:
            self.say(f"step {row['step']}: void after all retries, skipped: {', '.join(row['set_aside'])}")
