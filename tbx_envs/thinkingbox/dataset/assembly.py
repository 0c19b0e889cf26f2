"""Assembles a `DatasetTask` from its parts, which have been read and validated."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from tbx_envs.messages import Message
from tbx_envs.task import ExpectedCall, Limits
from tbx_envs.thinkingbox.dataset.benchmark import benchmark_keys
from tbx_envs.thinkingbox.dataset.file_records import AgentFields, FixtureFields, ScenarioFields, TestFields, ToolFields
from tbx_envs.thinkingbox.dataset.merging import merged_init
from tbx_envs.thinkingbox.dataset.records import BuiltinTool, DatasetTask, ToolChoice
from tbx_envs.thinkingbox.dataset.tags import Tags


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a task.

    Attributes:
        dataset: dataset name.
        uid: task id.
        path, line: place of the test, for messages.
        fields: fields of the test.
        test_code: code that the check executes.
        scenario_name, agent_name: names of the files.
        scenario: fields of the scenario.
        agent: fields of the agent.
        tags: tags of scenario and test, merged.
        fixtures: fixtures of conftest files and scenario, merged.
        history: messages before the query.
    """

    dataset: str
    uid: str
    path: str
    line: int
    fields: TestFields
    test_code: str
    scenario_name: str
    scenario: ScenarioFields
    agent_name: str
    agent: AgentFields
    tags: Tags
    fixtures: Mapping[str, FixtureFields]
    history: tuple[Message, ...]


def assemble(parts: Parts) -> DatasetTask:
    """The task; its split is `heldout` when it is one of the benchmark's.

    Raises:
        ValueError: the parts do not fit together; the message has a line for each problem.
    """
    fields, scenario = parts.fields, parts.scenario
    wrong: list[str] = []
    init = _init(parts, wrong)
    calls = _expected_calls(init, wrong)
    clock, clock_runs = _clock(scenario, fields, wrong)
    _check_tool_names(parts, wrong)
    if wrong:
        raise ValueError("\n".join(wrong))
    task = DatasetTask(
        uid=parts.uid,
        dataset=parts.dataset,
        path=parts.path,
        line=parts.line,
        scenario=parts.scenario_name,
        agent=parts.agent_name,
        split="train",
        query=fields.query,
        user_context=fields.user_context,
        system_instructions=parts.agent.system_instructions,
        bot_instructions=_joined(scenario.bot_instructions, fields.bot_instructions),
        test_instructions=fields.bot_instructions,
        format_query=fields.format_query,
        servers=tuple(init),
        init=init,
        tools=_tools(scenario.tools),
        builtin_tools=tuple(
            BuiltinTool(tool.name, tool.description, tool.input_schema, tool.direct_response, tool.is_end_turn)
            for tool in parts.agent.builtin_tools
        ),
        history=parts.history,
        fixtures={name: fixture.model_dump() for name, fixture in parts.fixtures.items()},
        test_code=parts.test_code,
        limits=Limits(user_turns=fields.max_user_sim_turns, agent_turns=fields.max_agent_sim_turns),
        expected_calls=tuple(call for _, call in calls),
        expected_servers=tuple(server for server, _ in calls),
        tags=parts.tags.flat(),
        clock=clock,
        clock_runs=clock_runs,
        metadata={**scenario.metadata, **fields.metadata},
    )
    return dataclasses.replace(task, split="heldout") if benchmark_keys().has(task) else task


def _joined(*instructions: str | None) -> str:
    return "\n".join(text for text in instructions if text is not None)


def _init(parts: Parts, wrong: list[str]) -> dict[str, Mapping[str, Any]]:
    """server -> merged configuration; the format merges mappings only."""
    own, of_scenario = parts.fields.init, parts.scenario.world_state
    init = merged_init(of_scenario, own)
    for server, given in of_scenario.items():
        if not isinstance(given, Mapping) and (given or server not in own):
            wrong.append(
                f"scenario '{parts.scenario_name}' gives server '{server}' {given!r:.80}; it must be a mapping, {{}} "
                f"when the server needs nothing"
            )
    return init


def _expected_calls(init: Mapping[str, Any], wrong: list[str]) -> list[tuple[str, ExpectedCall]]:
    """Server and call of every golden interaction, with its arguments as written."""
    calls = []
    for server, config in init.items():
        golden = config.get("golden_test_case") if isinstance(config, Mapping) else None
        interactions = golden.get("tool_interactions") if isinstance(golden, Mapping) else None
        for number, call in enumerate(interactions if isinstance(interactions, list) else []):
            tool, arguments = (call.get("tool"), call.get("parameters")) if isinstance(call, Mapping) else (None, None)
            if isinstance(tool, str) and isinstance(arguments or {}, Mapping):
                calls.append((server, ExpectedCall(tool, arguments or {})))
            else:
                wrong.append(
                    f"call {number} of golden_test_case of server '{server}' is {call!r:.80}; wanted "
                    f"{{tool: name, parameters: mapping}}"
                )
    return calls


def _clock(scenario: ScenarioFields, fields: TestFields, wrong: list[str]) -> tuple[datetime.datetime | None, bool]:
    """`metadata.clock` and `metadata.clock_runs`; the test's override the scenario's."""
    metadata = {**scenario.metadata, **fields.metadata}
    given, runs = metadata.get("clock"), metadata.get("clock_runs", False)
    if not isinstance(runs, bool):
        wrong.append(f"metadata.clock_runs is {runs!r}; write true or false")
    if given is None:
        return None, bool(runs)
    try:
        return datetime.datetime.fromisoformat(given), bool(runs)
    except (TypeError, ValueError):
        wrong.append(f"metadata.clock is {given!r}; write a moment such as 2025-10-01T09:00:00")
        return None, bool(runs)


def _check_tool_names(parts: Parts, wrong: list[str]) -> None:
    offered = {tool.name for tool in parts.scenario.tools}
    if both := [tool.name for tool in parts.agent.builtin_tools if tool.name in offered]:
        wrong.append(
            f"{', '.join(both)}: a tool of scenario '{parts.scenario_name}' and of agent '{parts.agent_name}'; two "
            f"tools of one name cannot be distinguished, remove it from one of them"
        )


def _tools(given: Sequence[ToolFields]) -> tuple[ToolChoice, ...]:
    """The tools; when a name occurs several times, its last entry, in the place of the first."""
    return tuple(
        ToolChoice(
            name=tool.name,
            description=tool.override_description,
            argument_descriptions=tool.override_arg_description or {},
            direct_response=tool.direct_response,
            ends_turn=tool.is_end_turn,
        )
        for tool in {tool.name: tool for tool in given}.values()
    )
