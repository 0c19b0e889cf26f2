"""Simulated users: who answers the agent's messages."""

from __future__ import annotations

from typing import Protocol

from tbx_envs.messages import Transcript


class User(Protocol):
    """Answers the agent; made anew for each episode."""

    def answer(self, transcript: Transcript) -> str:
        """What the user says to the agent's last message; ends with `<DONE>` to end the conversation.

        Raises:
            UserFault: no answer could be made; the episode is void.
        """
        ...
