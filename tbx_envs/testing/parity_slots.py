"""A toy in place of real environments: episodes of two turns that a policy of any size can learn in seconds.

The user says a letter, and "again" after the first turn; the episode ends with the second turn, or with one that was
cut off. It passes when the last turn begins with a character of even code point, as random bytes do about one time in
four. A task is `parity/<letter>/<number>`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tbx_envs.episode import CheckReport, Episode, Fault, FinishReason
from tbx_envs.errors import ActionError
from tbx_envs.messages import Message, Text, Turn
from tbx_envs.vector import EpisodeSlots, SlotOutcome


@dataclasses.dataclass
class _Parity:
    uid: str
    seed: int
    said: list[Message]
    reason: FinishReason | None = None
    fault: Fault | None = None


class ParitySlots(EpisodeSlots):
    """The toy behind the interface of `EpisodeSlots`.

    Args:
        num_slots: number of slots.
        breaks: (uid, seed) -> True for episodes that a fault voids at their first turn.
    """

    def __init__(self, num_slots: int, breaks: Callable[[str, int], bool] = lambda uid, seed: False) -> None:
        super().__init__(num_slots)
        self._breaks = breaks
        self._episodes: dict[int, _Parity] = {}

    def start(self, slot: int, uid: str, seed: int) -> SlotOutcome:
        self._episodes[slot] = episode = _Parity(uid, seed, [Text("user", uid.split("/")[1])])
        return SlotOutcome(tuple(episode.said), False, None)

    def advance(self, actions: Mapping[int, str | Turn]) -> dict[int, SlotOutcome]:
        return {slot: self._step(self._episodes[slot], action) for slot, action in actions.items()}

    def _step(self, episode: _Parity, action: str | Turn) -> SlotOutcome:
        if episode.reason is not None or episode.fault is not None:
            raise ActionError(f"{episode.uid}: a turn after the end; start() the slot first.")
        if self._breaks(episode.uid, episode.seed):
            episode.fault = Fault("tool", f"{episode.uid} was to break.")
            return SlotOutcome((), True, episode.fault)
        episode.said.append(action if isinstance(action, Turn) else Turn(text=action))
        if isinstance(action, Turn) and action.truncated:
            episode.reason = FinishReason.TRUNCATED
        elif len(episode.said) > 2:
            episode.reason = FinishReason.DONE
        else:
            episode.said.append(Text("user", "again"))
            return SlotOutcome((episode.said[-1],), False, None)
        return SlotOutcome((), True, None)

    def tools(self, slot: int) -> list[dict[str, Any]]:
        return []

    def episode(self, slot: int, attempt: int) -> Episode:
        episode = self._episodes[slot]
        turns = [message for message in episode.said if isinstance(message, Turn)]
        report = None
        if episode.reason is not None:
            begins = turns[-1].text[:1]
            report = CheckReport(passed=begins != "" and ord(begins) % 2 == 0, check="parity")
        return Episode(
            uid=episode.uid,
            attempt=attempt,
            seed=episode.seed,
            transcript=tuple(episode.said),
            finish_reason=episode.reason,
            report=report,
            reward=None if report is None else float(report.passed),
            fault=episode.fault,
            seconds={},
            usage={"agent_turns": len(turns), "tool_calls": 0},
        )

    def close(self) -> None:
        self._episodes.clear()
