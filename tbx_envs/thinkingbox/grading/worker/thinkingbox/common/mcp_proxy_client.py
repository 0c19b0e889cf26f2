"""`SessionClientFixture`: a fixture that calls tools of the episode's servers, which still run while it is graded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


class SessionClientFixture:
    """Calls any tool of any server, including tools that the agent does not see.

    `endpoint` and `timeout` are accepted because datasets give them; the calls go through tbx, with its time limit.
    """

    _call: Callable[[str, str, Mapping[str, Any]], Any] | None = None
    _session_id: str | None = None

    def __init__(self, endpoint: str = "", timeout: float = 120.0) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.session_id: str | None = None

    @classmethod
    def bind(cls, call: Callable[[str, str, Mapping[str, Any]], Any], session_id: str) -> None:
        """Give all instances the episode's session: a function that calls a server's tool, and the session's id."""
        cls._call, cls._session_id = staticmethod(call), session_id

    def set_session(self, session_id: str) -> None:
        """Choose the session; the only one is the episode's (`x.session_id`)."""
        self.session_id = session_id

    def call_tool(self, server_name: str, tool_name: str, arguments: dict) -> str:
        """A tool's answer as text."""
        value = self._value(server_name, tool_name, arguments)
        return value if isinstance(value, str) else json.dumps(value)

    def call_json_tool(self, server_name: str, tool_name: str, arguments: dict) -> dict | list:
        """A tool's answer as an object or a list."""
        value = self._value(server_name, tool_name, arguments)
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, dict | list):
            raise ValueError(f"{server_name}.{tool_name} answered neither an object nor a list: {value!r}")
        return value

    def _value(self, server_name: str, tool_name: str, arguments: dict) -> Any:
        if self.session_id is None:
            raise RuntimeError("call set_session(x.session_id) first")
        if self.session_id != self._session_id or self._call is None:
            raise RuntimeError(f"there is no session {self.session_id}; the episode's is x.session_id")
        return self._call(server_name, tool_name, arguments)
