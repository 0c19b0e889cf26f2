"""A served model as a agent: an agent that asks an endpoint for each of its turns.

What the model writes is read as in training (`tbx_envs.chat.interpretation`), unless the server has taken calls and
reasoning out of it already. What it has written goes back to it in the server's own form: every call as a tool call,
with the server's id, and every answer as the result of one, since servers refuse a result without its call.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.turns import play_turns
from tbx_envs.chat.interpretation import interpret, schemas_of
from tbx_envs.chat.payload import Unreadable, decode, name_and_arguments
from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN
from tbx_envs.domains import AgentTurns
from tbx_envs.endpoints.client import ChatEndpoint
from tbx_envs.endpoints.costs import NOTHING_USED, TokenUsage, usage_counts
from tbx_envs.endpoints.responses import Completion, EndpointCall
from tbx_envs.episode import Episode
from tbx_envs.errors import ContextExceeded, EndpointError, EndpointRefused, PolicyFault
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.seeding import derive

_SEEDS = 2**31  # some servers take no larger ones
_NO_NAME = "unreadable"  # stands for the tool of a call that could not be read
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")  # servers refuse a conversation with such a tool name in it
_LONGEST_NAME = 64


@dataclasses.dataclass(slots=True)
class EndpointUse:
    """What an episode has used of its endpoint so far.

    Attributes:
        usage: tokens of all completions; `prompt` counts a conversation again each time it is sent.
        seconds: waited for completions.
        refused: the endpoint will answer nobody until its settings are changed.
    """

    usage: TokenUsage = NOTHING_USED
    seconds: float = 0.0
    refused: bool = False


class EndpointAgent:
    """Plays attempts with a served model.

    Args:
        endpoint: the model.
        concurrency: number of episodes that run at the same time; None is as many as the endpoint takes requests.
        options: how every episode is set up; its `chat_format` is how calls are written in the model's text, where the
            server does not parse them. None is the defaults.
    """

    def __init__(
        self,
        endpoint: ChatEndpoint,
        *,
        concurrency: int | None = None,
        options: EpisodeOptions | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._options = options or EpisodeOptions()
        self._concurrency = endpoint.config.concurrency if concurrency is None else concurrency

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, as they end, void ones too. `usage` has `sampled_tokens`, `given_tokens` and
        `cached_tokens` where the server counts them, `seconds` has `policy`.

        When the caller stops early, requests on their way are taken back.

        Raises:
            PolicyFault: the endpoint refuses everybody (a wrong key, address or model): no attempt can succeed.
        """
        stop = threading.Event()
        uses: dict[Attempt, EndpointUse] = {}

        def make_agent(attempt: Attempt, opening: Opening) -> AgentTurns:
            use = uses[attempt] = EndpointUse()
            chat_format = self._options.chat_format
            return endpoint_agent(self._endpoint, attempt, opening, use, chat_format=chat_format, stop=stop)

        episodes = play_turns(attempts, make_agent, concurrency=self._concurrency, stop=stop, options=self._options)
        try:
            for episode in episodes:
                use = uses.pop(Attempt(episode.uid, episode.attempt, episode.seed), EndpointUse())
                if use.refused and episode.fault is not None:
                    raise PolicyFault(episode.fault.message)
                yield dataclasses.replace(
                    episode,
                    usage={**episode.usage, **usage_counts(use.usage)},
                    seconds={**episode.seconds, "policy": use.seconds},
                )
        finally:
            episodes.close()


def endpoint_agent(
    endpoint: ChatEndpoint,
    attempt: Attempt,
    opening: Opening,
    use: EndpointUse,
    *,
    chat_format: str = "hermes",
    stop: threading.Event | None = None,
) -> AgentTurns:
    """The agent of one attempt: yields turns, is sent what answers them.

    A conversation that has outgrown the model's context ends as truncated; one that never fitted is a fault.

    Args:
        use: kept up to date.
        stop: set by another thread when nobody waits for the episode any more.

    Raises:
        PolicyFault: the endpoint gave no usable answer.
    """
    chat = wire_messages(opening.messages)
    tools = {tool["function"]["name"] for tool in opening.tools}
    schemas = schemas_of(opening.tools)
    num_calls = sum(len(said.calls) for said in opening.messages if isinstance(said, Turn))
    for number in itertools.count():
        seed = derive(attempt.seed, "policy", number) % _SEEDS
        began = time.perf_counter()
        try:
            completion = endpoint.complete(chat, tools=opening.tools, seed=seed, stop=stop)
        except ContextExceeded as error:
            if number == 0:
                raise PolicyFault(f"task {attempt.uid}: {error} It did not fit from the beginning.") from error
            yield Turn(truncated=True)
            return
        except EndpointError as error:
            use.refused = isinstance(error, EndpointRefused)
            raise PolicyFault(f"task {attempt.uid}: {error}") from error
        finally:
            use.seconds += time.perf_counter() - began
        use.usage += completion.usage
        turn = turn_of(completion, chat_format, first_call=num_calls, schemas=schemas)
        answers = yield turn
        chat.append(wire_turn(turn, completion, tools))
        sent_ids = zip((call.id for call in turn.calls), _wire_ids(turn, completion), strict=True)
        chat += wire_messages(answers, dict(sent_ids))
        num_calls += len(turn.calls)


