"""What the agent sees of servers' tools, against the rules of the contract (section b)."""

import json

import pytest

from tbx_envs.errors import DomainError
from tbx_envs.task import Limits
from tbx_envs.thinkingbox.agent_tools import AgentTools
from tbx_envs.thinkingbox.dataset.records import BuiltinTool, DatasetTask, ToolChoice
from tbx_envs.tools.session import Answer, ServedTool

SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}, "all": {"type": "boolean"}}}


class FakeSession:
    """Servers that answer with what they were asked."""

    def __init__(self, *names):
        self.tools = tuple(ServedTool(name, "shop", f"About {name}.", SCHEMA) for name in names)
        self.calls = []
        self.text = None

    def call(self, name, arguments):
        self.calls.append((name, arguments))
        return Answer(json.dumps({"name": name, **arguments}) if self.text is None else self.text, "ok")


def task(tools, builtin=()):
    return DatasetTask(
        uid="shop.py:test_a", dataset="shop", path="shop.py", line=3, scenario="shop", agent="think", split="train",
        query="Hello", user_context=None, system_instructions="Be good.", bot_instructions="", test_instructions=None,
        format_query=False, servers=("shop",), init={}, tools=tuple(tools), builtin_tools=tuple(builtin), history=(),
        fixtures={}, test_code="", limits=Limits(), expected_calls=(), expected_servers=(), tags=(), clock=None,
        clock_runs=False, metadata={},
    )  # fmt: skip


def names(tools):
    return [entry["function"]["name"] for entry in tools.dicts]


REPORT = BuiltinTool("report", "Report an attack.", {"type": "object", "properties": {}}, ends_turn=True)


def test_builtin_tools_come_first_then_the_chosen_ones_in_the_order_of_the_servers():
    session = FakeSession("a", "b", "hidden", "c")
    tools = AgentTools(task([ToolChoice("c"), ToolChoice("a"), ToolChoice("b")], [REPORT]), session)
    assert names(tools) == ["report", "a", "b", "c"]
    assert tools.ends_turn == {"report"}


def test_a_tool_that_was_not_chosen_does_not_exist_for_the_agent():
    session = FakeSession("a", "hidden")
    tools = AgentTools(task([ToolChoice("a")]), session)
    for name in ("hidden", "__reserved__geteffects", "nothing"):
        assert tools.call(name, {}) == Answer(f"Error: function '{name}' does not exist", "invalid")
    assert session.calls == []


def test_arguments_reach_the_server_as_they_are():
    session = FakeSession("a")
    arguments = {"id": "25.00", "$filter": "x eq 1", "nothing": None, "deep": [{"é": [1, 2.5, True]}]}
    AgentTools(task([ToolChoice("a")]), session).call("a", arguments)
    assert session.calls == [("a", arguments)]


def test_a_call_that_cannot_be_carried_is_answered_and_not_sent():
    session = FakeSession("a")
    tools = AgentTools(task([ToolChoice("a")]), session)
    for name, arguments in (("a", [1]), ("a", {"x": float("nan")}), (3, {}), ("a", {"x": "\ud800"})):
        assert tools.call(name, arguments).status == "invalid"
    assert session.calls == []


def test_the_scenarios_words_replace_the_servers_and_the_servers_schema_stays_untouched():
    choice = ToolChoice("a", description="Better words.", argument_descriptions={"id": "Which.", "gone": "No."})
    session = FakeSession("a", "b")
    tools = AgentTools(task([choice, ToolChoice("b")]), session)
    first, second = (entry["function"] for entry in tools.dicts)
    assert first["description"] == "Better words."
    assert first["parameters"]["properties"] == {
        "id": {"type": "string", "description": "Which."},
        "all": {"type": "boolean"},
    }
    assert (second["description"], second["parameters"]) == ("About b.", SCHEMA)
    assert "description" not in SCHEMA["properties"]["id"]


def test_a_direct_response_is_filled_with_the_result():
    session = FakeSession("a")
    tools = AgentTools(task([ToolChoice("a", direct_response="{name} has {id}.")]), session)
    answer = tools.call("a", {"id": "7"})
    assert (answer.text, answer.direct) == (json.dumps({"name": "a", "id": "7"}), "a has 7.")


@pytest.mark.parametrize("text", ["no JSON", "[1]", "{}", "null", '{"id": {}}', "[" * 100_000])
def test_a_result_that_fills_no_direct_response_is_an_error_for_the_agent_and_nothing_for_the_user(text):
    session = FakeSession("a")
    session.text = text
    tools = AgentTools(task([ToolChoice("a", direct_response="{id.real}")]), session)
    assert tools.call("a", {}) == Answer("Error in function execution", "rejected")


def test_a_builtin_tool_that_ends_nothing_is_answered_and_not_sent():
    session = FakeSession("a")
    tools = AgentTools(task([ToolChoice("a")], [BuiltinTool("think", "", {"type": "object"})]), session)
    assert tools.call("think", {}).status == "invalid"
    assert session.calls == []


def test_tools_that_cannot_be_are_all_reported_at_once():
    with pytest.raises(DomainError) as caught:
        AgentTools(
            task([ToolChoice("find"), ToolChoice("gone"), ToolChoice("report")], [REPORT]),
            FakeSession("fond", "report"),
        )
    for words in (
        "3 problem(s)",
        "'find', which no server has. Did you mean 'fond'",
        "'gone'",
        "'report' is a tool of",
    ):
        assert words in str(caught.value)
