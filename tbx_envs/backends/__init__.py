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
        status: `ok`; `refused` (the tool said no); `invalid` (unknown tool or wrong arguments: no tool ran).
            The database is as before the call unless it is `ok`.
    """

    text: str
    status: Literal["ok", "refused", "invalid"]


class ToolSession(Protocol):
    """The tools of one episode, bound to its world."""

    def call(self, name: Any, arguments: Mapping[str, Any]) -> Answer:
        """The answer to one call; sent once, never again.

        Raises:
            ToolFault: the tool raised what it does not document, or did not answer in time. Whether it had an
                effect is unknown then, so the world must be thrown away.
        """
        ...
