"""Task: one assignment, complete and frozen.

A task is identified by its `uid` and pinned by its `content_hash`: everything that could change an outcome (text,
world, expected calls, limits, the user's private context) is in the hash, so that no change goes unnoticed.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

Split = Literal["train", "heldout"]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedCall:
    """One call of the reference solution, with arguments as an agent would send them."""

    tool: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class UserContext:
    """What the simulated user knows and wants; never shown to the agent.

    Attributes:
        request: the user's request in one sentence; repeated when nothing the agent said can be answered.
        facts: topic (a key of `Domain.topics`) -> bare value given when the agent asks for it
            (`"birth_date": "1984-03-12"`). Any other topic is answered with "I do not know".
        consents: topic -> True confirms, False declines. The key `"default"` answers any other request to confirm.
    """

    request: str
    facts: Mapping[str, str]
    consents: Mapping[str, bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode.

    Attributes:
        user_turns: maximum number of answers of the simulated user (the first message is not counted).
        agent_turns: maximum number of actions of the agent in the whole episode: a turn's words count one, its calls
            together one, and a tool's direct response one.
    """

    user_turns: int = 10
    agent_turns: int = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One assignment.

    Attributes:
        uid: `<domain>/<family>/<number>`.
        domain: name of the domain (`tbx_envs.domains`).
        family: kind of assignment.
        version: version of the domain's tasks, raised whenever text or grading of any of them changes.
        split: `train` or `heldout`.
        query: first message of the user.
        user: private context of the simulated user.
        world: table name -> rows (column -> JSON value) of the initial database, in insertion order.
        expected_calls: calls that turn the initial world into the expected one.
        limits: limits of an episode.
        idle_passes: reason why doing nothing is right for this task; None where it is not.
        labels: facts about the task for reports and scripted agents; never read by environment or check.
    """

    uid: str
    domain: str
    family: str
    version: int
    split: Split
    query: str
    user: UserContext
    world: Mapping[str, tuple[Mapping[str, Any], ...]]
    expected_calls: tuple[ExpectedCall, ...]
    limits: Limits = Limits()
    idle_passes: str | None = None
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class AnyTask(Protocol):
    """What all tasks have in common: ours (`Task`) and a dataset's (`DatasetTask`). Attributes as in `Task`."""

    @property
    def uid(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def split(self) -> Split: ...
    @property
    def query(self) -> str: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def expected_calls(self) -> tuple[ExpectedCall, ...]: ...
    @property
    def idle_passes(self) -> str | None: ...


def content_hash(task: Task) -> str:
    """SHA-256 (hex) over the canonical JSON of the whole task."""
    record = dataclasses.asdict(task)
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_jsonable)
    return hashlib.sha256(text.encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a task holds {value!r}, which has no JSON form; store it as text or a number")
