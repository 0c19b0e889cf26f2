"""`DatasetTask`: one task of a ThinkingBox dataset, hydrated: everything an episode needs, nothing left to look up.

A dataset describes a task in several files (test file, scenario, agent, conftest, history); the loader
(`tbx_envs.thinkingbox.dataset.hydrate`) puts them together. What stands here is what the original calls a hydrated
test case, in our words.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from tbx_envs.messages import Message
from tbx_envs.task import ExpectedCall, Limits


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """A tool of a server that the scenario offers to the agent.

    Attributes:
        name: of the tool.
        description: instead of the server's; None keeps it.
        argument_descriptions: argument -> description instead of the server's.
        direct_response: a `str.format` template that is filled with the JSON object of the result and said to the
            user; None: nothing is.
        ends_turn: a call of it is not executed; it ends the conversation.
    """

    name: str
    description: str | None = None
    argument_descriptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    direct_response: str | None = None
    ends_turn: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltinTool:
    """A tool that no server has: the agent file describes it.

    Attributes:
        input_schema: JSON schema of its arguments.
        direct_response, ends_turn: as in `ToolChoice`.
    """

    name: str
    description: str
    input_schema: Mapping[str, Any]
    direct_response: str | None = None
    ends_turn: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DatasetTask:
    """One task of a ThinkingBox dataset.

    Attributes:
        uid: `<file name>:<function>`, `sandbox_consulting_group1.py:test_a`.
        dataset: name of the registered dataset.
        path, line: where the test stands, for messages.
        scenario, agent: names of the files it uses.
        split: `heldout` for a task of the benchmark's list, else `train`.
        query: the user's first message (before `format_query`).
        user_context: the simulated user's private context; None or empty: there is no user after the first message.
        system_instructions: of the agent file.
        bot_instructions: scenario's and test's, joined; "" when there are none.
        test_instructions: the test's own part of `bot_instructions` (what `format_query` may fill), or None.
        format_query: query, user context and test instructions are `str.format` templates of the init result.
        servers: names, in registration order: those of the scenario's world state, then those only in the test's init.
        init: server -> its merged configuration, given to `__reserved__init`.
        tools: what the scenario offers, duplicates merged (the last entry of a name wins).
        builtin_tools: of the agent, before the servers' tools.
        history: messages before the query; their calls are executed again when the episode begins.
        fixtures: name -> `{"type": dotted path, **arguments}`, conftest's and scenario's merged.
        test_code: what the check executes (contract, section a).
        limits: `agent_turns` counts as the original's `max_agent_sim_turns`.
        expected_calls: the golden calls of all servers, in order; empty when there are none.
        expected_servers: the server of each expected call.
        tags: as written, module's and function's.
        clock: the moment that the servers' clock shows (`metadata.clock` of test or scenario); None: as the command
            line says.
        clock_runs: the clock goes on from that moment; otherwise it stands still.
        metadata: scenario's metadata.
    """

    uid: str
    dataset: str
    path: str
    line: int
    scenario: str
    agent: str
    split: Literal["train", "heldout"]
    query: str
    user_context: str | None
    system_instructions: str
    bot_instructions: str
    test_instructions: str | None
    format_query: bool
    servers: tuple[str, ...]
    init: Mapping[str, Mapping[str, Any]]
    tools: tuple[ToolChoice, ...]
    builtin_tools: tuple[BuiltinTool, ...]
    history: tuple[Message, ...]
    fixtures: Mapping[str, Mapping[str, Any]]
    test_code: str
    limits: Limits
    expected_calls: tuple[ExpectedCall, ...]
    expected_servers: tuple[str, ...]
    tags: tuple[str, ...]
    clock: datetime.datetime | None
    clock_runs: bool
    metadata: Mapping[str, Any]

    @property
    def domain(self) -> str:
        return self.scenario

    @property
    def family(self) -> str:
        """The scenario: tasks of one business belong together, whatever files they stand in."""
        return self.scenario

    @property
    def idle_passes(self) -> str | None:
        """A dataset does not say for which of its tasks doing nothing is right."""
        return None

    @property
    def version(self) -> int:
        return 1


def content_key(task: DatasetTask) -> str:
    """SHA-256 (hex) over what makes the task itself: first message, user context and init configuration.

    Neither names nor files are in it, so a renamed or moved copy has the same key. The guard of the benchmark
    compares it.
    """
    return _sha256([task.query, task.user_context, task.init])


def content_hash(task: DatasetTask) -> str:
    """SHA-256 (hex) over the whole task: a change of anything that could change an outcome is noticed."""
    record = {
        field.name: getattr(task, field.name)
        for field in dataclasses.fields(task)
        if field.name not in ("dataset", "path", "line")
    }
    return _sha256(record)


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_jsonable)
    return hashlib.sha256(text.encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a task holds {value!r}, which has no JSON form")
