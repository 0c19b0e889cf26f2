"""An endpoint that says what it is told to, and where the fixtures of these tests are."""

import pathlib

FIXTURE_MODULES = pathlib.Path(__file__).parent / "fixture_modules"


class Said:
    """As much of a `Completion` as judges read."""

    def __init__(self, text, finish_reason="stop"):
        self.text, self.finish_reason = text, finish_reason


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
        return text if isinstance(text, Said) else Said(text)
