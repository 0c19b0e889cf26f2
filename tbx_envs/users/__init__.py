"""Simulated users, which answer the agent's messages."""

from __future__ import annotations

from typing import Protocol

from tbx_envs.messages import Transcript

USER_TIMEOUT_S = 600.0  # for one answer of a user that does not say otherwise


class User(Protocol):
    """A simulated user; each episode gets a new one.

    An answer has a time limit, after which the episode is void: `EpisodeOptions.user_timeout_s`, else the user's own
    attribute `timeout_s` if it has one (None: no limit), else `USER_TIMEOUT_S`. The user answers in a thread that is
    not the caller's.

    A user may also have a method `conclude()`, which is called at the end of the episode, before the check, and raises
    `UserFault` when what the user said cannot be the ground of a score.
    """

    def answer(self, transcript: Transcript) -> str:
        """The user's answer to the agent's last message; ends with `<DONE>` to end the conversation.

        Raises:
            UserFault: there is no answer; the episode is void.
        """
        ...
