"""`Judge`, the second argument of a test. It asks tbx, which has the model; no key is in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal


class JudgeException(Exception):
    """The judge did not answer. The grade is void even if the test catches this."""


class Judge:
    """Answers questions about texts with yes or no.

    Args:
        ask: (method name, arguments) -> answer.
        judge_type: `legacy` for one-word answers, `motivation` for answers with a reason.
    """

    def __init__(self, ask: Callable[..., Any], judge_type: Literal["legacy", "motivation"] = "legacy") -> None:
        self._ask = ask
        self.judge_type = judge_type
        self._decisions: list[dict[str, Any]] = []

    def text_yesno(self, text: str, question: str) -> bool:
        """The answer to a question about a text."""
        if self.judge_type == "motivation":
            return self.text_yesno_with_motivation(text, question)["answer"]
        return self._ask("text_yesno", _text(text), f"{question}")

    def text_yesno_with_motivation(self, text: str, question: str) -> dict[str, Any]:
        """`{"answer": bool, "motivation": str}`; kept as a decision."""
        answer = self._ask("text_yesno_with_motivation", f"{text}", f"{question}")
        self._decisions.append({"question": question, **answer})
        return answer

    def compare_yesno(self, first: str, second: str, question: str) -> bool:
        """The answer to a question about two texts."""
        return self._ask("compare_yesno", f"{first}", f"{second}", f"{question}")

    def yesno(self, question: str) -> bool:
        """The answer to a question that needs no text."""
        return self._ask("yesno", f"{question}")

    def no_repeat(self, first: str, second_list: list[str]) -> bool:
        """True when the first text repeats none of the others."""
        return self._ask("no_repeat", f"{first}", [f"{second}" for second in second_list])

    def evaluate_bool(self, system: str, user: str) -> bool:
        """The answer to a prompt of the test's own."""
        return self._ask("evaluate_bool", _text(system), _text(user))

    def drain_decisions(self) -> list[dict[str, Any]]:
        """The decisions with their motivations since the last time."""
        decisions, self._decisions = self._decisions, []
        return decisions


def safe_tag_encode(text: str) -> str:
    """The text without angle brackets, so that it cannot close the tag around it."""
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a judge reads text, not {value!r}")
    return value
