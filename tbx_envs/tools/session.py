"""Tool sessions: the protocols that turn a call of the agent into an answer. Every implementation speaks MCP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one call.

    Attributes:
        text: text that the model reads.
        status: `ok`; `rejected` (the tool said no); `invalid` (unknown tool or wrong arguments: no tool ran).
            Unless it is `ok`, the database is as before the call.
        direct: message to the user that comes with the result and is said right after it; None when there is none.
        ends: True when the call was not executed because it ends the conversation.
    """

    text: str
    status: Literal["ok", "rejected", "invalid"]
    direct: str | None = None
    ends: bool = False


class ToolSession(Protocol):
    """The tools of one episode, bound to its world."""

    def call(self, name: Any, arguments: Mapping[str, Any]) -> Answer:
        """The answer to one call, which is sent exactly once.

        Raises:
            ToolFault: the tool raised something undocumented or did not answer in time. Whether it had an effect is
                unknown, so the world must be discarded.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool as its server publishes it.

    Attributes:
        name: tool name.
        server: name of its server.
        description: description of the tool; "" when the server gives none.
        input_schema: JSON schema of the arguments, as the server gives it.
    """

    name: str
    server: str
    description: str
    input_schema: Mapping[str, Any]


class ServerSession(Protocol):
    """One episode's external servers: started, initialised, called, asked for effects, ended.

    Every method but `close` and `discard` raises `ToolFault` when a server died, hung, or sent an invalid answer; the
    session is unusable after that. Nothing is ever sent twice.

    Attributes:
        tools: published tools without the reserved ones, in registration order; when two servers publish one name,
            the later server's tool, in the first one's place.
        init_result: server -> object that its `__reserved__init` answered, without `status`.
    """

    tools: tuple[ServedTool, ...]
    init_result: Mapping[str, Mapping[str, Any]]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """The answer of a published tool; an unknown name gives an `invalid` answer. Never reaches a reserved tool."""
        ...

    def call_reserved(self, server: str, name: str, arguments: Mapping[str, Any]) -> Any:
        """The JSON value that any tool of a server answers: for checks and the privileged channel, not for agents."""
        ...

    def effects(self) -> Mapping[str, Mapping[str, Any]]:
        """server -> JSON object of `__reserved__geteffects`; servers without that tool are left out.

        Raises:
            CheckFault: an answer is not a JSON object, or reports a failure.
        """
        ...

    def close(self) -> None:
        """Tear the session down and end it; never raises, a second call does nothing."""
        ...

    def discard(self) -> None:
        """End the session at once without teardown, after a fault; never raises."""
        ...
