"""One grade, in its own child process: runs the test function on the evidence and reports the result.

No exception: passed. `AssertionError`: failed. Anything else is an error of the test or of the evidence: no verdict.
"""

from __future__ import annotations

import itertools
import linecache
import os
import queue
import socket
import threading
import traceback
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import pydantic
import pydantic_core

from .fixtures import TEST_FUNCTION, built
from .frames import FrameReader, frame
from .printing import Prints

if TYPE_CHECKING:
    from thinkingbox.common.chat_types import TestContext
    from thinkingbox.common.judge import Judge

_MODULE = "tbx_test_code"  # `__name__` of test code
_RESULT, _ARGUMENTS = "__tb_test_reward", "__tb_test_kwargs"
_NUM_TRACEBACK_CHARS = 6000


class Reward(pydantic.BaseModel):
    """The return value of a test as a number; converted through JSON, as in the original."""

    reward: float = pydantic.Field(ge=0.0, le=1.0)


def run(sock: socket.socket) -> None:
    """Read one grade from the socket, run it, send the result."""
    reader, own_pid = FrameReader(sock), os.getpid()
    request = reader.read()
    assert request is not None  # without a time limit there is a message, or EOFError
    sock.sendall(frame({"begun": True}))
    result = outcome(request, Channel(sock, reader))
    if os.getpid() == own_pid:  # a copy that the test has forked comes by here, too, and has no say
        sock.sendall(frame({"result": result}))


class Channel:
    """Questions to tbx, which has the judge and the servers; several threads may ask at the same time."""

    def __init__(self, sock: socket.socket, reader: FrameReader) -> None:
        self._sock = sock
        self._reader = reader
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._listener: threading.Thread | None = None

    def ask(self, whom: str, method: str, *arguments: Any) -> dict[str, Any]:
        """The answer: `{"value": ...}`, or `{"error": text}`."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answers
            self._sock.sendall(frame({"ask": number, "whom": whom, "method": method, "arguments": arguments}))
            if self._listener is None:
                self._listener = threading.Thread(target=self._listen, name="answers", daemon=True)
                self._listener.start()
        return answers.get()

    def _listen(self) -> None:
        while True:
            answer = self._reader.read()
            assert answer is not None
            self._waiting.pop(answer["to"]).put(answer)


def outcome(request: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
    """The result: `verdict` (`passed`, `failed`, `error`) and the fields that go with it."""
    # Imported here because only the worker, whose import root has this package, can import it.
    from thinkingbox.common.chat_types import TestContext
    from thinkingbox.common.judge import Judge
    from thinkingbox.common.mcp_proxy_client import SessionClientFixture

    name = f"<{request['uid']}>"
    code = f"{request['code']}\n{_RESULT} = {TEST_FUNCTION}(**{_ARGUMENTS})"
    linecache.cache[name] = len(code), None, [line + "\n" for line in code.splitlines()], name
    prints = Prints()
    judge = Judge(_judge_asker(channel), request["judge_type"])
    context: TestContext | None = None
    with prints.capturing():
        try:
            context = TestContext(**request["evidence"])
            SessionClientFixture.bind(_server_caller(channel), context.session_id)
            found = _run(code, name, request["fixtures"], context, judge, prints)
        except BaseException as error:  # the process boundary: SystemExit, too, is reported, not obeyed
            found = _what_was_raised(error, code)
    metadata = {} if context is None else _noted(context.metadata, request["evidence"].get("metadata", {}))
    return {**found, "prints": prints.text(), "metadata": metadata}


def _run(
    code: str,
    name: str,
    fixtures: Mapping[str, Mapping[str, Any]],
    context: TestContext,
    judge: Judge,
    prints: Prints,
) -> dict[str, Any]:
    given = {"x": context, "judge": judge}
    namespace: dict[str, Any] = {"__name__": _MODULE, "print": prints.print, _RESULT: None}
    with built(fixtures, code, given) as instances:
        namespace[_ARGUMENTS] = {**given, **instances}
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    returned = namespace.get(_RESULT)  # after the fixtures were exited: one of them may have suppressed an exception
    return {"verdict": "passed", "reward": None if returned is None else _reward(returned)}


def _reward(returned: Any) -> float:
    try:
        sent = Reward.model_construct(reward=returned).model_dump_json(warnings=False)
        return Reward.model_validate_json(sent).reward
    except ValueError as error:  # pydantic's own errors are ValueErrors
        raise ValueError(f"the test returned {returned!r}; a reward is a number from 0 to 1, or nothing") from error


def _what_was_raised(error: BaseException, code: str) -> dict[str, Any]:
    own = [(tb, line) for tb, line in traceback.walk_tb(error.__traceback__) if _is_own(tb)]
    line = own[-1][1] if own else None  # the innermost one
    lines = code.splitlines()
    shown = error.with_traceback(_from_own(error.__traceback__))
    return {
        "verdict": "failed" if isinstance(error, AssertionError) else "error",
        "error": type(error).__name__,
        "message": _message_of(error),
        "line": line,
        "content": lines[line - 1].strip() if line is not None and line <= len(lines) else "",
        "traceback": "".join(traceback.format_exception(shown))[-_NUM_TRACEBACK_CHARS:],
    }


def _message_of(error: BaseException) -> str:
    """The exception's words; `__str__` is the test's code too, and may raise."""
    try:
        return str(error)
    except Exception as raised:
        return f"(its words cannot be had: {type(raised).__name__})"


def _is_own(frame: FrameType) -> bool:
    """True for the test's own code, including helpers in its file."""
    return frame.f_globals.get("__name__") == _MODULE


def _from_own(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without our frames before the test's own; all of it when it has no frame of the test."""
    start = tb
    while start is not None and not _is_own(start.tb_frame):
        start = start.tb_next
    return start or tb


def _noted(metadata: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What test and fixtures wrote into `x.metadata`, as JSON; values without a JSON form as their `repr`."""
    written = {str(key): value for key, value in metadata.items() if key not in before or before[key] != value}
    return dict(pydantic_core.to_jsonable_python(written, fallback=repr, inf_nan_mode="strings"))


def _judge_asker(channel: Channel) -> Any:
    from thinkingbox.common.judge import JudgeException

    def ask(method: str, *arguments: Any) -> Any:
        answer = channel.ask("judge", method, *arguments)
        if "error" in answer:
            raise JudgeException(answer["error"])
        return answer["value"]

    return ask


def _server_caller(channel: Channel) -> Any:
    def call(server: str, tool: str, arguments: Mapping[str, Any]) -> Any:
        answer = channel.ask("server", "call", server, tool, dict(arguments))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    return call
