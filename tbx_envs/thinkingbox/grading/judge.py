"""Judges: models that answer the yes/no questions that some checks of datasets ask about the agent's messages.

A missing answer never counts as "no": an unreadable answer raises `EndpointError` and voids the grade; an endpoint that
answers no request (a wrong key, address or model) raises `ConfigError` and ends the run. Judges keep no state between
questions, so one serves all threads. Checks reach them through `tbx_envs.thinkingbox.grading.test_code`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from tbx_envs.endpoints.costs import NOTHING_USED
from tbx_envs.endpoints.responses import Completion
from tbx_envs.errors import ConfigError, EndpointError, EndpointRefused

JudgeKind = Literal["plain", "motivation"]


@dataclasses.dataclass(frozen=True, slots=True)
class Opinion:
    """A judge's answer.

    Attributes:
        answer: True for yes.
        motivation: reason in a sentence or two; "" when the judge gives none.
    """

    answer: bool
    motivation: str = ""


class Judge(Protocol):
    """The questions that a test may ask. All methods are thread-safe and may raise `EndpointError`.

    Attributes:
        kind: `motivation` when every answer about a text comes with a reason.
    """

    kind: JudgeKind

    def text_yesno(self, text: str, question: str) -> bool:
        """The answer to a question about a text."""
        ...

    def text_yesno_with_motivation(self, text: str, question: str) -> Opinion:
        """The same with a reason."""
        ...

    def compare_yesno(self, first: str, second: str, question: str) -> bool:
        """The answer to a question about two texts."""
        ...

    def yesno(self, question: str) -> bool:
        """The answer to a question that needs no text."""
        ...

    def no_repeat(self, first: str, second_list: Sequence[str]) -> bool:
        """True when the first text repeats none of the others."""
        ...

    def evaluate_bool(self, system: str, user: str) -> bool:
        """The answer to a prompt of the test's own."""
        ...


class YesJudge:
    """Answers yes to everything, without a model, so that a test's questions about the agent's messages all pass.

    For agents that write no messages, such as `oracle`. A rubric's penalties are answered with yes as well.
    """

    kind: JudgeKind = "plain"

    def text_yesno(self, text: str, question: str) -> bool:
        return True

    def text_yesno_with_motivation(self, text: str, question: str) -> Opinion:
        return Opinion(True, "no model was asked")

    def compare_yesno(self, first: str, second: str, question: str) -> bool:
        return True

    def yesno(self, question: str) -> bool:
        return True

    def no_repeat(self, first: str, second_list: Sequence[str]) -> bool:
        return True

    def evaluate_bool(self, system: str, user: str) -> bool:
        return True


# --- a judge that is a model --------------------------------------------------------------------------------

_ONE_WORD = "Give your answer in one word, Yes or No."
_ONE_TEXT = (
    "You are a judge. You are shown a message between <message> and </message>, and after it a question about the "
    "message. "
)
_TEXT = _ONE_TEXT + _ONE_WORD
_TEXT_WITH_MOTIVATION = (
    _ONE_TEXT
    + """The message may be a conversation between a user and an assistant: go by what the assistant says in it, and not
by what the user says. Give your answer as a JSON object with two strings, and nothing else:
{"motivation": "why, in one or two sentences", "answer": "Yes or No"}"""
)
_TWO_TEXTS = (
    "You are a judge. You are shown two messages, one between <first> and </first>, the other between <second> and "
    "</second>, and after them a question about the two. " + _ONE_WORD
)
_NO_TEXT = "You are a judge. You are asked a question. " + _ONE_WORD
_REPEATS = "Does the first message say again what the second message says?"

_NUM_TOKENS = {"plain": 128, "motivation": 512}
_NUM_TRIES_TO_READ = 2  # a judge's answer has no effects, so the same question may be asked twice


class _Completes(Protocol):
    """The part of `tbx_envs.endpoints.client.ChatEndpoint` that a judge needs."""

    def complete(self, messages: list[dict[str, Any]], *, temperature: float, max_tokens: int) -> Completion: ...


