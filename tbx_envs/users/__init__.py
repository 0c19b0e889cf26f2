"""Simulated users, which answer the agent's messages."""

from __future__ import annotations

from typing import Protocol

from tbx_envs.messages import Transcript


class User(Protocol):
    """A simulated user; each episode gets a new one.

    A user may also have a method `conclude()`, which is called at the end of the episode, before the check, and raises
    `UserFault` when what the user said cannot be the ground of a score.
    """

    def answer(self, transcript: Transcript) -> str:
        """The user's answer to the agent's last message; ends with `<DONE>` to end the conversation.

        Raises:
            UserFault: there is no answer; the episode is void.
        """
        ...
