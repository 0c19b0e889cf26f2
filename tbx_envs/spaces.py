"""AnyText: the space of every string.

`gymnasium.spaces.Text` requires an alphabet and a length; what an agent writes and what a tool answers has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space, Tuple
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
)

# What `sample` draws from: words, every kind of character that has broken a parser, and pieces of calls, so that a
# checker that steps random samples also covers calls, malformed calls and `<DONE>`.
_PIECES = (
    "", " ", "\n", "ok", "Please tell me your birth date.", "Anything else?", "é", "日本語", "🙂", "\u202e",
    "\x00", "\ud800", "{", "}", '"', "\\", "[]", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<DONE>", "<|im_end|>",
    '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
    '<tool_call>{"name": "nothing", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>["a", 1]</tool_call>', '{"name": "a"}', "Sure (done)",
)  # fmt: skip


class AnyText(Space[str]):
    """Every `str`, including the empty one and lone surrogates. Not hashable, since it owns a random generator."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A few pieces of text in a row; masks are not supported."""
        if mask is not None or probability is not None:
            raise ValueError("AnyText.sample got a mask or probabilities; it has neither, so call sample() bare.")
        count = int(self.np_random.integers(0, 6))
        return "".join(_PIECES[int(index)] for index in self.np_random.integers(0, len(_PIECES), size=count))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        return list(sample_n)

    def __repr__(self) -> str:
        return "AnyText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)


# Gymnasium's vector environments reach a space through these functions. Text has no array form: a batch is a tuple of
# strings, and its space is a Tuple of AnyText. `iterate` needs no entry: it handles such a tuple already.


@batch_space.register(AnyText)
def _batch_space(space: AnyText, n: int = 1) -> Tuple:
    seeds = space.np_random.integers(0, 2**31 - 1, size=n + 1)
    return Tuple([AnyText(int(seed)) for seed in seeds[:n]], seed=int(seeds[n]))


def _batch_differing_spaces(spaces: Sequence[AnyText]) -> Tuple:
    return _batch_space(spaces[0], len(spaces))


# Gymnasium dispatches this one on the type of the first space, and annotates the sequence.
batch_differing_spaces.register(AnyText, _batch_differing_spaces)


@create_empty_array.register(AnyText)
def _create_empty_array(space: AnyText, n: int = 1, fn: Any = None) -> tuple[str, ...]:
    return ("",) * n


@concatenate.register(AnyText)
def _concatenate(space: AnyText, items: Iterable[str], out: Any) -> tuple[str, ...]:
    return tuple(items)