class EndpointJudge:
    """A model behind an endpoint, asked at temperature 0.

    Args:
        endpoint: endpoint of the model, a `tbx_envs.endpoints.client.ChatEndpoint`.
        kind: `plain` asks for one word; `motivation` also asks for a reason when the question is about one text.

    Attributes:
        usage: tokens of all answers so far.
    """

    def __init__(self, endpoint: _Completes, kind: JudgeKind = "plain") -> None:
        self.kind: JudgeKind = kind
        self.usage = NOTHING_USED
        self._endpoint = endpoint

    def for_episode(self) -> EndpointJudge:
        """The same judge with its own token counts."""
        return EndpointJudge(self._endpoint, self.kind)

    def text_yesno(self, text: str, question: str) -> bool:
        if self.kind == "motivation":
            return self.text_yesno_with_motivation(text, question).answer
        return self.evaluate_bool(_TEXT, _about_text(text, question))

    def text_yesno_with_motivation(self, text: str, question: str) -> Opinion:
        problem = ""
        for _ in range(_NUM_TRIES_TO_READ):
            said, _ = self._completion(_TEXT_WITH_MOTIVATION, _about_text(text, question), "motivation")
            try:
                return opinion_of(said)
            except ValueError as error:
                problem = f"{error}: {_shortened(said)!r}"
        raise EndpointError(
            f"the judge was asked {_shortened(question)!r} and did not answer with the JSON object that it was told to "
            f"give, {_NUM_TRIES_TO_READ} times ({problem}). Ask another model, or a judge of kind plain."
        )

    def compare_yesno(self, first: str, second: str, question: str) -> bool:
        texts = f"<first>\n{escaped(first)}\n</first>\n<second>\n{escaped(second)}\n</second>\n"
        return self.evaluate_bool(_TWO_TEXTS, texts + question)

    def yesno(self, question: str) -> bool:
        return self.evaluate_bool(_NO_TEXT, question)

    def no_repeat(self, first: str, second_list: Sequence[str]) -> bool:
        return not any(self.compare_yesno(first, second, _REPEATS) for second in second_list)

    def evaluate_bool(self, system: str, user: str) -> bool:
        said, was_cut_off = self._completion(system, user, "plain")
        if was_cut_off and not _begins_with_answer(said):
            raise EndpointError(
                f"the judge's answer was cut off after {_NUM_TOKENS['plain']} tokens, before a yes or no: "
                f"{_shortened(said)!r}. Ask a model that answers in one word."
            )
        return is_yes(said)

    def _completion(self, system: str, user: str, kind: JudgeKind) -> tuple[str, bool]:
        """The model's text, and whether a token limit cut it off."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            completion = self._endpoint.complete(messages, temperature=0.0, max_tokens=_NUM_TOKENS[kind])
        except EndpointRefused as error:
            raise ConfigError(f"the judge: {error}") from error
        self.usage += completion.usage
        said = (completion.text or "").strip()
        if not said:
            raise EndpointError("the judge said nothing. Ask another model, or allow it more tokens.")
        return said, completion.finish_reason == "length"


def _about_text(text: str, question: str) -> str:
    return f"<message>\n{escaped(text)}\n</message>\n{question}"


def escaped(text: str) -> str:
    """The text without angle brackets, so that it cannot close the tag around it."""
    return text.replace("<", "&lt;").replace(">", "&gt;")


# --- reading answers ----------------------------------------------------------------------------------------

_SEPARATORS = str.maketrans(dict.fromkeys(".,;:\n", " "))


def _words(said: str) -> list[str]:
    return said.translate(_SEPARATORS).lower().split()


def is_yes(said: str) -> bool:
    """True when the first or the last word is yes; everything else is a no.

    >>> is_yes("Yes, it does."), is_yes("So the answer is: yes"), is_yes("Yesterday"), is_yes("No. Not yes, no")
    (True, True, False, False)
    """
    words = _words(said)
    return bool(words) and "yes" in (words[0], words[-1])


def _begins_with_answer(said: str) -> bool:
    return _words(said)[:1] in (["yes"], ["no"])


def opinion_of(said: str) -> Opinion:
    """The answer in a JSON object, which may be surrounded by other text and whose keys may lack their quotes.

    Raises:
        ValueError: there is no such object, or no answer in it.
    """
    begin, end = said.find("{"), said.rfind("}")
    if not 0 <= begin < end:
        raise ValueError("there is no object in it")
    answer = (record := _object(said[begin : end + 1])).get("answer")
    if isinstance(answer, bool):
        answer = "yes" if answer else "no"
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("its 'answer' is neither yes nor no")
    return Opinion(is_yes(answer), str(record.get("motivation") or ""))


_BARE_KEY = re.compile(r"""([{,]\s*)(?:'(answer|motivation)'|(answer|motivation))(\s*:)""")


def _object(text: str) -> dict[str, Any]:
    """The JSON object; quotes are added to its keys only when it cannot be parsed without them."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        return json.loads(_BARE_KEY.sub(r'\1"\2\3"\4', text), strict=False)  # JSONDecodeError is a ValueError


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
