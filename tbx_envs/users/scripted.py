"""The scripted user: answers what it is asked from its private facts, and nothing else.

It answers a message of the agent as follows, in this order:

1. every topic that is asked for (`Domain.topics`): the fact, or "I don't know" when it has none; and every request to
   confirm something in particular (`Domain.consents`): yes or no, according to its context;
2. with none of these, when the agent asks whether there is anything else *and* has made a call that a tool answered
   since the user's last message: it ends the conversation;
3. otherwise, any other request to confirm (`"default"` of `Domain.consents`): yes or no, according to its context;
4. otherwise it repeats its request.

Wording depends on the seed and the number of the answer only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from tbx_envs.messages import DONE_MARK, Text, ToolResult, Transcript, Turn
from tbx_envs.seeding import rng
from tbx_envs.task import Task
from tbx_envs.users.patterns import first_match

DEFAULT = "default"  # the consent for requests that no other pattern matches
ANYTHING_ELSE = re.compile(r"\b(any\s?thing|something) (else|more)\b|\bwas that all\b|\bis that all\b", re.IGNORECASE)

_UNKNOWN = ("I don't know.", "I'm sorry, I don't know that.", "That I don't know.")
_YES = ("Yes, please go ahead.", "Yes, that is fine.", "Yes, I agree.", "Yes, please do that.")
_NO = (
    "No, I don't want that.",
    "No, please don't do that.",
    "No, I don't agree.",
    "No, thank you, not that.",
)
_UNDECIDED = ("I can't decide that now.", "I have no answer to that.", "I'm not sure about that.")
_REQUEST = ("{request}", "As I said: {request}", "My request is this: {request}", "What I need: {request}")
_THAT_IS_ALL = ("No, that is all.", "No, that's everything, thank you.", "That is all, thank you.")


class Topic(Protocol):
    """As much of `tbx_envs.domains.Topic` as a user needs."""

    @property
    def pattern(self) -> str: ...
    @property
    def phrasings(self) -> tuple[str, ...]: ...


class Vocabulary(Protocol):
    """As much of `tbx_envs.domains.Domain` as a user needs: what it can be asked, and how it answers."""

    @property
    def topics(self) -> Mapping[str, Topic]: ...
    @property
    def consents(self) -> Mapping[str, str]: ...


class ScriptedUser:
    """One user for one episode (`tbx_envs.users.User`).

    Args:
        task: task whose private context the user has.
        domain: topics and consents that the user understands.
        seed: seed of the user's wording.
    """

    timeout_s = 10.0  # it answers in a millisecond

    def __init__(self, task: Task, domain: Vocabulary, seed: int) -> None:
        self._uid = task.uid
        self._context = task.user
        self._domain = domain
        self._seed = seed

    def answer(self, transcript: Transcript) -> str:
        """The answer to the agent's last message; see the module's docstring."""
        said = _last_words(transcript)
        number = sum(isinstance(message, Text) and message.role == "user" for message in transcript)
        random_ = rng(self._seed, "user", number)
        topics = _found(said, {name: topic.pattern for name, topic in self._domain.topics.items()})
        asked = _found(said, self._domain.consents)
        particular = [topic for topic in asked if topic != DEFAULT]
        if topics or particular:
            facts = [self._fact(topic, random_) for topic in topics]
            return " ".join([*facts, *self._decisions(particular, random_)])
        if ANYTHING_ELSE.search(said):
            if _acted_since_last_answer(transcript):
                return f"{random_.choice(_THAT_IS_ALL)} {DONE_MARK}"
        elif asked:
            return " ".join(self._decisions(asked, random_))
        return random_.choice(_REQUEST).format(request=self._context.request)

    def _fact(self, topic: str, random_: random.Random) -> str:
        value = self._context.facts.get(topic)
        if value is None:
            return random_.choice(_UNKNOWN)
        return random_.choice(self._domain.topics[topic].phrasings).replace("{value}", value)

    def _decisions(self, asked: Iterable[str], random_: random.Random) -> Iterable[str]:
        """An answer to each request to confirm; when the answers differ, each names its topic."""
        consents = self._context.consents
        decisions = {topic: consents.get(topic, consents.get(DEFAULT)) for topic in asked}
        if len(set(decisions.values())) <= 1:
            return [random_.choice(_wordings(decision)) for decision in list(decisions.values())[:1]]
        return [
            f"As to the {topic.replace('_', ' ')}: {random_.choice(_wordings(decision))}"
            for topic, decision in decisions.items()
        ]


def _wordings(decision: bool | None) -> tuple[str, ...]:
    return _UNDECIDED if decision is None else _YES if decision else _NO


def _found(said: str, patterns: Mapping[str, str]) -> list[str]:
    """Names whose pattern is found in `said`, in order of first match."""
    starts = {name: start for name, pattern in patterns.items() if (start := first_match(pattern, said)) is not None}
    return sorted(starts, key=lambda name: starts[name])


def _last_words(transcript: Transcript) -> str:
    return next((message.text for message in reversed(transcript) if isinstance(message, Turn)), "")


def _acted_since_last_answer(transcript: Transcript) -> bool:
    """True when the agent made a call that reached a tool after the user's last message."""
    for message in reversed(transcript):
        if isinstance(message, Text) and message.role == "user":
            return False
        if isinstance(message, ToolResult) and message.status != "invalid":
            return True
    return False
