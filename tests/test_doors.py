"""The doors of docs/architecture.md: what other parties hand us is cleaned or refused where it enters."""

import asyncio
import dataclasses
import io
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import mcp_types
import pytest
from starlette.requests import Request

from tbx_envs import doors
from tbx_envs.domains import load_domain
from tbx_envs.endpoints.responses import Completion, read_answer
from tbx_envs.endpoints.transport import Reply
from tbx_envs.env import ToolEnv
from tbx_envs.episode import CheckReport, entered_report
from tbx_envs.errors import ActionError, CheckFault, DomainError, EnvironmentFault, ToolFault, UserFault
from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.thinkingbox.api import session_api
from tbx_envs.thinkingbox.dataset.hydrated_files import HydratedFile
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_yaml
from tbx_envs.thinkingbox.grading.test_code import entered_result
from tbx_envs.thinkingbox.search import stand_in
from tbx_envs.thinkingbox.servers.foreign_tools import first_object
from tbx_envs.thinkingbox.servers.wire import _message_in
from tbx_envs.tools.calls import answer_call
from tbx_envs.tools.given_turn import entered
from tbx_envs.tools.session import Answer
from tbx_envs.tools.tool import ToolContext, ToolRejection, tool
from tbx_jax.serving.chat_requests import RequestError, Served, read_request

UID = "clinic/cancel_visit/000"
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "architecture.md"

HALF, CLEAN = "half \ud800 of it, \ud83d\ude00 \x00", "half \ufffd of it, \U0001f600 \x00"
HUGE = "a" * (doors.MAX_TEXT_CHARS + 1)


class Mute(Exception):
    """An exception, and a value, that cannot be put in words."""

    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__


NO_TEXT = [None, True, 7, math.nan, b"bytes", [1], {"a": 1}, Mute()]
NO_JSON = [b"\xff", b"{", b"[" * 100_000, b"9" * 5000, b""]
NOT_ASKED_FOR = [b"7", b"null", b"[]", b'{"a": 1}']


# --- through each door: words go in, and come out as they arrived --------------------------------------------


def new_episode():
    env = ToolEnv(UID)
    env.reset(seed=0)
    return env


def act(action):
    env = new_episode()
    env.step(Turn(text=action) if isinstance(action, str) else action)
    return next(said.text for said in reversed(env.transcript) if isinstance(said, Turn))


def answer(given):
    env = new_episode()
    env._runtime.call = lambda name, arguments: Answer(given, "ok") if isinstance(given, str) else given
    return env.step(Turn(calls=(ToolCall("", "find_patient", {}),)))[0]


def say_as_user(words):
    env = new_episode()
    env._runtime.user = type("Says", (), {"answer": lambda self, transcript: words})()
    return env.step("Your name?")[0]


class NoDatabase:
    def commit(self):
        return None

    rollback = commit


def call_tool(returned):
    @tool(mutates=False)
    def say(context: ToolContext) -> str:
        """Say it."""
        if isinstance(returned, Exception):
            raise returned
        return returned

    return answer_call({"say": say}, NoDatabase(), load_domain("clinic").clock, "say", {}).text


def check(returned):
    report = CheckReport(False, "state", (returned,)) if isinstance(returned, str) else returned
    return entered_report(report).differences[0]


def send_grade(prints):
    return entered_result({"verdict": "passed", "reward": None, "prints": prints, "metadata": {}})["prints"]


def write_line(text):
    parts = [{"type": "text", "text": text}]
    line = text if isinstance(text, bytes) else json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"content": parts}})
    return _message_in(line if isinstance(line, bytes) else line.encode()).result["content"][0]["text"]


def answer_init(text):
    written = text.decode("latin-1") if isinstance(text, bytes) else json.dumps({"greeting": text})
    return first_object(mcp_types.CallToolResult(content=[mcp_types.TextContent(text=written)]))["greeting"]


def write_dataset_line(folder, name):
    line = name if isinstance(name, bytes) else json.dumps({"uid": f"file.py:{name}"}).encode()
    (folder / "tests.jsonl").write_bytes(line + b"\n{}")
    file = HydratedFile(folder / "tests.jsonl", dataset="d")
    if len(file.problems) > 1 or not file.uids:  # the second line is one in any case
        raise DomainError(str(file.problems[0]))
    return file.uids[0].removeprefix("file.py:")