# --- what came, read ----------------------------------------------------------------------------------------


def turn_of(
    completion: Completion,
    chat_format: str = "hermes",
    *,
    first_call: int = 0,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> Turn:
    """The turn that a completion says; never raises on what a model wrote.

    Where the server has taken calls out, the words are not searched for calls: some servers leave them in as well,
    and a call must not be made twice.

    Args:
        first_call: number of the first call's id.
        schemas: tool -> JSON schema of its arguments (`tbx_envs.chat.interpretation.interpret`).
    """
    turn = interpret(
        completion.text, chat_format, first_call=first_call, truncated=completion.truncated, schemas=schemas or {}
    )
    reasoning = "\n".join(filter(None, [completion.reasoning.strip(), turn.reasoning]))
    if not completion.tool_calls:
        return dataclasses.replace(turn, reasoning=reasoning)
    calls = [_read_call(call, f"call_{number}") for number, call in enumerate(completion.tool_calls, first_call)]
    text, last = turn.text, calls[-1]
    if completion.truncated and isinstance(last, BadCall):  # cut off, which is no mistake of the model
        text = "\n".join(filter(None, [text, last.raw]))
        calls.pop()
    return Turn(text, tuple(calls), reasoning, completion.truncated)


def _read_call(call: EndpointCall, call_id: str) -> ToolCall | BadCall:
    try:
        arguments = _decoded(call.arguments) if call.arguments.strip() else {}
        return ToolCall(call_id, *name_and_arguments({"name": call.name, "arguments": arguments}))
    except Unreadable as problem:
        return BadCall(call_id, f"{call.name}({call.arguments})", str(problem))


def _decoded(arguments: str) -> Any:
    try:
        value, end = decode(arguments, 0)
    except json.JSONDecodeError:
        # Neither the parser's words nor its position: both differ between versions of Python.
        raise Unreadable("The arguments are not valid JSON. Use double quotes and no trailing commas.") from None
    if arguments[end:].strip():
        raise Unreadable("There is more text after the arguments. Give one JSON object.")
    return value


# --- what goes back -----------------------------------------------------------------------------------------


def wire_messages(messages: Iterable[Message], sent_ids: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Messages as OpenAI wants them.

    Args:
        sent_ids: id of a call in the episode -> the id that the server knows it by, where it is another one.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        match message:
            case Text(role, text):
                chat.append({"role": role, "content": text})
            case ToolResult(call_id, name, text):
                call_id = (sent_ids or {}).get(call_id, call_id)
                of = {"name": name} if name else {}
                chat.append({"role": "tool", "tool_call_id": call_id, **of, "content": text})
            case Turn():
                chat.append(wire_turn(message))
    return chat


def wire_turn(turn: Turn, completion: Completion | None = None, tools: Iterable[str] = ()) -> dict[str, Any]:
    """A turn as the message it came in, so that the model reads what it wrote.

    A call that could not be read goes back as a call too, with what stood there as its only argument: a server would
    refuse the conversation if it had to read it once more.

    Args:
        completion: that it was read from; None for a turn of the task's history.
        tools: names that the server knows; others are spelt so that it accepts them.
    """
    entry: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if completion is not None and completion.reasoning_field:
        entry[completion.reasoning_field] = completion.reasoning
    elif turn.reasoning:  # it stood in the words, and goes back there
        entry["content"] = f"{THINK_OPEN}\n{turn.reasoning}\n{THINK_CLOSE}\n\n{turn.text}"
    if turn.calls:
        entry["content"] = entry["content"] or None
        structured = completion.tool_calls if completion is not None else ()
        names = [call.name for call in structured] or [getattr(call, "name", _NO_NAME) for call in turn.calls]
        entry["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name if name in tools else _wire_name(name), "arguments": _wire_arguments(call)},
            }
            for call, call_id, name in zip(turn.calls, _wire_ids(turn, completion), names, strict=True)
        ]
    return entry


def _wire_ids(turn: Turn, completion: Completion | None) -> list[str]:
    """The server's ids of the turn's calls where it gave each its own, else those of the episode."""
    given = [call.id for call in completion.tool_calls] if completion is not None else []
    return given if all(given) and len(set(given)) == len(given) == len(turn.calls) else [c.id for c in turn.calls]


def _wire_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME] or _NO_NAME


def _wire_arguments(call: ToolCall | BadCall) -> str:
    return json.dumps({"text": call.raw} if isinstance(call, BadCall) else dict(call.arguments), ensure_ascii=False)
