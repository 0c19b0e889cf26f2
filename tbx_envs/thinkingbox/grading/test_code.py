"""The check of a dataset's task: its test function, run on the episode's evidence.

A test that raises nothing passes, and its return value is the reward; an `AssertionError` fails it. Everything else is
a fault: another exception, a crash, too much time or memory, a judge that does not answer. Test code never runs in this
process: each grade runs in its own child of the worker (`tbx_envs.thinkingbox.grading.worker_process`), without keys,
and asks for judge and servers over its socket.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.doors import clean_json, message_of, shown, text_problem, words_of
from tbx_envs.episode import CheckReport, entered_score
from tbx_envs.errors import CheckFault, ConfigError, TbxError
from tbx_envs.handed_down import missing_hint
from tbx_envs.thinkingbox.grading.judge import Judge, Opinion
from tbx_envs.thinkingbox.grading.worker.check_server.frames import ANYONE, FrameReader, frame
from tbx_envs.thinkingbox.grading.worker_process import Connection, WorkerProcess
from tbx_envs.thinkingbox.supervision.program import SILENCE_S
from tbx_envs.tools.session import ServerSession

_MEMORY_BYTES = 2 * 2**30
_LOOK_AGAIN_S = 0.25  # while the test waits for a judge or a server, and its clock is stopped
_NUM_NOTE_CHARS = 2000

# Methods of a judge that a test may call.
_JUDGE_METHODS = frozenset(
    {"text_yesno", "text_yesno_with_motivation", "compare_yesno", "yesno", "no_repeat", "evaluate_bool"}
)


class CheckWorker:
    """Grades evidence. Thread-safe: each grade runs in its own process.

    Args:
        timeout_s: time limit of a test; waiting for a judge or a server does not count.
        memory_bytes: limit of a test's address space.
        paths: folders to import fixtures from, in addition to those of this interpreter.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        memory_bytes: int = _MEMORY_BYTES,
        paths: Sequence[str | Path] = (),
    ) -> None:
        self._timeout_s = timeout_s
        # The limit of processor time is slightly longer, so that a busy test always runs into the same limit first.
        self._process = WorkerProcess(cpu_s=math.ceil(timeout_s) + 2, memory_bytes=memory_bytes, paths=paths)

    def grade(
        self,
        test_code: str,
        evidence: Mapping[str, Any],
        *,
        fixtures: Mapping[str, Mapping[str, Any]],
        judge: Judge | None,
        session: ServerSession | None,
        uid: str,
    ) -> CheckReport:
        """The test's verdict on the evidence.

        Args:
            test_code: source that defines `__tb_test_fn`.
            evidence: result of `tbx_envs.thinkingbox.grading.evidence.evidence_of`, new or read from a file.
            fixtures: name -> `{"type": dotted path, **arguments}`.
            judge: judge for the test's questions; None voids a test that asks.
            session: servers of the episode, for tests that call their tools; None when they have ended.
            uid: task id, for messages.

        Raises:
            CheckFault: there is no verdict; the message says why.
            ConfigError: the judge answers no request, so no test that asks it can be graded.
        """
        request = {
            "code": test_code,
            "evidence": evidence,
            "fixtures": fixtures,
            "judge_type": "motivation" if judge is not None and judge.kind == "motivation" else "legacy",
            "uid": uid,
        }
        with _Grading(uid, judge, session, self._timeout_s) as grading:
            return grading.run(self._process.connect, request)

    def close(self) -> None:
        """End the worker and every grade in it."""
        self._process.close()

    def __enter__(self) -> CheckWorker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Id of the worker's process, None when none is running."""
        return self._process.pid


