"""What a model's server answered, read: a completion, or why there is none.

Reading never raises on what a server sent. The key is taken out of everything before it goes anywhere.
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
from collections.abc import Mapping
from typing import Any

from tbx_envs.endpoints.costs import TokenUsage
from tbx_envs.endpoints.transport import NoReply, Reply, Stopped
from tbx_envs.errors import ContextExceeded, EndpointError, EndpointRefused

RETRIED = frozenset({429, 500, 502, 503, 504})
REFUSED = frozenset({401, 403, 404})

_SHOWN = 300  # characters of a server's words that a message repeats
# A key at least this long is surely a key: shorter ones ("EMPTY") may be words that a model writes.
_SURELY_A_KEY = 16
_TAKEN_OUT = "[key]"
# How servers say that a conversation is too long: OpenAI, vLLM, SGLang, llama.cpp, and those that copy them.
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
    """A call that the server has taken out of the model's text.

    Attributes:
        id: the server's, "" when it gave none.
        name: of the tool; not checked.
        arguments: JSON text as the model wrote it; not read.
    """

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote.

    Attributes:
        text: its words; everything it wrote when the server takes neither calls nor reasoning out of it.
        tool_calls: in the order written.
        reasoning: as the server gave it apart from the words; "" when it did not.
        reasoning_field: where it stood in the message (`reasoning_content` or `reasoning`), to send it back there.
        finish_reason: in the server's words; None when it gave none.
        usage: tokens as the server counted them.
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
        words: what happened, and what to do.
        again: True when the request may be sent again.
        patience_s: how long the server asks to wait before that; None when it does not say.
        error: what to raise in the end.
    """

    words: str
    again: bool = False
    patience_s: float | None = None
    error: type[EndpointError] = EndpointError


def read_answer(
    answer: Reply | NoReply | Stopped, *, key_variable: str | None, key: str | None
) -> Completion | Problem:
    """A completion, or why there is none; nothing of it contains the key."""
    match answer:
        case Stopped():
            return Problem("taken back before it was answered, since the run stops.")
        case NoReply(words, again):
            return Problem(_without_key(words, key), again)
    found = _read(answer, key)
    if isinstance(found, Problem):
        return found
    return _rejected(answer, found, key_variable, key) or _completion(answer, found, key)


def _read(reply: Reply, key: str | None) -> Mapping[str, Any] | Problem:
    """The JSON object of an answer."""
    try:
        found = json.loads(reply.content)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    if reply.status != 200:
        return {"error": {"message": _body_text(reply)}}
    return Problem(
        f"answered with {_shown(reply.content_type or 'no content type', key)} that is no JSON object "
        f"({_shown(_body_text(reply), key)}). Check that base_url is that of an OpenAI-compatible API (it usually ends "
        f"with /v1)."
    )


def _body_text(reply: Reply) -> str:
    return reply.content.decode("utf-8", "replace") or "nothing"


def _rejected(reply: Reply, found: Mapping[str, Any], variable: str | None, key: str | None) -> Problem | None:
    """The problem when the server says that there is one; some say so with status 200."""
    error = found.get("error")
    if reply.status == 200 and not error:
        return None
    details = error if isinstance(error, dict) else {"message": error}
    code = details.get("code")
    status = code if reply.status == 200 and isinstance(code, int) else reply.status
    said = _shown(str(details.get("message") or _body_text(reply)), key)
    patience_s = _patience_s(reply)
    if status in (400, 413, 422) and any(sign in f"{code} {said}".lower() for sign in _TOO_LONG):
        return Problem(f"the conversation is too long for the model ({status}: {said}).", error=ContextExceeded)
    asks = f"; asks to wait {patience_s:g} s" if patience_s is not None else ""
    refused = EndpointRefused if status in REFUSED else EndpointError
    return Problem(
        f"answered {status} ({said}{asks}). {_advice(status, variable)}", status in RETRIED, patience_s, refused
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


def _patience_s(reply: Reply) -> float | None:
    """What `Retry-After` asks for: seconds, or a moment, which is compared with the server's own clock."""
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
            return Problem("the server broke off while the model wrote. See its own log.", again=True)
        message = choice["message"]
        field = next((name for name in ("reasoning_content", "reasoning") if isinstance(message.get(name), str)), "")
        return Completion(
            text=_clean(_text(message.get("content")) or message.get("refusal") or "", key),
            tool_calls=tuple(_call(call, key) for call in message.get("tool_calls") or ()),
            reasoning=_clean(message[field], key) if field else "",
            reasoning_field=field,
            finish_reason=reason if isinstance(reason, str) else None,
            usage=_usage(found.get("usage")),
        )
    except (LookupError, TypeError, AttributeError, ValueError):
        shown = _shown(_body_text(reply), key)
    return Problem(f"answered without a completion that can be read ({shown}). Check base_url and the server.")


def _call(call: Mapping[str, Any], key: str | None) -> EndpointCall:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some servers read it themselves
        arguments = json.dumps(arguments)
    name, call_id = function["name"] or "", call.get("id") or ""
    return EndpointCall(_clean(call_id, key), _clean(name, key), _clean(arguments or "", key))


def _text(content: Any) -> str:
    """The words of a message's content: text, nothing, or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _clean(words: str, key: str | None) -> str:
    """The words as they may go into records: no half of a surrogate pair, no key."""
    if not isinstance(words, str):
        raise TypeError(f"{words!r} is no text")
    if not words.isascii():
        words = words.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _without_key(words, key) if key and len(key) >= _SURELY_A_KEY else words


def _shown(words: str, key: str | None) -> str:
    """The beginning of a server's words, on one line; the key is taken out before anything is cut."""
    line = " ".join(_without_key(words, key).split())
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


def _without_key(words: str, key: str | None) -> str:
    return words.replace(key, _TAKEN_OUT) if key else words
