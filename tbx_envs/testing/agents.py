"""An agent with prescribed outcomes, for tests of evaluation runs: it needs no environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from tbx_envs.agents import Attempt
from tbx_envs.episode import CheckReport, Episode, Fault, FinishReason
from tbx_envs.messages import DONE_MARK, Text, Turn

Outcome = Literal["pass", "fail", "void"]


class PrescribedAgent:
    """Ends the n-th try at an attempt as `outcome(uid, attempt, n)` says, n from 0.

    Args:
        outcome: (uid, attempt, n) -> outcome of the try.
        stop_after: number of attempts after which the next one is interrupted (`KeyboardInterrupt`); None is never.

    Attributes:
        asked: attempts made, in order.
    """

    def __init__(self, outcome: Callable[[str, int, int], Outcome], stop_after: int | None = None) -> None:
        self.outcome = outcome
        self.stop_after = stop_after
        self.asked: list[Attempt] = []
        self._tries: Counter[tuple[str, int]] = Counter()

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in order."""
        for attempt in attempts:
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(attempt)
            key = (attempt.uid, attempt.index)
            yield prescribed_episode(attempt, self.outcome(*key, self._tries[key]))
            self._tries[key] += 1


def prescribed_episode(attempt: Attempt, outcome: Outcome) -> Episode:
    """An episode of `attempt` with that outcome."""
    void = outcome == "void"
    passed = outcome == "pass"
    return Episode(
        uid=attempt.uid,
        attempt=attempt.index,
        seed=attempt.seed,
        transcript=(Text("user", "Good morning é"), Turn(text=DONE_MARK)),
        finish_reason=None if void else FinishReason.DONE,
        report=None if void else CheckReport(passed, "state", () if passed else ("a row is missing",)),
        reward=None if void else float(passed),
        fault=Fault("tool", "the tool server is gone") if void else None,
        seconds={"environment": 0.5},
        usage={"agent_turns": 1, "tool_calls": 0, "sampled_tokens": 7},
    )