class _Grading:
    """One grade: the conversation with its child."""

    def __init__(self, uid: str, judge: Judge | None, session: ServerSession | None, timeout_s: float) -> None:
        self._uid = uid
        self._answers = _Answers(uid, judge, session)
        self._timeout_s = timeout_s
        self._clock = _Stopwatch()
        self._send_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sock: socket.socket | None = None
        self._child = ANYONE  # its process id, once it has begun
        self._replace_worker: Callable[[], None] = lambda: None

    def __enter__(self) -> _Grading:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hang_up()
        for thread in self._threads:  # ends at the time limit of its judge or server, or when the endpoint is stopped
            thread.join()

    def run(self, connect: Callable[[], Connection], request: Mapping[str, Any]) -> CheckReport:
        reader = self._begin(connect, frame(dict(request)))
        self._clock = _Stopwatch()
        try:
            report = self._report(self._converse(reader))
        except CheckFault as fault:
            raise self._answers.fault or fault from None
        if self._answers.fault is not None:  # even if the test caught it
            raise self._answers.fault
        return report

    def _begin(self, connect: Callable[[], Connection], request: bytes) -> FrameReader:
        """Hand the request to a child. Tried twice: if the worker died or was stopped before, no test code has run."""
        ending: Mapping[str, Any] = {}
        for _ in range(2):
            connection = connect()
            self._sock, self._replace_worker = connection.sock, connection.replace_worker
            reader = FrameReader(self._sock, tells_senders=True)
            self._sock.settimeout(SILENCE_S)  # for a request that does not fit into the socket
            with contextlib.suppress(OSError, EOFError):
                try:
                    self._sock.sendall(request)
                    ending = reader.read(SILENCE_S) or self._silence()
                except TimeoutError:
                    ending = self._silence()
                if "begun" in ending:
                    self._child = reader.sender
                    self._sock.settimeout(None)
                    return reader
            self._hang_up()
        how = ending.get("ended", "the worker has ended")
        raise self._void(f"did not begin ({how})", ending.get("last_words", ""))

    def _silence(self) -> dict[str, Any]:
        """Replace the worker, which should have said something; the message of its end."""
        self._replace_worker()
        return {"ended": f"the check worker was silent for {SILENCE_S:g} s and was replaced"}

    def _hang_up(self) -> None:
        """Close the socket, upon which the worker ends the child; works when a forked process has a copy of it, too."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def _converse(self, reader: FrameReader) -> dict[str, Any]:
        """The child's result. When this returns or raises, the child has ended."""
        result: dict[str, Any] | None = None
        while True:
            message = self._next(reader) if result is None else self._ending(reader)
            match message:
                case {"ask": _} | {"result": _} if reader.sender != self._child:
                    continue  # a process that the test has started has no say
                case {"ask": number, "whom": whom, "method": str(method), "arguments": list(arguments)}:
                    self._answer_in_thread(number, whom, method, arguments)
                case {"result": dict(said)}:
                    result = said
                case _ if result is not None:
                    return result
                case _:
                    how = message.get("ended", "it sent an invalid message")
                    hint = ": out of processor time" if how == "SIGXCPU" else ""
                    raise self._void(f"ended its process ({how}{hint})", message.get("last_words", ""))

    def _next(self, reader: FrameReader) -> dict[str, Any]:
        """The next message of the child, or of the server about its end."""
        while True:
            left_s = self._timeout_s - self._clock.seconds()
            if left_s <= 0:
                self._end_child(reader)
                raise self._void(f"took longer than {self._timeout_s:g} s")
            try:
                message = reader.read(_LOOK_AGAIN_S if self._clock.is_stopped else left_s)
            except EOFError:
                return {"ended": "the check worker has ended"}
            except (ValueError, RecursionError):
                return {"ended": "what came over its socket is no message"}
            if message is not None:
                return message

    def _ending(self, reader: FrameReader) -> dict[str, Any]:
        """The server's message about the end of a child that has given its result."""
        try:
            return reader.read(SILENCE_S) or self._silence()
        except (EOFError, ValueError):
            return {"ended": "the check worker has ended"}

    def _end_child(self, reader: FrameReader) -> None:
        """Close the request, and wait until the worker has ended the child."""
        assert self._sock is not None
        with contextlib.suppress(OSError, EOFError, ValueError):
            self._sock.shutdown(socket.SHUT_WR)
            while "ended" not in (reader.read(SILENCE_S) or self._silence()):
                pass

    def _answer_in_thread(self, number: int, whom: str, method: str, arguments: list[Any]) -> None:
        assert self._sock is not None
        question = (self._sock, number, whom, method, arguments)
        thread = threading.Thread(target=self._answer, args=question, name=f"tbx-{whom}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _answer(self, sock: socket.socket, number: int, whom: str, method: str, arguments: list[Any]) -> None:
        with self._clock.stopped():
            reply = self._answers.answer(number, whom, method, arguments)
            with self._send_lock, contextlib.suppress(OSError):  # the child may have ended
                sock.sendall(reply)

    def _report(self, result: Mapping[str, Any]) -> CheckReport:
        try:
            result = entered_result(result)
        except ValueError as problem:
            raise self._void(f"ended with what is no result of a grade: {problem}") from None
        notes = _notes(result, self._answers.notes)
        match result["verdict"]:
            case "passed":
                return CheckReport(True, "test_code", score=result["reward"], notes=notes)
            case "failed":
                return CheckReport(False, "test_code", differences=_differences(result), notes=notes)
        where = f" in line {result['line']}, `{result['content']}`" if result["line"] else ""
        raise self._void(f"raised {result['error']}: {result['message']}{where}", result["traceback"])

    def _void(self, what: str, details: str = "") -> CheckFault:
        hint = "That is no verdict: fix the test, its fixtures or the effects that it reads."
        lines = [f"task {self._uid}: its test {what}. {hint}", details.strip()]
        return CheckFault("\n".join(filter(None, lines)) + missing_hint(f"{what}\n{details}"))


# What each verdict comes with, and of which type. The child runs test code, so what it sends is not believed unread.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "passed": {"reward": (int, float, type(None))},
    "failed": {"error": str, "message": str, "line": (int, type(None)), "content": str, "traceback": str},
    "error": {"error": str, "message": str, "line": (int, type(None)), "content": str, "traceback": str},
}