def write_yaml(folder, text):
    written = text.decode("latin-1") if isinstance(text, bytes) else json.dumps({"key": text})
    return load_yaml(YamlText(folder / "a.yaml", written, 1))["key"]


def complete(content):
    body = content if isinstance(content, bytes) else json.dumps({"choices": [{"message": {"content": content}}]})
    reply = Reply(200, body if isinstance(body, bytes) else body.encode(), None, None, None)
    found = read_answer(reply, key_variable=None, key=None)
    if not isinstance(found, Completion):
        raise ValueError(found.text)
    return found.text


def chat(content):
    asked = {"model": "m", "messages": [{"role": "user", "content": content}]}
    body = content if isinstance(content, bytes) else json.dumps(asked).encode()
    return read_request(body, Served("m", None, 1.0)).messages[0].text


def create_session(greeting):
    asked = {"session_id": "s", "server_config": {"shop": {"greeting": greeting}}, "available_tools": []}
    body = greeting if isinstance(greeting, bytes) else json.dumps(asked).encode()

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    read = session_api._Api(None, 200_000)._asked(request, session_api._Create)
    return asyncio.run(read).server_config["shop"]["greeting"]


def search(query):
    body = query if isinstance(query, bytes) else json.dumps({"q": query}).encode()
    handler = stand_in._Handler.__new__(stand_in._Handler)
    handler.headers, handler.rfile = {"Content-Length": str(len(body))}, io.BytesIO(body)
    return handler._body()["q"]


def raise_it(words):
    error = words if isinstance(words, Exception) else ValueError(words)
    return doors.words_of(error).removeprefix("ValueError: ")


@dataclasses.dataclass(frozen=True)
class Case:
    """A door: how words go through it (and come out as they arrived), and what it refuses with which error."""

    enter: Callable[..., str]
    refuses: tuple[Any, ...] = ()
    error: type[Exception] = ValueError
    cleans: bool = True  # False where half of a pair is refused, like everything else that is no text


def report(**changes):
    return dataclasses.replace(CheckReport(True, "state"), **changes)


SCORES = [report(score=score) for score in (math.nan, math.inf, -0.1, 7.5, True, "1")]
CASES = {
    "action": Case(
        act,
        (*NO_TEXT, HUGE, Turn(text=7), Turn(text=HUGE), Turn(reasoning=None), Turn(calls=None), Turn(calls=(Mute(),))),
        ActionError,
    ),
    "opening": Case(lambda text: entered([Text("user", text)])[0].text),
    "tool of ours": Case(call_tool, (math.nan, b"bytes", {1}, Mute(), [Mute()], SystemExit), ToolFault),
    "answer": Case(
        answer,
        (*NO_TEXT, HUGE, Answer(7, "ok"), Answer("a", "fine"), Answer("a", "ok", direct=7), Answer(HUGE, "ok")),
        ToolFault,
    ),
    "user": Case(say_as_user, (*NO_TEXT, HUGE, "", " \n"), UserFault),
    "verdict": Case(
        check,
        (
            *NO_TEXT,
            *SCORES,
            *(report(passed=passed) for passed in (None, 1, "yes", math.nan, Mute())),
            *(report(differences=lines) for lines in ("a line", None, (7,))),
            report(notes=[Mute()]),
            report(check=None),
        ),
    ),
    "grade": Case(send_grade, tuple(NO_TEXT)),
    "server line": Case(write_line, (*NO_JSON, *NOT_ASKED_FOR)),
    "reserved answer": Case(answer_init, (*NO_JSON[1:], *NOT_ASKED_FOR[:3])),
    "dataset line": Case(write_dataset_line, (*NO_JSON[:-1], *NOT_ASKED_FOR), DomainError),
    "dataset YAML": Case(
        write_yaml, (b"a: .nan", b"a: !!binary aGk=", b"[" * 900, b"{", HALF), DomainError, cleans=False
    ),
    "endpoint": Case(complete, (*NO_JSON, *NOT_ASKED_FOR, 7, {"a": 1}, [1], True)),
    "chat request": Case(
        chat,
        (*NO_JSON, *NOT_ASKED_FOR, None, 7, {"a": 1}, [1], b'{"a":' * 65 + b"1" + b"}" * 65),
        RequestError,
    ),
    "session request": Case(
        create_session, (*NO_JSON, *NOT_ASKED_FOR, b" " * 200_001, b"[" * 65 + b"]" * 65), session_api.Rejected
    ),
    "search request": Case(search, (*NO_JSON[:-1], b"[" * 65 + b"]" * 65), stand_in.RequestError),
    "exception": Case(raise_it),
}


