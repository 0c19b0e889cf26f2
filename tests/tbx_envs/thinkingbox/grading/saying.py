"""An endpoint that says what it is told to, and where the fixtures of these tests are."""

import pathlib

from tbx_envs.endpoints.costs import TokenUsage
from tbx_envs.endpoints.responses import Completion

FIXTURE_MODULES = pathlib.Path(__file__).parent / "fixture_modules"


def reply(text, finish_reason="stop"):
    return Completion(text, (), "", "reasoning_content", finish_reason, TokenUsage(prompt=10, completion=1))


class SayingEndpoint:
    """Stands in for a `ChatEndpoint`: says `texts` one after the other, the last one for ever.

    Attributes:
        asked: the messages of every request, and its options.
    """

    def __init__(self, *texts):
        self._texts = list(texts)
        self.asked = []

    def complete(self, messages, *, temperature, max_tokens):
        self.asked.append((messages, temperature, max_tokens))
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        if isinstance(text, Exception):
            raise text
        return text if isinstance(text, Completion) else reply(text)
