"""Records of the YAML in a dataset's files: keys, types and the defaults of the format, validated.

Unknown keys are ignored here, since datasets have keys of their own; those of a test function are checked when it is
read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Problem
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText


class Fields(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")


class HistoryReference(Fields):
    """The messages of a `.meta.yaml` file that precede the query.

    Attributes:
        key: key of the group of messages.
        start: first message: its number, from 0, or its `message_id`.
        end: `message_id` of the first message that is left out; "" for none.
    """

    key: Annotated[str, pydantic.Field(min_length=1)]
    start: int | str
    end: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        """`key:start:end`; only the last two colons are separators."""
        if not isinstance(given, str):
            return given
        parts = given.rsplit(":", 2)
        if len(parts) != 3:
            raise ValueError("write it as 'key:start:end' in quotes, such as 'refund:0:'")
        key, start, end = parts
        try:
            return {"key": key, "start": int(start), "end": end}
        except ValueError:
            return {"key": key, "start": start, "end": end}


class TestFields(Fields):
    """A test, from a function of a Python file or an entry of a YAML file."""

    __test__ = False  # not a test class of pytest

    scenario: str
    query: str
    user_context: str | None = None
    max_user_sim_turns: Annotated[int, pydantic.Field(ge=0)] = 10
    max_agent_sim_turns: Annotated[int, pydantic.Field(ge=0)] = sys.maxsize
    bot_instructions: str | None = None
    history: HistoryReference | None = None
    init: dict[str, dict[str, Any]] = {}
    format_query: bool = False
    tags: list[Any] | dict[str, Any] = []
    metadata: dict[str, Any] = {}


class YamlTest(TestFields):
    """An entry of a YAML test file."""

    uid: Annotated[str, pydantic.Field(min_length=1)]
    test_code: str


class FixtureFields(Fields):
    """A fixture; all other keys are arguments of `type`."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")
    type: Annotated[str, pydantic.Field(min_length=1)]


class ConftestFields(Fields):
    fixtures: dict[str, FixtureFields] = {}


class ToolFields(Fields):
    """A tool that a scenario offers."""

    name: str
    override_description: str | None = None
    override_arg_description: dict[str, str] | None = None
    direct_response: str | None = None
    is_end_turn: bool = False


class ScenarioFields(Fields):
    world_state: dict[str, Any]
    tools: list[ToolFields]
    bot_instructions: str | None = None
    tags: list[Any] | dict[str, Any] = []
    fixtures: dict[str, FixtureFields] = {}
    metadata: dict[str, Any] = {}


class BuiltinToolFields(Fields):
    """A tool of the agent's own."""

    name: str
    description: str
    input_schema: dict[str, Any]
    direct_response: str | None = None
    is_end_turn: bool = False


class AgentFields(Fields):
    system_instructions: str
    builtin_tools: list[BuiltinToolFields]


class TaxonomyFields(Fields):
    """The values that tags may have: any name -> value, for each kind of tag."""

    domain: dict[str, str] = {}
    eval: dict[str, str] = {}
    category: dict[str, str] = {}


class MetaFields(Fields):
    """A `.meta.yaml` file; groups whose key begins with '#' are comments."""

    history: dict[str, list[dict[str, Any]] | None] = pydantic.Field(default={}, alias="$history")

    @pydantic.field_validator("history", mode="before")
    @classmethod
    def _without_comments(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given or {}
        return {key: group for key, group in given.items() if not key.startswith("#")}


class RawText(Fields):
    T: Literal["Text"]
    role: Literal["system", "user", "assistant"]
    content: str
    metadata: dict[str, Any] = {}


class RawToolCall(Fields):
    T: Literal["ToolCall"]
    name: str
    arguments: dict[str, Any] = {}
    id: str | None = None
    metadata: dict[str, Any] = {}


class RawParallelToolCall(Fields):
    T: Literal["ParallelToolCall"]
    tool_calls: list[RawToolCall]


class RawToolResponse(Fields):
    T: Literal["ToolResponse"]
    name: str
    content: str
    id: str | None = None
    metadata: dict[str, Any] = {}


AnyRawMessage = Annotated[
    RawText | RawToolCall | RawParallelToolCall | RawToolResponse, pydantic.Field(discriminator="T")
]


class RawMessage(pydantic.RootModel[AnyRawMessage]):
    """A message as `.meta.yaml` files and hydrated test cases write it."""


class HydratedTest(YamlTest):
    """A line of a JSONL file: a test together with what its other files contain."""

    agent: AgentFields
    scenario: ScenarioFields  # type: ignore[assignment]  # the scenario itself, where a test has its name
    history: list[dict[str, Any]] | None = None  # type: ignore[assignment]  # the messages, where a test refers to them
    fixtures: dict[str, FixtureFields] = {}


F = TypeVar("F", bound=pydantic.BaseModel)


def validated(record: type[F], value: Any, source: YamlText, keys: Sequence[str | int] = ()) -> F:
    """The record of a JSON value.

    Args:
        record: class of the record.
        value: value to validate.
        source: text that it was read from.
        keys: keys that lead to it in the source.

    Raises:
        DatasetProblems: keys are missing or wrong; has all of them, with their lines.
    """
    try:
        return record.model_validate(value)
    except pydantic.ValidationError as error:
        problems = []
        for item in error.errors():
            where = [part for part in item["loc"] if isinstance(part, str | int)]
            name = ".".join(map(str, where))
            said = item["msg"].removeprefix("Value error, ")
            text = (
                f"'{name}' is missing; add it"
                if item["type"] == "missing"
                else f"'{name}': {said[:1].lower()}{said[1:]}; it is {_shown(item['input'])}"
            )
            problems.append(Problem(source.path, source.line_of([*keys, *where]), text))
        raise DatasetProblems(problems) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