def doors_of_the_page():
    section = PAGE.read_text(encoding="utf-8").partition("## The doors")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([\w ]+) \| [^|]+ \| `tbx_", section, re.MULTILINE)


def test_every_door_of_the_page_has_a_case_and_every_case_is_on_the_page():
    assert doors_of_the_page() == list(CASES)


def through(case, value, folder):
    return case.enter(folder, value) if case.enter in (write_dataset_line, write_yaml) else case.enter(value)


@pytest.mark.parametrize("door", [door for door, case in CASES.items() if case.cleans])
def test_half_of_a_surrogate_pair_comes_through_a_door_as_the_replacement_character(door, tmp_path):
    assert through(CASES[door], HALF, tmp_path) == CLEAN


@pytest.mark.parametrize("door", [door for door, case in CASES.items() if case.refuses])
def test_a_door_refuses_what_is_none_of_its_things_in_words(door, tmp_path):
    case = CASES[door]
    for value in case.refuses:
        with pytest.raises(case.error) as raised:
            through(case, value, tmp_path)
        words = str(raised.value)
        assert 10 < len(words) < 5000
        words.encode()


# --- what the table says beside it --------------------------------------------------------------------------


def test_arguments_with_half_of_a_pair_are_answered_as_invalid_and_nothing_is_executed():
    env = new_episode()
    env._runtime.call = lambda name, arguments: pytest.fail("it was executed")
    for call in (ToolCall("", "find_patient", {"name": "\ud800"}), ToolCall("", "find_patient", {"\ud800": 1})):
        observation = env.step(Turn(calls=(call,)))[0]
        assert "half a surrogate pair" in observation or "Unknown argument" in observation
    bad = [call for said in env.transcript if isinstance(said, Turn) for call in said.calls]
    assert [type(call) for call in bad] == [BadCall, BadCall]
    json.dumps([call.raw for call in bad], ensure_ascii=False).encode()


@pytest.mark.parametrize("error", [Mute(), SystemExit(3), type("Odd", (Exception,), {"__str__": lambda self: 7})()])
@pytest.mark.parametrize("who", ["call", "user", "evidence", "check"])
def test_an_exception_that_cannot_be_printed_voids_one_episode(who, error):
    def broken(*arguments):
        raise error

    env = new_episode()
    if who == "user":
        env._runtime.user = type("Breaks", (), {"answer": broken})()
    else:
        setattr(env._runtime, who, broken)
    action = Turn(calls=(ToolCall("", "a", {}),)) if who == "call" else "Name?" if who == "user" else "<DONE>"
    with pytest.raises(EnvironmentFault, match=type(error).__name__):
        env.step(action)
    assert env.episode(0).reward is None
    env.reset(seed=0)
    assert env.step("<DONE>")[1] == 0.0


@pytest.mark.parametrize("returned", [None, True, 1.0, math.nan, *SCORES, report(passed=None)], ids=repr)
def test_a_check_that_returns_no_verdict_voids(returned):
    env = new_episode()
    env._runtime.check = lambda transcript, evidence: returned
    with pytest.raises(CheckFault, match="the check returned"):
        env.step("<DONE>")
    assert env.episode(0).reward is None


def test_a_rejection_without_words_still_answers_the_model():
    class Silent(ToolRejection):
        __str__ = Mute.__str__

    assert call_tool(Silent()) == "(Silent, which cannot be put in words)"


def test_ids_of_a_history_are_made_unique_and_results_follow_them():
    def turn(call_id):
        return Turn(calls=(ToolCall(call_id, "look", {}),))

    said = [turn("call_1"), ToolResult("call_1", "look", "a"), turn("call_1"), ToolResult("call_1", "look", "b")]
    made = entered([*said, turn("call_7")])
    assert [call.id for message in made if isinstance(message, Turn) for call in message.calls] == [
        "call_1",
        "call_1_2",
        "call_7",
    ]
    assert [message.call_id for message in made if isinstance(message, ToolResult)] == ["call_1", "call_1_2"]
