"""Text to tokens and back, whatever a tokenizer's own settings say: each of them would change what a policy reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exactly_encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of all of the text; nothing is prepended, and a control string is its token."""
    ids: list[int] = tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=False, truncation=False, padding=False
    )
    return ids


def exactly_decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens as it was written: with markers, and with every space where it was.

    Llama 3.1 asks its tokenizer to "clean up" spaces (`x != y` becomes `x!= y`); what is decoded here reaches tools.
    """
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
