"""Sessions of tools: where a call of the policy becomes an answer. Every one speaks MCP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call.

    Attributes:
        text: what the model reads.
        status: `ok`; `rejected` (the tool said no); `invalid` (unknown tool or wrong arguments: no tool ran).
            The database is as before the call unless it is `ok`.
        direct: words for the user that the result brought with it, said right after it; None: none.
        ends: the call was not executed; it ends the conversation.
    """

    text: str
    status: Literal["ok", "rejected", "invalid"]
    direct: str | None = None
    ends: bool = False


class ToolSession(Protocol):
    """The tools of one episode, bound to its world."""

    def call(self, name: Any, arguments: Mapping[str, Any]) -> Answer:
        """The answer to one call; sent once, never again.

        Raises:
            ToolFault: the tool raised what it does not document, or did not answer in time. Whether it had an
                effect is unknown then, so the world must be thrown away.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool as its server publishes it.

    Attributes:
        name: of the tool.
        server: that has it.
        description: "" when the server gives none.
        input_schema: JSON schema of the arguments, as the server gives it.
    """

    name: str
    server: str
    description: str
    input_schema: Mapping[str, Any]


class ServerSession(Protocol):
    """One episode's servers of other people: started, initialised, called, asked for effects, ended.

    Every method but `close` and `discard` raises `ToolFault` when a server died, hung, or answered what is no answer.
    Then the session is of no more use. Nothing is ever sent twice.

    Attributes:
        tools: what the servers publish, reserved tools left out, in registration order; of a name that two servers
            have, the later server's tool at the first one's place.
        init_result: server -> the object its `__reserved__init` answered, `status` left out.
    """

    tools: tuple[ServedTool, ...]
    init_result: Mapping[str, Mapping[str, Any]]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """The answer of a published tool; an unknown name is answered, not raised. Never reaches a reserved tool."""
        ...

    def call_reserved(self, server: str, name: str, arguments: Mapping[str, Any]) -> Any:
        """The JSON value that any tool of one server answers: for checks and the privileged channel, never for the
        agent."""
        ...

    def effects(self) -> Mapping[str, Mapping[str, Any]]:
        """server -> the JSON object of `__reserved__geteffects`; servers without that tool are left out.

        Raises:
            CheckFault: an answer that is no JSON object, or says that it failed.
        """
        ...

    def close(self) -> None:
        """Teardown and end; never raises, a second call does nothing."""
        ...

    def discard(self) -> None:
        """End at once without teardown, after a fault; never raises."""
        ...
