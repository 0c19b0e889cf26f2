"""A served model as an agent: it requests each turn from an endpoint.

The model's text is interpreted as in training (`tbx_envs.chat.interpretation`), unless the server has already separated
calls and reasoning from it. Earlier turns are sent back in the server's own form: every call as a tool call with the
server's id, and every answer as the result of one, since servers reject a result without its call.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.turns import play_turns
from tbx_envs.chat.interpretation import bounded, interpret, schemas_of
from tbx_envs.chat.payload import Unreadable, decode, name_and_arguments
from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN
from tbx_envs.domains import AgentTurns
from tbx_envs.endpoints.client import ChatEndpoint
from tbx_envs.endpoints.costs import NOTHING_USED, TokenUsage, usage_counts
from tbx_envs.endpoints.responses import Completion, EndpointCall
from tbx_envs.episode import Episode
from tbx_envs.errors import ContextExceeded, EndpointError, EndpointRefused, PolicyFault
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.seeding import derive
from tbx_envs.tools.given_turn import free_id, next_call_number

_NUM_SEEDS = 2**31  # some servers accept no larger ones
_NO_NAME = "unreadable"  # tool name of a call that could not be parsed
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")  # servers reject a conversation with such a character in a tool name
_MAX_NAME_LENGTH = 64


@dataclasses.dataclass(slots=True)
class EndpointUse:
    """What an episode has used of its endpoint so far.

    Attributes:
        usage: tokens of all completions; `prompt` counts a conversation again each time it is sent.
        seconds: time spent waiting for completions.
        refused: True when the endpoint will answer no request until its settings are changed.
    """

    usage: TokenUsage = NOTHING_USED
    seconds: float = 0.0
    refused: bool = False


class EndpointAgent:
    """Runs attempts with a served model.

    Args:
        endpoint: client of the model server.
        concurrency: number of episodes that run at the same time; None is the endpoint's limit of concurrent requests.
        options: options of every episode; None is the defaults. Their `chat_format` is the syntax of calls in the
            model's text, for servers that do not parse them.
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
        """One episode for each attempt, as they end, including void ones. `usage` has `sampled_tokens`, `given_tokens`
        and `cached_tokens` where the server counts them, `seconds` has `policy`.

        When the caller stops early, pending requests are cancelled.

        Raises:
            PolicyFault: the endpoint answers no request at all (a wrong key, address or model): no attempt can succeed.
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
    """The agent of one attempt: yields turns and is sent the messages that answer each.

    A conversation that has outgrown the model's context ends as truncated; one that never fitted is a fault.

    Args:
        endpoint: client of the model server.
        attempt: attempt to make.
        opening: start of its episode.
        use: record that is kept up to date.
        chat_format: syntax of calls in the model's text.
        stop: event that another thread sets when the episode is no longer wanted.

    Raises:
        PolicyFault: the endpoint gave no usable answer.
    """
    chat = wire_messages(opening.messages)
    tools = {tool["function"]["name"] for tool in opening.tools}
    schemas = schemas_of(opening.tools)
    num_calls = next_call_number(opening.messages)
    sent = {call.id for said in opening.messages if isinstance(said, Turn) for call in said.calls}
    for number in itertools.count():
        seed = derive(attempt.seed, "policy", number) % _NUM_SEEDS
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
        ids = wire_ids(turn, completion, sent)
        sent |= set(ids.values())
        chat.append(wire_turn(turn, completion, tools, ids))
        chat += wire_messages(answers, ids)
        num_calls += len(turn.calls)


# --- from completions to turns ------------------------------------------------------------------------------


def turn_of(
    completion: Completion,
    chat_format: str = "hermes",
    *,
    first_call: int = 0,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> Turn:
    """The turn of a completion; no text of a model makes it raise.

    Where the server has parsed the calls, the text is not searched for calls: some servers leave them in the text as
    well, and a call must not be made twice.

    Args:
        completion: answer of the endpoint.
        chat_format: syntax of calls in the text.
        first_call: number in the first call's id.
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
    if completion.truncated and isinstance(last, BadCall):  # cut off by the limit, not a mistake of the model
        text = "\n".join(filter(None, [text, last.raw]))
        calls.pop()
    return bounded(Turn(text, tuple(calls), reasoning, completion.truncated), first_call)


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
        # The parser's own message and position are left out: both differ between versions of Python.
        raise Unreadable("The arguments are not valid JSON. Use double quotes and no trailing commas.") from None
    if arguments[end:].strip():
        raise Unreadable("There is more text after the arguments. Give one JSON object.")
    return value


# --- from messages to requests ------------------------------------------------------------------------------


def wire_messages(messages: Iterable[Message], sent_ids: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Messages in OpenAI's form.

    Args:
        messages: messages of the episode.
        sent_ids: id of a call in the episode -> the server's id of that call, where they differ.
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


def wire_turn(
    turn: Turn,
    completion: Completion | None = None,
    tools: Iterable[str] = (),
    sent_ids: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A turn as the message it was received as, so that the model reads what it wrote.

    A call that could not be parsed is sent back as a call too, with its text as the only argument: a server that had to
    parse it again would reject the conversation.

    Args:
        turn: turn of the agent.
        completion: completion that the turn was read from; None for a turn of the task's history.
        tools: names that the server knows; others are spelt so that it accepts them.
        sent_ids: id of a call in the episode -> the id that is sent for it (`wire_ids`), where they differ.
    """
    entry: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if completion is not None and completion.reasoning_field:
        entry[completion.reasoning_field] = completion.reasoning
    elif turn.reasoning:  # it was part of the text, and is sent back as such
        entry["content"] = f"{THINK_OPEN}\n{turn.reasoning}\n{THINK_CLOSE}\n\n{turn.text}"
    if turn.calls:
        entry["content"] = entry["content"] or None
        structured = completion.tool_calls if completion is not None else ()
        structured = structured if len(structured) == len(turn.calls) else ()  # one call stands for too many
        names = [call.name for call in structured] or [getattr(call, "name", _NO_NAME) for call in turn.calls]
        entry["tool_calls"] = [
            {
                "id": (sent_ids or {}).get(call.id, call.id),
                "type": "function",
                "function": {"name": name if name in tools else _wire_name(name), "arguments": _wire_arguments(call)},
            }
            for call, name in zip(turn.calls, names, strict=True)
        ]
    return entry


def wire_ids(turn: Turn, completion: Completion, sent: Collection[str]) -> dict[str, str]:
    """Id of each call of the turn in the episode -> the id to send for it, each once in the conversation.

    They are the server's, where each call has one of its own that was not sent before; some servers number their calls
    anew in each answer, and a strict one rejects the second `call_0`. Otherwise they are the episode's, with a number
    behind one that the server has taken.
    """
    given = [call.id for call in completion.tool_calls]
    ours = [call.id for call in turn.calls]
    if all(given) and len(set(given)) == len(given) == len(ours) and not set(given) & set(sent):
        return dict(zip(ours, given, strict=True))
    taken = set(sent)
    ids = {}
    for call_id in ours:
        ids[call_id] = free_id(call_id, taken)
        taken.add(ids[call_id])
    return ids


def _wire_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_MAX_NAME_LENGTH] or _NO_NAME


def _wire_arguments(call: ToolCall | BadCall) -> str:
    return json.dumps({"text": call.raw} if isinstance(call, BadCall) else dict(call.arguments), ensure_ascii=False)
