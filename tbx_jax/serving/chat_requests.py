"""OpenAI's chat completions as `tbx serve-policy` implements them: requests are parsed, responses are built.

A request for anything that is not implemented is an error; no field that would change the answer is ignored. One
message lists all problems of a request.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tbx_envs.doors import MAX_JSON_DEPTH, read_json, shown
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.tools.given_turn import next_call_number

# Fields without effect on the answer.
_IGNORED = frozenset(
    ("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
)
# Fields with a single supported value, which is the server's behaviour.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "functions": ([],),
}
_READ = frozenset(
    ("messages", "model", "tools", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed")
) | {"stop", "logprobs"}
_WORDS = {"stream": "; answers are not streamed here", "n": "; ask once for each answer that you want"}
_MOST_STOPS = 16
_HOTTEST = 100.0
_NAMED = 20  # problems of a request that its answer lists, and calls that a problem lists


class RequestError(Exception):
    """A request that gets an error response.

    Attributes:
        status: HTTP status.
        kind: OpenAI's type of error.
        param: field that caused the error, or None.
        code: OpenAI's error code, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request.

    Attributes:
        messages: messages of the conversation.
        tools: tools in OpenAI's function format.
        max_tokens, temperature, seed: settings of the answer; None when the request has none.
        stop: texts that end the answer and are not part of it.
        logprobs: True when the response includes log-probabilities.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool

    @property
    def first_call(self) -> int:
        """Number in the id of the answer's first call: none of the conversation has it."""
        return next_call_number(self.messages)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The settings that requests must agree with.

    Attributes:
        model: name of the model.
        top_k, top_p: truncation of the distribution, compiled into the sampler.
    """

    model: str
    top_k: int | None
    top_p: float


def read_request(content: bytes, served: Served) -> ChatRequest:
    """Parses the JSON body of a request: the door by which conversations of clients enter, with clean texts.

    Raises:
        RequestError: the body is invalid, or requests something that is not served.
    """
    try:
        body = read_json(content, max_depth=MAX_JSON_DEPTH)
    except ValueError as error:
        raise RequestError(f"the body is not JSON that is served: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is {_kind(body)}; wanted a JSON object with model and messages")
    body = {name: value for name, value in body.items() if value is not None}
    model = body.get("model")
    if model != served.model:
        raise RequestError(
            f"the model {shown(model)} is not served here; there is {served.model!r}",
            status=404 if "model" in body else 400,
            param="model",
            code="model_not_found" if "model" in body else None,
        )
    problems: list[tuple[str, str]] = list(_problems(body, served))
    reader = _Conversation(problems)
    messages = reader.read(body.get("messages"))
    tools = tuple(_tools(body.get("tools", []), problems))
    if problems:
        fields = {field for field, _ in problems}
        words = [words for _, words in problems[:_NAMED]]
        words += [f"{len(problems) - _NAMED} more problems"] if len(problems) > _NAMED else []
        raise RequestError("; ".join(words), param=fields.pop() if len(fields) == 1 else None)
    stop, temperature = body.get("stop", ()), body.get("temperature")
    return ChatRequest(
        messages=tuple(messages),
        tools=tools,
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        temperature=None if temperature is None else float(temperature),
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=body.get("logprobs", False),
    )


def _problems(body: Mapping[str, Any], served: Served) -> Iterator[tuple[str, str]]:
    """(field, problem) for all fields but messages and tools."""
    only = _ONLY | {"top_p": (served.top_p,), "top_k": (served.top_k if served.top_k is not None else -1,)}
    for name, value in body.items():
        if name in only:
            if value not in only[name]:
                yield name, f"{name} {shown(value)}: only {only[name][0]!r} is served{_WORDS.get(name, '')}"
        elif name not in _READ and name not in _IGNORED:
            yield name, f"{shown(name)[1:-1]}: no such field is served; leave it out"
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body and not (_is_int(body[name]) and body[name] > 0):
            yield name, f"{name} {shown(body[name])}: wanted a positive integer"
    if "temperature" in body and not (_is_number(body["temperature"]) and 0 <= body["temperature"] <= _HOTTEST):
        yield "temperature", f"temperature {shown(body['temperature'])}: wanted a number from 0 to {_HOTTEST:g}"
    if "seed" in body and not (_is_int(body["seed"]) and abs(body["seed"]) < 2**63):
        yield "seed", f"seed {shown(body['seed'])}: wanted an integer of 64 bits"
    if not isinstance(body.get("logprobs", False), bool):
        yield "logprobs", f"logprobs {shown(body['logprobs'])}: wanted true or false"
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        yield "stop", f"stop {shown(stop)}: wanted a text or a list of texts, none of them empty"
    elif len(stops) > _MOST_STOPS:
        yield "stop", f"stop has {len(stops)} texts; {_MOST_STOPS} are served"


def _tools(tools: Any, problems: list[tuple[str, str]]) -> Iterator[Mapping[str, Any]]:
    if not isinstance(tools, list):
        problems.append(("tools", f"tools: {_kind(tools)}; wanted a list of functions"))
        return
    names: set[str] = set()
    for place, tool in enumerate(tools):
        function = (
            tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        )
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            problems.append(("tools", f'tools[{place}]: wanted {{"type": "function", "function": {{"name": ...}}}}'))
        elif not isinstance(function.get("parameters", {}), dict):
            problems.append(("tools", f"tools[{place}].function.parameters: wanted a JSON schema"))
        elif name in names:
            problems.append(("tools", f"tools[{place}]: there is a tool {shown(name)} already"))
        else:
            names.add(name)
            yield {"type": "function", "function": function}


class _Conversation:
    """Parses messages in order.

    Args:
        problems: list to which (field, problem) is added for every problem.
    """

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self._problems = problems
        self._call_names: dict[str, str] = {}  # call id -> tool name, of calls without a result so far
        self._place = ""

    def read(self, messages: Any) -> list[Message]:
        if not isinstance(messages, list) or not messages:
            self._place = "messages"
            self._wrong(f"{_kind(messages)}; wanted a list of at least one message")
            return []
        read = []
        for number, message in enumerate(messages):
            self._place = f"messages[{number}]"
            if not isinstance(message, dict):
                self._wrong(f"{_kind(message)}; wanted an object with role and content")
                continue
            read.append(self._message(message))
        if isinstance(read[-1] if read else None, Turn):
            self._wrong("the last message is the assistant's; wanted one to answer, of the user or of a tool")
        return [message for message in read if message is not None]

    def _wrong(self, words: str) -> None:
        self._problems.append(("messages", f"{self._place}: {words}"))

    def _message(self, message: Mapping[str, Any]) -> Message | None:
        match message.get("role"):
            case "system" | "developer":
                return Text("system", self._text(message.get("content")))
            case "user":
                return Text("user", self._text(message.get("content")))
            case "assistant":
                return self._turn(message)
            case "tool":
                return self._result(message)
            case "function":
                return self._result({**message, "tool_call_id": self._unanswered(message.get("name"))})
        self._wrong(f"role {shown(message.get('role'))}; wanted system, user, assistant or tool")
        return None

    def _text(self, content: Any, *, may_lack: bool = False) -> str:
        """The text of a message, given as a string or as parts of type text."""
        if isinstance(content, str):
            return content
        if content is None and may_lack:
            return ""
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
            if len(texts) == len(content):
                return "".join(texts)
        self._wrong(f"content is {_kind(content)}; wanted a text, or a list of parts of type text")
        return ""

    def _turn(self, message: Mapping[str, Any]) -> Turn:
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            self._wrong(f"tool_calls is {_kind(calls)}; wanted a list")
            calls = []
        if not calls and message.get("function_call"):  # the older form: one call, without an id
            calls = [
                {"id": f"function_call_{len(self._call_names)}_{self._place}", "function": message["function_call"]}
            ]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            self._wrong(f"reasoning_content is {_kind(reasoning)}; wanted a text")
            reasoning = ""
        text = self._text(message.get("content"), may_lack=bool(calls or reasoning))
        read = [self._call(call) for call in calls]
        return Turn(text, tuple(call for call in read if call is not None), reasoning)

    def _call(self, call: Any) -> ToolCall | BadCall | None:
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments, call_id = (
            (function.get("name"), function.get("arguments", "{}"), call.get("id"))
            if isinstance(function, dict)
            else (None, None, None)
        )
        if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, str | dict):
            self._wrong('a call wants {"id": ..., "function": {"name": ..., "arguments": "JSON text"}}')
            return None
        if call_id in self._call_names:
            self._wrong(f"there is a call {shown(call_id)} already")
        try:
            value = read_json(arguments or "{}", max_depth=MAX_JSON_DEPTH) if isinstance(arguments, str) else arguments
        except ValueError:
            value = None
        self._call_names[call_id] = name if isinstance(value, dict) else ""
        if isinstance(value, dict):
            return ToolCall(call_id, name, value)
        return BadCall(call_id, f"{name}({arguments})", "The arguments are no JSON object.")

    def _unanswered(self, name: Any) -> str | None:
        """Id of the last call of that tool without a result: results of the older form name the tool only."""
        return next((call_id for call_id in reversed(self._call_names) if self._call_names[call_id] == name), None)

    def _result(self, message: Mapping[str, Any]) -> ToolResult | None:
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or call_id not in self._call_names:
            known = ", ".join(map(shown, itertools.islice(self._call_names, _NAMED))) or "none"
            self._wrong(f"tool_call_id {shown(call_id)} answers no call before it (unanswered: {known})")
            return None
        return ToolResult(call_id, self._call_names.pop(call_id), self._text(message.get("content")))


def completion(
    turn: Turn,
    *,
    request_id: str,
    model: str,
    created: int,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    logprobs: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """The response to a request: the policy's turn in OpenAI's format.

    A tool call that cannot be parsed is not in `tool_calls`; its text is part of the content.
    """
    unreadable = [call.raw for call in turn.calls if isinstance(call, BadCall)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, [turn.text, *unreadable]))}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    calls = [call for call in turn.calls if isinstance(call, ToolCall)]
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in calls
        ]
    reason = "length" if turn.truncated else "tool_calls" if calls else "stop"
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": reason,
                "logprobs": None if logprobs is None else {"content": list(logprobs)},
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }


def token_logprobs(
    tokens: Sequence[int],
    logps: Sequence[float],
    text_of: Callable[[list[int]], str],
    bytes_of: Callable[[int], bytes | None] = lambda token: None,
) -> list[dict[str, Any]]:
    """OpenAI's list of tokens with their log-probabilities, and the id of each.

    Args:
        tokens: ids of the tokens.
        logps: natural log of the probability of each.
        text_of: ids -> text, in which U+FFFD stands for a part of a character.
        bytes_of: id -> bytes of a token whose text has U+FFFD; None where they are not known.
    """
    entries = []
    for token, logp in zip(tokens, logps, strict=True):
        text = text_of([token])
        written = bytes_of(token) if "\ufffd" in text else text.encode()
        entries.append(
            {
                "token": text,
                "token_id": token,
                "logprob": logp,
                "bytes": None if written is None else list(written),
                "top_logprobs": [],
            }
        )
    return entries


def up_to_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first occurrence of any of `stops`; None without one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing"}
    return "an empty list" if value == [] else kinds.get(type(value), "a number")
