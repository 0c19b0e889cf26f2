"""The tools that a dataset's agent sees: selected, described and answered as scenario and agent file specify.

The agent's own built-in tools come first, then the servers' tools in registration order; the scenario selects among
these, and its order is ignored. Reserved tools are never included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tbx_envs.errors import DomainError, did_you_mean
from tbx_envs.thinkingbox.dataset.records import BuiltinTool, DatasetTask, ToolChoice
from tbx_envs.tools.arguments import transport_problem
from tbx_envs.tools.session import Answer, ServedTool, ServerSession

# The text that the agent reads, as in the original, when a result does not fit the template of its direct response.
_NO_DIRECT_RESPONSE = "Error in function execution"


class AgentTools:
    """The tools of one episode.

    Args:
        task: task of the episode.
        session: its open servers.

    Attributes:
        dicts: OpenAI-function style dictionaries, in the order in which the agent reads them.
        ends_turn: names of the tools that end the conversation.

    Raises:
        DomainError: the scenario names tools that no server has, or a server's tool has the name of an agent's tool.
    """

    def __init__(self, task: DatasetTask, session: ServerSession) -> None:
        self._session = session
        self._choices: dict[str, ToolChoice | BuiltinTool] = {tool.name: tool for tool in task.builtin_tools}
        chosen = {choice.name: choice for choice in task.tools}
        served = [tool for tool in session.tools if tool.name in chosen]
        if problems := tool_problems(task, session.tools):
            raise DomainError(
                f"task {task.uid}: {len(problems)} problem(s) with its tools:\n  "
                + "\n  ".join(problems)
                + f"\nServers: {', '.join(task.servers)}. Fix the scenario, the agent file or the servers."
            )
        self.dicts = [_function_dict(tool.name, tool.description, tool.input_schema) for tool in task.builtin_tools]
        for tool in served:
            choice = chosen[tool.name]
            self._choices[tool.name] = choice
            self.dicts.append(_described(tool, choice))
        self.ends_turn = frozenset(name for name, choice in self._choices.items() if choice.ends_turn)

    def call(self, name: Any, arguments: Any) -> Answer:
        """The answer to one call.

        Raises:
            ToolFault: the server failed.
        """
        problem = transport_problem(name, arguments)
        if problem is not None:
            return Answer(problem, "invalid")
        choice = self._choices.get(name)
        if choice is None or isinstance(
            choice, BuiltinTool
        ):  # the environment handles built-in tools that end the turn; others do nothing
            return Answer(f"Error: function '{name}' does not exist", "invalid")
        answer = self._session.call(name, dict(arguments))
        return answer if choice.direct_response is None else _with_direct_response(answer, choice.direct_response)


def tool_problems(task: DatasetTask, served: Sequence[ServedTool]) -> list[str]:
    """What is wrong with the tools that a task offers, given those of its servers."""
    there = [tool.name for tool in served]
    chosen = {choice.name for choice in task.tools}
    problems = [
        f"the scenario '{task.scenario}' offers '{choice.name}', which no server has.{did_you_mean(choice.name, there)}"
        for choice in task.tools
        if choice.name not in there
    ]
    builtin = {tool.name for tool in task.builtin_tools}
    return problems + [
        f"'{tool.name}' is a tool of the agent '{task.agent}' and of the server '{tool.server}'"
        for tool in served
        if tool.name in builtin and tool.name in chosen
    ]


def _function_dict(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": json.loads(json.dumps(dict(schema)))}
    return {"type": "function", "function": function}


def _described(tool: ServedTool, choice: ToolChoice) -> dict[str, Any]:
    """The tool with the scenario's descriptions instead of the server's; those of unknown arguments are dropped."""
    made = _function_dict(tool.name, tool.description, tool.input_schema)
    if choice.description is not None:
        made["function"]["description"] = choice.description
    properties = made["function"]["parameters"].get("properties", {})
    for name, words in choice.argument_descriptions.items():
        if name in properties:
            properties[name]["description"] = words
    return made


def _with_direct_response(answer: Answer, template: str) -> Answer:
    """The answer with its direct response: the template filled with the answer's JSON object."""
    try:
        direct = template.format(**json.loads(answer.text))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        return Answer(_NO_DIRECT_RESPONSE, "rejected")
    return Answer(answer.text, answer.status, direct=direct)
