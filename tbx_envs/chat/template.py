"""ChatTemplate: turns messages into tokens with the model's own template, and only ever tokenises new text.

A conversation is the concatenation

    opening(messages, tools)                      prompt, up to where the policy starts to write
    the policy's tokens, as sampled               ends with the end-of-turn token
    continuation(results or the user's words)     from right after that token to where the policy writes again
    ...

and everything given must be what the template renders there in the whole conversation, including the separators after
the end-of-turn token (a model stops *at* that token; what the template puts after it would otherwise be lost). A
continuation is computed from a fixed dummy conversation: rendered with the new messages, minus rendered without them.
When a ChatTemplate is constructed, `tbx_envs.chat.template_check` verifies this and rejects any other template.

How templates differ from that ideal, and what is done:

- **They drop earlier reasoning** (Qwen3, Qwen3.5, Qwen3.6: before the user's last message). The policy's tokens stay as
  sampled, reasoning included, and so does the `<think>` that a generation prompt opened: the model is trained on what
  it saw. Everything given is the same with and without that reasoning, which the check verifies. A server that renders
  each request from scratch shows the model less; the attribute `reasoning` says so.
- **They allow one call a turn** (Llama 3.1 and 3.2), though the policy may write several: what it wrote stays, and the
  results are rendered one after the other. In a given history, such a turn becomes several, each with its result.
  **They drop words beside a call** (the same models): in a given history they become a message of their own.
- **They allow one system message** (Qwen3.5 and later raise on a second, Llama reads it as the user's): those at the
  beginning are joined with a blank line.
- **Text given in the assistant's name** (`Text("assistant", ...)`, direct responses of tools) is rendered as an
  assistant's message in last position, and stays that way.
- **Unreadable calls** stay as sampled like everything else; the answer to one is a tool result like others.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tbx_envs.chat.control_text import ControlText
from tbx_envs.chat.detection import PROBE_TOOLS, written_format
from tbx_envs.chat.exact_tokens import exactly_decoded, exactly_encoded
from tbx_envs.chat.interpretation import interpret
from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN
from tbx_envs.chat.sized_cache import SizedCache
from tbx_envs.chat.template_check import WHAT_TO_DO, check_template
from tbx_envs.chat.template_text import FIXED_NOW, TemplateText
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Message, Text, ToolCall, ToolResult, Turn, to_chat

_USER = Text("user", "a")
_MARK, _OTHER_MARK = "zqz", "xqx"  # words that can be found in the rendered text
_TWO_CALLS = (ToolCall("call_0", "find", {}), ToolCall("call_1", "note", {}))

_CACHE_BYTES = 64 * 2**20  # of rendered openings and continuations, of all conversations together

# Tokens with which models end a turn regardless of their template: the end of the text, and for Llama the end of a
# message that a tool is expected to answer. Servers stop there too.
_ALSO_END_A_TURN = ("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")


class ChatTemplate:
    """The chat template of a tokenizer, as pieces that are only ever appended.

    Args:
        tokenizer: transformers tokenizer with a chat template.
        chat_format: name of the format in which the policy writes calls; None takes the template's.
        options: variables of the template, such as `{"enable_thinking": False}`.
        now: moment whose date the template shows, if it shows one; never today.
        splits_control_text: True to tokenise control strings in given text (`<|im_end|>` in a tool's result) as
            ordinary text (`tbx_envs.chat.control_text`); False for the tokens that a server makes of the rendered text.

    Attributes:
        chat_format: name of the format for `tbx_envs.chat.interpretation.interpret`.
        end_of_turn_ids: tokens with which the policy ends a turn: the template's, the tokenizer's end-of-sequence
            token, and other end tokens in its vocabulary.
        generation_prompt: text in front of every turn of the policy.
        opens_reasoning: True when the generation prompt ends with `<think>`, so the policy starts inside reasoning.
        may_reason: False when the generation prompt ends with empty reasoning: the policy is not to reason.
        reasoning: what the template does with the reasoning of a turn once the user has answered it.

    Raises:
        ConfigError: the template cannot be rendered, has no end-of-turn token, writes calls in no known format, or
            changes earlier messages in other ways than by dropping their reasoning; or the tokenizer cannot tokenise
            control strings as ordinary text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_format: str | None = None,
        options: Mapping[str, Any] | None = None,
        now: datetime.datetime = FIXED_NOW,
        splits_control_text: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._control = ControlText(tokenizer) if splits_control_text else None
        self._text = TemplateText(tokenizer, options or {}, now)
        self._tokens: SizedCache[tuple[int, ...]] = SizedCache(_CACHE_BYTES)
        self._texts: SizedCache[tuple[str, str]] = SizedCache(_CACHE_BYTES)
        self._base, self._prompt = self._find_prompts()
        self.generation_prompt = self._prompt[len(self._base) :]
        self.opens_reasoning = self._prompt.rstrip().endswith(THINK_OPEN)
        self.may_reason = not self._prompt.rstrip().endswith(THINK_CLOSE)
        end_of_turn, self._end_of_turn = self._find_end_of_turn()
        self.end_of_turn_ids = frozenset({end_of_turn, *self._other_ends()})
        if chat_format is not None:
            interpret("", chat_format)  # raises on an unknown format before an error blames the template
        self.chat_format: str = chat_format or written_format(self._text.render)
        self.reasoning: Literal["ignored", "kept", "dropped"] = self._find_reasoning()
        renders_one, renders_two = (self._renders(Turn(calls=_TWO_CALLS[:number])) for number in (1, 2))
        self._takes_one_call = renders_one and not renders_two
        self._drops_words = _MARK not in self.render([_USER, Turn(text=_MARK, calls=_TWO_CALLS[:1])])
        self._takes_one_system = self._misreads_a_second_system()
        check_template(self)

    def opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
    ) -> list[int]:
        """The prompt: `messages` and `tools`, up to where the policy starts to write.

        Args:
            messages: messages of system and user, with a history if there is one.
            tools: OpenAI-function style dictionaries.
            now: moment in the task's world; None takes the template's.
        """
        said = json.dumps(to_chat(self.adapted(self._marked(messages))))
        offered = tools if self._control is None or tools is None else self._control.json(tools)
        key = (said, json.dumps(list(offered)) if offered else "", now)
        num_chars = len(key[0]) + len(key[1])
        return list(self._tokens.get(key, lambda: self._encoded_opening(*key), lambda ids: _size(num_chars, ids)))

    def continuation(self, messages: Sequence[Message]) -> list[int]:
        """What follows the policy's end-of-turn token: its separator, `messages`, the next generation prompt.

        Args:
            messages: results of the turn's calls, text in the assistant's name, the user's message; never a turn of
                the policy.
        """
        key = tuple(messages)
        num_chars = sum(len(message.text) for message in key)
        return list(self._tokens.get(key, lambda: self._encoded_continuation(key), lambda ids: _size(num_chars, ids)))

    def policy_turn(self, turn: Turn) -> list[int]:
        """The tokens of `turn` as the template renders it, end-of-turn token included: for demonstrations.

        Not for sampled turns, whose tokens are kept as they are.

        Raises:
            ConfigError: the template cannot render this turn as one message.
        """
        (marked,) = self._marked([turn])
        assert isinstance(marked, Turn)
        return self._encode_marked(self.turn_text(marked))

    def decode(self, ids: Sequence[int]) -> str:
        """The raw text of a sampled turn: without its end-of-turn token, markers such as `<tool_call>` kept.

        When the generation prompt opened the reasoning, the text starts with the `<think>` that the policy did not
        have to write, so that it is parsed as reasoning, closed or not.
        """
        kept = ids[:-1] if ids and ids[-1] in self.end_of_turn_ids else ids
        text = exactly_decoded(self._tokenizer, kept)
        return THINK_OPEN + text if self.opens_reasoning else text

    # --- the same as text -----------------------------------------------------------------------------------

    def continuation_text(self, messages: Sequence[Message]) -> str:
        """As `continuation`, before it is tokenised."""
        # Some templates look at the calls that results belong to, so the dummy turn makes the same calls.
        calls = tuple((message.call_id, message.name) for message in messages if isinstance(message, ToolResult))
        if self._takes_one_call:
            calls = calls[:1]
        heads = self._texts.get(calls, lambda: self._render_heads(calls), lambda made: 4 * sum(map(len, made)))
        whole = self.render([_USER, self._dummy_turn(calls), *messages], generation_prompt=True)
        head = next((head for head in heads if whole.startswith(head)), None)
        if head is None:
            raise ConfigError(
                f"the chat template renders a conversation as {_tail(heads[0])!r}, and differently once "
                f"{len(messages)} message(s) follow. {WHAT_TO_DO}"
            )
        return whole[len(head) :]

    def turn_text(self, turn: Turn) -> str:
        """As `policy_turn`, before it is tokenised."""
        (*others, _) = self.adapted([turn])
        if others:
            limits = "one call a turn" if self._takes_one_call else "no words beside a call"
            raise ConfigError(
                f"the chat template takes {limits}, and the turn has {len(turn.calls)} call(s) and the words "
                f"{turn.text[:40]!r}. Demonstrate it as turns of their own, each answered."
            )
        rendered = self.render([_USER, turn])
        if not rendered.startswith(self._prompt):
            raise ConfigError(
                f"the chat template renders an answer as {_tail(rendered)!r}, which does not start where its "
                f"generation prompt {_tail(self._prompt)!r} ends. {WHAT_TO_DO}"
            )
        return rendered[len(self._prompt) : self._end_of_last_turn(rendered)]

    def turn_in_history(self, turn: Turn) -> str:
        """The whole message of `turn` once the user has answered it, without its reasoning if the template drops it."""
        rendered = self.render([_USER, turn, _USER])
        num_ends = self._up_to_its_end(turn).count(self._end_of_turn)
        return rendered[len(self._base) : _end_of(rendered, self._end_of_turn, num_ends)]

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` in a form that this template can render (see the module)."""
        said = list(messages)
        if self._takes_one_system:
            said = _with_one_system(said)
        if self._takes_one_call or self._drops_words:
            said = _one_thing_a_turn(said, words_too=self._drops_words, calls_too=self._takes_one_call)
        return said

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """The template's own rendering of the whole conversation."""
        return self._text.render(to_chat(messages), tools, generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        """The tokens of rendered text with the parts of all speakers; nothing is prepended."""
        return exactly_encoded(self._tokenizer, text)

    def _marked(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._control is None else [self._control.message(message) for message in messages]

    def _encode_marked(self, text: str) -> list[int]:
        return self.encode(text) if self._control is None else self._control.encode(text)

    # --- what the template does -----------------------------------------------------------------------------

    def _encoded_opening(self, chat: str, tools: str, now: datetime.datetime | None) -> tuple[int, ...]:
        offered = json.loads(tools) if tools else None
        return tuple(self._encode_marked(self._text.render(json.loads(chat), offered, generation_prompt=True, now=now)))

    def _encoded_continuation(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return tuple(self._encode_marked(self.continuation_text(self._marked(messages))))

    def _render_heads(self, calls: tuple[tuple[str, str], ...]) -> tuple[str, str]:
        """The dummy conversation up to the end of its turn: right after the turn, and once the user has answered it."""
        turn = self._dummy_turn(calls)
        return self._up_to_its_end(turn), self._base + self.turn_in_history(turn)

    def _dummy_turn(self, calls: tuple[tuple[str, str], ...]) -> Turn:
        made = tuple(ToolCall(call_id, name, {}) for call_id, name in calls)
        return Turn(text="" if made else "a", calls=made, reasoning="a" if self.may_reason else "")

    def _up_to_its_end(self, turn: Turn) -> str:
        rendered = self.render([_USER, turn])
        return rendered[: self._end_of_last_turn(rendered)]

    def _end_of_last_turn(self, rendered: str) -> int:
        return rendered.rindex(self._end_of_turn) + len(self._end_of_turn)

    def _find_prompts(self) -> tuple[str, str]:
        """A user's message, and the same up to where the policy writes."""
        base, prompt = self.render([_USER]), self.render([_USER], generation_prompt=True)
        if not prompt.startswith(base):
            raise ConfigError(
                f"the chat template ends a conversation with {_tail(base)!r}, and with {_tail(prompt)!r} when the "
                f"policy is to continue. {WHAT_TO_DO}"
            )
        return base, prompt

    def _find_end_of_turn(self) -> tuple[int, str]:
        """The marker that the template puts right after an answer: its id and its text."""
        rendered = self.render([_USER, Turn(text=_MARK, reasoning=_MARK if self.opens_reasoning else "")])
        behind = rendered[rendered.rindex(_MARK) + len(_MARK) :] if _MARK in rendered else ""
        ids = self.encode(behind) if behind else []
        markers = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        if not ids or ids[0] not in markers:
            raise ConfigError(
                f"the chat template puts {behind!r} after an answer, which does not start with a special token of the "
                f"tokenizer; the policy could not end its turn. Use a template that ends turns with one."
            )
        return ids[0], exactly_decoded(self._tokenizer, ids[:1])

    def _other_ends(self) -> set[int]:
        added = self._tokenizer.added_tokens_decoder
        named = {number for number, token in added.items() if str(token) in _ALSO_END_A_TURN}
        return named if self._tokenizer.eos_token_id is None else {*named, self._tokenizer.eos_token_id}

    def _find_reasoning(self) -> Literal["ignored", "kept", "dropped"]:
        turn = Turn(text="a", reasoning=_MARK)
        if _MARK not in self.render([_USER, turn]):
            return "ignored"
        return "kept" if _MARK in self.render([_USER, turn, _USER]) else "dropped"

    def _renders(self, turn: Turn) -> bool:
        try:
            self.render([_USER, turn])
        except ConfigError:
            return False
        return True

    def _misreads_a_second_system(self) -> bool:
        """True when a second system message is an error, dropped, or rendered as the user's."""
        rules = Text("system", _OTHER_MARK)
        try:
            for tools in (None, PROBE_TOOLS):
                rendered = self.render([rules, Text("system", _MARK), _USER], tools)
                if _MARK not in rendered or rendered == self.render([rules, Text("user", _MARK), _USER], tools):
                    return True
        except ConfigError:
            return True
        return False


def _size(num_chars: int, ids: Sequence[int]) -> int:
    """Bytes, about, of a cached text and its tokens: Python's integers are 28 bytes behind a pointer."""
    return 4 * num_chars + 36 * len(ids)


def _with_one_system(messages: list[Message]) -> list[Message]:
    """The system messages at the beginning as one."""
    number = next((i for i, said in enumerate(messages) if getattr(said, "role", "") != "system"), len(messages))
    if number < 2:
        return messages
    return [Text("system", "\n\n".join(said.text for said in messages[:number] if said.text)), *messages[number:]]


def _one_thing_a_turn(messages: list[Message], *, words_too: bool, calls_too: bool) -> list[Message]:
    """Each turn's calls as turns of their own, each followed by its result, and its words before them."""
    parted: list[Message] = []
    place = 0
    while place < len(messages):
        said = messages[place]
        place += 1
        if not isinstance(said, Turn):
            parted.append(said)
            continue
        results: list[ToolResult] = []
        while place < len(messages) and isinstance(result := messages[place], ToolResult):
            results.append(result)
            place += 1
        for part in _parts(said, words_too, calls_too):
            ids = {call.id for call in part.calls}
            parted += [part, *(result for result in results if result.call_id in ids)]
            results = [result for result in results if result.call_id not in ids]
        parted += results
    return parted


def _parts(turn: Turn, words_too: bool, calls_too: bool) -> list[Turn]:
    apart = bool(turn.text and turn.calls) and words_too
    groups = [(call,) for call in turn.calls] if calls_too and turn.calls else [turn.calls]
    first = dataclasses.replace(turn, text="" if apart else turn.text, calls=groups[0])
    return [Turn(text=turn.text)] * apart + [first] + [Turn(calls=group) for group in groups[1:]]


def _end_of(text: str, marker: str, number: int) -> int:
    """Where the `number`-th `marker` in `text` ends."""
    position = 0
    for _ in range(number):
        position = text.index(marker, position) + len(marker)
    return position


def _tail(text: str) -> str:
    return text[-60:]
