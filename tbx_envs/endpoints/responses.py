"""Reads the answer of a model's server: a completion, or the reason why there is none.

Reading never raises on what a server sent. Its texts are cleaned when its JSON is read, and the key is removed from
everything that is returned.
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tbx_envs.doors import read_json
from tbx_envs.endpoints.costs import TokenUsage
from tbx_envs.endpoints.transport import NoReply, Reply, Stopped
from tbx_envs.errors import ContextExceeded, EndpointError, EndpointRefused

RETRIED = frozenset({429, 500, 502, 503, 504})
REFUSED = frozenset({401, 403, 404})

CANCELLED = "cancelled before it was answered, since the run stops."

_SHOWN = 300  # characters of a server's text that a message repeats
# Only keys of at least this length are removed from completions: shorter ones ("EMPTY") may be words of the model.
_MIN_KEY_LENGTH = 16
_REDACTED = "[key]"
# Parts of messages for conversations that are too long: OpenAI, vLLM, SGLang, llama.cpp, and servers like them.
_TOO_LONG = (
    "context_length_exceeded",
    "context length",
    "context window",
    "context size",
    "prompt is too long",
    "maximum number of tokens",
)


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointCall:
    """A call that the server parsed out of the model's text.

    Attributes:
        id: id from the server, "" when it gave none.
        name: tool name, not checked.
        arguments: JSON text as the model wrote it, not parsed.
    """

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote.

    Attributes:
        text: text of the message; all that the model wrote when the server parses neither calls nor reasoning.
        tool_calls: calls in the order written.
        reasoning: reasoning that the server returned separately; "" when there is none.
        reasoning_field: field of the message that held it (`reasoning_content` or `reasoning`), to send it back there.
        finish_reason: reason that the server gave; None when it gave none.
        usage: token counts of the server.
    """

    text: str
    tool_calls: tuple[EndpointCall, ...]
    reasoning: str
    reasoning_field: str
    finish_reason: str | None
    usage: TokenUsage

    @property
    def truncated(self) -> bool:
        """True when a token limit cut it off."""
        return self.finish_reason == "length"


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Why a request gave no completion.

    Attributes:
        text: what happened, and what to do.
        retry: True when the request may be sent again.
        retry_after_s: wait before a retry that the server asks for; None when it does not.
        error: exception to raise when the request is given up.
    """

    text: str
    retry: bool = False
    retry_after_s: float | None = None
    error: type[EndpointError] = EndpointError


def read_answer(
    answer: Reply | NoReply | Stopped, *, key_variable: str | None, key: str | None
) -> Completion | Problem:
    """A completion, or why there is none; neither contains the key.

    Args:
        answer: result of `Transport.post`.
        key_variable: environment variable of the key, for messages; None when there is no key.
        key: the key to remove.
    """
    match answer:
        case Stopped():
            return Problem(CANCELLED)
        case NoReply(text, retry):
            return Problem(_without_key(text, key), retry)
    found = _read(answer, key)
    if isinstance(found, Problem):
        return found
    return _rejected(answer, found, key_variable, key) or _completion(answer, found, key)


def _read(reply: Reply, key: str | None) -> Mapping[str, Any] | Problem:
    """The JSON object of an answer."""
    try:
        found = read_json(reply.content)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if reply.status != 200:
        return {"error": {"message": _body_text(reply)}}
    return Problem(
        f"answered with {_shown(reply.content_type or 'no content type', key)} that is not a JSON object "
        f"({_shown(_body_text(reply), key)}). Check that base_url is that of an OpenAI-compatible API (it usually ends "
        f"with /v1)."
    )


def _body_text(reply: Reply) -> str:
    return reply.content.decode("utf-8", "replace") or "nothing"


def _rejected(reply: Reply, found: Mapping[str, Any], variable: str | None, key: str | None) -> Problem | None:
    """The problem that the server reports, if any; some servers report it with status 200."""
    error = found.get("error")
    if reply.status == 200 and not error:
        return None
    details = error if isinstance(error, dict) else {"message": error}
    code = details.get("code")
    status = code if reply.status == 200 and isinstance(code, int) else reply.status
    said = _shown(str(details.get("message") or _body_text(reply)), key)
    retry_after_s = _retry_after_s(reply)
    if status in (400, 413, 422) and any(sign in f"{code} {said}".lower() for sign in _TOO_LONG):
        return Problem(f"the conversation is too long for the model ({status}: {said}).", error=ContextExceeded)
    asks = f"; asks to wait {retry_after_s:g} s" if retry_after_s is not None else ""
    error_type = EndpointRefused if status in REFUSED else EndpointError
    return Problem(
        f"answered {status} ({said}{asks}). {_advice(status, variable)}", status in RETRIED, retry_after_s, error_type
    )


def _advice(status: int, variable: str | None) -> str:
    of_key = f"the key in {variable}" if variable else "api_key_env (it names no key)"
    advice = {
        400: "The server cannot use the request: correct what it names; extra_body can add and remove fields.",
        401: f"Correct {of_key}.",
        403: f"Check that {of_key} may use this model.",
        404: "Check base_url (it usually ends with /v1) and the model's name.",
        429: "Lower concurrency, or try later.",
    }
    return advice.get(status, "See the server's own log." if status >= 500 else "Check base_url.")


def _retry_after_s(reply: Reply) -> float | None:
    """Seconds that `Retry-After` asks for; a date is compared with the server's own clock."""
    if reply.retry_after is None:
        return None
    try:
        return max(float(reply.retry_after), 0.0)
    except ValueError:
        pass
    try:
        then, now = (email.utils.parsedate_to_datetime(text or "") for text in (reply.retry_after, reply.date))
        return max((then - now).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None


def _completion(reply: Reply, found: Mapping[str, Any], key: str | None) -> Completion | Problem:
    try:
        choice = found["choices"][0]
        reason = choice.get("finish_reason")
        if reason == "content_filter":
            return Problem("the server's content filter withheld what the model wrote.")
        if reason == "error":
            return Problem("the server stopped while the model wrote. See its own log.", retry=True)
        message = choice["message"]
        field = next((name for name in ("reasoning_content", "reasoning") if isinstance(message.get(name), str)), "")
        return Completion(
            text=_clean(_text(message.get("content")) or message.get("refusal") or "", key),
            tool_calls=tuple(_call(call, key) for call in _calls_of(message)),
            reasoning=_clean(message[field], key) if field else "",
            reasoning_field=field,
            finish_reason=reason if isinstance(reason, str) else None,
            usage=_usage(found.get("usage")),
        )
    except (LookupError, TypeError, AttributeError, ValueError):
        shown = _shown(_body_text(reply), key)
    return Problem(f"answered without a readable completion ({shown}). Check base_url and the server.")


def _calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The calls of a message; servers of the older API give the only one as `function_call`."""
    if calls := message.get("tool_calls"):
        return calls
    return [{"function": message["function_call"]}] if message.get("function_call") else []


def _call(call: Mapping[str, Any], key: str | None) -> EndpointCall:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some servers parse the JSON themselves
        arguments = json.dumps(arguments)
    name, call_id = function["name"] or "", call.get("id") or ""
    return EndpointCall(_clean(call_id, key), _clean(name, key), _clean(arguments or "", key))


def _text(content: Any) -> str:
    """The text of a message's content, which is text, null, or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _clean(text: str, key: str | None) -> str:
    """The text as it may go into records: without the key."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not text")
    return _without_key(text, key) if key and len(key) >= _MIN_KEY_LENGTH else text


def _shown(text: str, key: str | None) -> str:
    """The beginning of a server's text, on one line; the key is removed before anything is cut."""
    line = " ".join(_without_key(text, key).split())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."


def _usage(usage: Any) -> TokenUsage:
    if not isinstance(usage, dict):
        return TokenUsage()
    of_prompt, of_completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return TokenUsage(
        prompt=_tokens(usage, "prompt_tokens"),
        cached=_tokens(of_prompt, "cached_tokens"),
        completion=_tokens(usage, "completion_tokens"),
        reasoning=_tokens(of_completion, "reasoning_tokens"),
    )


def _tokens(counts: Any, name: str) -> int | None:
    count = counts.get(name) if isinstance(counts, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def _without_key(text: str, key: str | None) -> str:
    return text.replace(key, _REDACTED) if key else text
