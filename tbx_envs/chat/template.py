"""ChatTemplate: messages become tokens by the model's own template, and only new text is ever tokenised.

A conversation is the concatenation

    opening(messages, tools)                      prompt, up to where the policy starts to write
    the policy's tokens, as sampled               ends with the end-of-turn token
    continuation(results or the user's words)     from right after that token to where the policy writes again
    ...

and it must be what the template renders for the whole conversation, separators after the end-of-turn token
included (a model stops *at* that token; what the template puts behind it would otherwise be lost). A
continuation is taken from a fixed dummy conversation: rendered with the new messages, minus rendered
without. That is right only for templates that leave earlier messages alone, so construction checks it on
conversations with reasoning, several calls, several results and several user turns, and refuses the template
otherwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Message, Text, ToolCall, ToolResult, Turn, to_chat

_USER = Text("user", "a")
_MARK = "zqz"  # a reply that can be found again in what was rendered

_CALLS = (
    ToolCall("call_0", "find", {"name": "Åse </tool_call>", "limit": 3}),
    ToolCall("call_1", "note", {"text": 'say "hi" {now}', "tags": ["a", {"b": None}]}),
    ToolCall("call_2", "close", {}),
)


def _probe_conversation(reasoning: bool) -> tuple[Message, ...]:
    def turn(text: str, *calls: ToolCall) -> Turn:
        return Turn(text=text, calls=calls, reasoning="I think so." if reasoning else "")

    return (
        Text("system", "Follow the rules."),
        Text("user", "Good morning"),
        turn("Who are you?"),
        Text("user", "Åse, née 😀"),
        turn("", *_CALLS[:2]),
        ToolResult("call_0", "find", '[{"id": 1}]'),
        ToolResult("call_1", "note", "ok"),
        turn("Closing.", _CALLS[2]),
        ToolResult("call_2", "close", "refused: closed already", "refused"),
        turn("It is closed already. Anything else?"),
        Text("user", "No"),
        turn("Bye. <DONE>"),
    )


def _words_that_matter(conversation: tuple[Message, ...]) -> list[str]:
    """What must appear in the rendered conversation; system text may be left out, a policy can be made for
    one domain."""
    words: list[str] = []
    for message in conversation:
        if isinstance(message, Turn):
            words += [message.text, *(call.name for call in message.calls if isinstance(call, ToolCall))]
        elif message != conversation[0]:
            words.append(message.text)
    return words


class ChatTemplate:
    """The chat template of a tokenizer, as pieces that are only ever appended.

    Args:
        tokenizer: a transformers tokenizer with a chat template; only `apply_chat_template`, `encode`,
            `decode` and `all_special_ids` / `added_tokens_decoder` of it are used.

    Attributes:
        end_of_turn_ids: tokens with which the policy ends a turn.
        opens_reasoning: the generation prompt ends with `<think>`, so the policy starts inside its reasoning.

    Raises:
        ConfigError: the template cannot be rendered, has no end-of-turn token, or does not leave earlier
            messages as they were.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._continuation = functools.lru_cache(maxsize=4096)(self._render_continuation)
        self._opening = functools.lru_cache(maxsize=256)(self._render_opening)
        self._head = functools.lru_cache(maxsize=1024)(self._render_head)
        self._prompt = self._render([_USER], generation_prompt=True)
        self.opens_reasoning = self._prompt.rstrip().endswith(THINK_OPEN)
        # A prompt that ends with an empty reasoning asks the policy for none.
        self._may_reason = not self._prompt.rstrip().endswith(THINK_CLOSE)
        end_of_turn, self._end_of_turn = self._find_end_of_turn()
        self.end_of_turn_ids = frozenset({end_of_turn})
        if self._may_reason:
            self._check(_probe_conversation(reasoning=True))
        if not self.opens_reasoning:
            self._check(_probe_conversation(reasoning=False))

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The prompt: `messages` and `tools`, up to where the policy starts to write."""
        return list(self._opening(json.dumps(to_chat(messages)), json.dumps(tools) if tools else ""))

    def continuation(self, messages: Sequence[Message]) -> list[int]:
        """What follows the policy's end-of-turn token: its separator, `messages`, the next generation prompt.

        Args:
            messages: the results of the turn's calls, or the user's words; never a turn of the policy.
        """
        return list(self._continuation(tuple(messages)))

    def policy_turn(self, turn: Turn) -> list[int]:
        """The tokens of `turn` as the template renders it, end-of-turn token included: for demonstrations.

        Never for what a policy sampled, which is kept as it is.
        """
        rendered = self._render([_USER, turn])
        if not rendered.startswith(self._prompt):
            raise ConfigError(
                f"the chat template renders an answer as {_tail(rendered)!r}, which does not start where its "
                f"generation prompt {_tail(self._prompt)!r} ends. {_WHAT_TO_DO}"
            )
        return self._encode(rendered[len(self._prompt) : self._end_of_last_turn(rendered)])

    def decode(self, ids: Sequence[int]) -> str:
        """The raw text of a sampled turn: without its end-of-turn token, markers such as `<tool_call>` kept.

        When the generation prompt opened the reasoning, the text starts with the `<think>` that the policy
        did not have to write, so that a reader knows that it is reasoning, closed or not.
        """
        kept = ids[:-1] if ids and ids[-1] in self.end_of_turn_ids else ids
        text = self._tokenizer.decode(kept, skip_special_tokens=False)
        return THINK_OPEN + text if self.opens_reasoning else text

    def _render_opening(self, chat: str, tools: str) -> tuple[int, ...]:
        return tuple(self._encode(self._render_chat(json.loads(chat), json.loads(tools) if tools else None)))

    def _render_continuation(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        # Some templates look at the calls that results belong to, so the dummy turn makes those very calls.
        calls = tuple(ToolCall(m.call_id, m.name, {}) for m in messages if isinstance(m, ToolResult))
        head = self._head(tuple((call.id, call.name) for call in calls))
        whole = self._render([_USER, self._dummy_turn(calls), *messages], generation_prompt=True)
        if not whole.startswith(head):
            raise ConfigError(
                f"the chat template renders a conversation as {_tail(head)!r}, and differently once "
                f"{len(messages)} message(s) follow. {_WHAT_TO_DO}"
            )
        return tuple(self._encode(whole[len(head) :]))

    def _render_head(self, calls: tuple[tuple[str, str], ...]) -> str:
        turn = self._dummy_turn(tuple(ToolCall(call_id, name, {}) for call_id, name in calls))
        rendered = self._render([_USER, turn])
        return rendered[: self._end_of_last_turn(rendered)]

    def _dummy_turn(self, calls: tuple[ToolCall, ...]) -> Turn:
        return Turn(text="" if calls else "a", calls=calls, reasoning="a" if self._may_reason else "")

    def _end_of_last_turn(self, rendered: str) -> int:
        return rendered.rindex(self._end_of_turn) + len(self._end_of_turn)

    def _find_end_of_turn(self) -> tuple[int, str]:
        """The marker that the template puts right behind an answer: its id and its text."""
        rendered = self._render([_USER, Turn(text=_MARK, reasoning=_MARK if self.opens_reasoning else "")])
        behind = rendered[rendered.rindex(_MARK) + len(_MARK) :] if _MARK in rendered else ""
        ids = self._encode(behind) if behind else []
        markers = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        if not ids or ids[0] not in markers:
            raise ConfigError(
                f"the chat template puts {behind!r} behind an answer, which does not start with a special "
                f"token of the tokenizer; the policy could not end its turn. Use a template that ends "
                f"turns with one."
            )
        return ids[0], self._tokenizer.decode([ids[0]], skip_special_tokens=False)

    def _check(self, conversation: tuple[Message, ...]) -> None:
        """Compares, before each turn of the policy, what was appended with the whole conversation."""
        ids: list[int] = []
        start = 0
        for place, message in enumerate(conversation):
            if not isinstance(message, Turn):
                continue
            new = conversation[start:place]
            ids += self.continuation(new) if ids else self.opening(new)
            whole = self._encode(self._render(conversation[:place], generation_prompt=True))
            if ids != whole:
                self._refuse(place, ids, whole)
            ids += self.policy_turn(message)
            start = place + 1
        rendered = self._render(conversation)
        lost = [words for words in _words_that_matter(conversation) if words not in rendered]
        if lost:
            raise ConfigError(
                f"the chat template leaves out {', '.join(map(repr, lost))}, so the policy would never read it. "
                f"Use a template that renders users, tool calls and tool results."
            )

    def _refuse(self, place: int, ids: list[int], whole: list[int]) -> None:
        same = next((i for i, pair in enumerate(zip(ids, whole, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(ids), len(whole)) if same is None else same
        appended, rendered = (self._tokenizer.decode(part[same : same + 12]) for part in (ids, whole))
        raise ConfigError(
            f"the chat template changes earlier messages: with {place} messages, token {same} starts "
            f"{rendered!r} in the whole conversation and {appended!r} when appended. {_WHAT_TO_DO}"
        )

    def _render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        return self._render_chat(to_chat(messages), generation_prompt=generation_prompt)

    def _render_chat(
        self,
        chat: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                chat, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except (jinja2.TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in chat)
            raise ConfigError(
                f"the tokenizer's chat template cannot render [{roles}]: {error}. Use a template that "
                f"knows system, user, assistant and tool messages."
            ) from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


_WHAT_TO_DO = (
    "Turns could not be appended to what was sampled. Use a template that leaves earlier messages, "
    "reasoning included, as they were."
)


def _tail(text: str) -> str:
    return text[-60:]