def entered_result(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result of a grade with clean texts, each field of its type, the reward from 0 to 1.

    Raises:
        ValueError: it is none; the message says what is wrong with it.
    """
    verdict = result.get("verdict")
    if not isinstance(verdict, str) or verdict not in _FIELDS:
        raise ValueError(f"the verdict {shown(verdict)}; wanted {', '.join(_FIELDS)}")
    for name, wanted in {**_FIELDS[verdict], "prints": str, "metadata": dict}.items():
        if name not in result or not isinstance(result[name], wanted) or isinstance(result[name], bool):
            raise ValueError(f"{name} is {shown(result.get(name))}")
    if verdict == "passed" and result["reward"] is not None:
        entered_score(result["reward"])
    cleaned: Mapping[str, Any] = clean_json(dict(result))
    return cleaned


def _differences(result: Mapping[str, Any]) -> tuple[str, ...]:
    said = [line for line in result["message"].splitlines() if line.strip()]
    if result["line"]:
        return (*said, f"line {result['line']}: {result['content']}")
    return tuple(said) or (f"{result['error']} outside of the test's own code",)


def _notes(result: Mapping[str, Any], asked: Sequence[str]) -> tuple[str, ...]:
    printed = [f"printed: {line}" for line in result["prints"].splitlines() if line.strip()]
    metadata = [f"{name}: {_shortened(json.dumps(value))}" for name, value in result["metadata"].items()]
    return (*asked, *metadata, *printed)


def _shortened(text: str) -> str:
    return text if len(text) <= _NUM_NOTE_CHARS else text[:_NUM_NOTE_CHARS] + "..."


class _Stopwatch:
    """Seconds since its creation, without the periods in which it was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._before_s = 0.0
        self._num_stopping = 0

    @property
    def is_stopped(self) -> bool:
        return self._num_stopping > 0

    def seconds(self) -> float:
        with self._lock:
            return self._before_s + (0.0 if self._num_stopping else time.monotonic() - self._since)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        with self._lock:
            if not self._num_stopping:
                self._before_s += time.monotonic() - self._since
            self._num_stopping += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_stopping -= 1
                self._since = time.monotonic()


class _Answers:
    """Answers a test's questions to judge and servers, and records the first error, which a test cannot suppress.

    Attributes:
        fault: first error; a `ConfigError` when it would occur in every test.
        notes: questions to the judge with its answers, in the order of the answers.
    """

    def __init__(self, uid: str, judge: Judge | None, session: ServerSession | None) -> None:
        self._uid = uid
        self._judge = judge
        self._session = session
        self._session_lock = threading.Lock()  # the calls of an episode are sequential
        self.fault: CheckFault | ConfigError | None = None
        self.notes: list[str] = []

    def answer(self, number: int, whom: str, method: str, arguments: list[Any]) -> bytes:
        """The message that answers question `number`."""
        try:
            value = self._ask_judge(method, arguments) if whom == "judge" else self._call_server(arguments)
            return frame({"to": number, "value": value})
        except Exception as error:  # the process boundary: any error of judge or server voids the grade
            fault = error if isinstance(error, CheckFault | ConfigError) else self._fault(whom, error)
            self.fault = self.fault or fault
            return frame({"to": number, "error": message_of(error)})

    def _fault(self, whom: str, error: Exception) -> CheckFault:
        what = "the judge did not answer" if whom == "judge" else "a server did not answer its test"
        said = message_of(error) if isinstance(error, TbxError) else words_of(error)
        fault = CheckFault(f"task {self._uid}: {what}: {said}")
        fault.__cause__ = error
        return fault

    def _ask_judge(self, method: str, arguments: list[Any]) -> Any:
        if self._judge is None:
            raise CheckFault(
                f"task {self._uid}: its test asks a judge, and none is configured. Give judge=yes (every answer is "
                f"yes) or judge=endpoint (a model)."
            )
        if method not in _JUDGE_METHODS:
            raise CheckFault(f"task {self._uid}: its test asks a judge for '{method}', which no judge has.")
        answer = getattr(self._judge, method)(*arguments)
        opinion = answer if isinstance(answer, Opinion) else Opinion(answer)
        if not isinstance(opinion.answer, bool):
            raise CheckFault(f"task {self._uid}: the judge's {method} answered {shown(answer)}, neither yes nor no.")
        if (problem := text_problem(opinion.motivation)) is not None:
            raise CheckFault(f"task {self._uid}: the judge's {method} gives as its motivation {problem}.")
        why = f" ({opinion.motivation})" if opinion.motivation else ""
        asked = " ".join(str(arguments[-1] if arguments else "").split())
        self.notes.append(_shortened(f"judge, {'yes' if opinion.answer else 'no'}{why}: {asked}"))
        if isinstance(answer, Opinion):
            return {"answer": opinion.answer, "motivation": opinion.motivation}
        return opinion.answer

    def _call_server(self, arguments: list[Any]) -> Any:
        if self._session is None:
            raise CheckFault(
                f"task {self._uid}: its test calls tools of its servers, which have ended. Such a task cannot be "
                f"graded again from its evidence; run it again."
            )
        server, name, tool_arguments = arguments
        with self._session_lock:
            return self._session.call_reserved(server, name, tool_arguments)
