"""A pool of sessions without processes: tools are functions, and what a server does wrong is asked for by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tbx_envs.errors import CheckFault, ToolFault
from tbx_envs.tools.session import Answer, ServedTool

SERVERS = ("shop", "notes")
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class FakeSession:
    """`echo`, `hang` (until the session is discarded), `die`, `empty`, `count`, `env_clock`; see `_TOOLS`."""

    def __init__(self, pool: FakePool, configs: Mapping[str, Mapping[str, Any]], clock: Any) -> None:
        self.pool, self.configs, self.clock = pool, configs, clock
        self.session_id: str | None = None
        self.tools = tuple(ServedTool(name, "shop", f"says {name}", SCHEMA) for name in _TOOLS)
        self.init_result = {server: {"greeting": config.get("greeting", "")} for server, config in configs.items()}
        self.executed: list[tuple[str, Mapping[str, Any]]] = []
        self.running = 0
        self.most_running = 0
        self.gone = threading.Event()
        self.ended: list[str] = []

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        self.executed.append((name, arguments))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return Answer(_TOOLS[name](self, arguments), "ok")
        finally:
            self.running -= 1

    def call_reserved(self, server: str, name: str, arguments: Mapping[str, Any]) -> Any:
        return {"server": server, "tool": name, "arguments": dict(arguments)}

    def effects(self) -> Mapping[str, Mapping[str, Any]]:
        wanted = self.configs["shop"].get("effects", {"calls": len(self.executed)})
        if not isinstance(wanted, dict):
            raise CheckFault(f"server 'shop' answered its effects with {wanted!r}, which is no JSON object.")
        return {"shop": wanted}

    def close(self) -> None:
        self.ended.append("closed")
        self.gone.set()

    def discard(self) -> None:
        self.ended.append("discarded")
        self.gone.set()


def _hang(session: FakeSession, arguments: Mapping[str, Any]) -> str:
    session.pool.hanging.set()
    session.gone.wait(30)
    raise ToolFault("server 'shop' died during a call.")


def _die(session: FakeSession, arguments: Mapping[str, Any]) -> str:
    raise ToolFault("server 'shop' exited with 0 during a call.")


def _break(session: FakeSession, arguments: Mapping[str, Any]) -> str:
    raise ZeroDivisionError("a bug of ours")


_TOOLS: dict[str, Callable[[FakeSession, Mapping[str, Any]], str]] = {
    "echo": lambda session, arguments: arguments["text"],
    "number": lambda session, arguments: "42",
    "record": lambda session, arguments: '{"ok": true}',
    "empty": lambda session, arguments: "",
    "clock": lambda session, arguments: str(session.clock),
    "hang": _hang,
    "die": _die,
    "break": _break,
    "hidden": lambda session, arguments: "you see me",
}


class FakePool:
    """Sessions in the order in which they were opened. A shop configured with `init: "fails"` does not start."""

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.hanging = threading.Event()
        self.closed = False

    def open(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        *,
        servers: Sequence[str],
        clock: Any = None,
        clock_runs: bool = False,
        session_id: str | None = None,
    ) -> FakeSession:
        self.may_open.wait(30)
        if configs.get("shop", {}).get("init") == "fails":
            raise ToolFault("server 'shop': __reserved__init answered 'Error!', wanted {} or status ok.")
        session = FakeSession(self, configs, clock)
        session.session_id = session_id
        self.sessions.append(session)
        return session

    def close(self) -> None:
        self.closed = True
        self.may_open.set()
