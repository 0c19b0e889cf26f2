"""`DatasetTask`: one task of a ThinkingBox dataset with everything that an episode needs.

A dataset describes a task in several files (test file, scenario, agent, conftest, history), which the loader
(`tbx_envs.thinkingbox.dataset.hydrate`) combines. The original calls such a record a hydrated test case.
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
        name: tool name.
        description: description that replaces the server's; None keeps the server's.
        argument_descriptions: argument -> description that replaces the server's.
        direct_response: `str.format` template that is filled with the JSON object of the result and said to the user;
            None for no direct response.
        ends_turn: True when a call is not executed and ends the conversation.
    """

    name: str
    description: str | None = None
    argument_descriptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    direct_response: str | None = None
    ends_turn: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltinTool:
    """A tool that no server has, described in the agent file.

    Attributes:
        name: tool name.
        description: description of the tool.
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
        uid: task id, `<file name>:<function>`, such as `sandbox_consulting_group1.py:test_a`.
        dataset: name of the registered dataset.
        path, line: place of the test, for messages.
        scenario, agent: names of the files that it uses.
        split: `heldout` for a task of the benchmark's list, else `train`.
        query: the user's first message (before `format_query`).
        user_context: the simulated user's private context; None or empty for no user after the first message.
        system_instructions: instructions of the agent file.
        bot_instructions: instructions of scenario and test, joined; "" when there are none.
        test_instructions: the test's own part of `bot_instructions` (which `format_query` may fill), or None.
        format_query: True when query, user context and test instructions are `str.format` templates, filled with the
            init result.
        servers: server names in registration order: the scenario's world state, then those only in the test's init.
        init: server -> merged configuration for `__reserved__init`.
        tools: tools that the scenario offers; of entries with the same name the last one.
        builtin_tools: tools of the agent, which come before the servers' tools.
        history: messages before the query; their calls are executed again when the episode starts.
        fixtures: name -> `{"type": dotted path, **arguments}`, of conftest files and scenario, merged.
        test_code: code that the check executes (contract, section a).
        limits: limits of the episode; `agent_turns` counts like the original's `max_agent_sim_turns`.
        expected_calls: golden calls of all servers, in order; empty when there are none.
        expected_servers: server of each expected call.
        tags: tags as written, of scenario and test.
        clock: moment of the servers' clock (`metadata.clock` of test or scenario); None takes the command line's.
        clock_runs: True when the clock runs from that moment; otherwise it stands still.
        metadata: metadata of the scenario and the test.
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
        """The scenario: tasks of one business belong together, even in different files."""
        return self.scenario

    @property
    def idle_passes(self) -> str | None:
        """A reason where the task says that no call is right: its `golden_test_case` lists none. None where it has
        calls, and where it has no golden case at all."""
        goldens = (config.get("golden_test_case") for config in self.init.values())
        states_calls = any(isinstance(golden, Mapping) and "tool_interactions" in golden for golden in goldens)
        return "its golden_test_case makes no call" if states_calls and not self.expected_calls else None

    @property
    def version(self) -> int:
        return 1


def content_hash(task: DatasetTask) -> str:
    """SHA-256 (hex) of the whole task: it changes with anything that could change an outcome."""
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
