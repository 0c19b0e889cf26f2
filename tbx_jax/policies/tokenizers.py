"""The tokenizer of the nano policy: every frequent word of its domains is one token, every digit is one token.

A policy of a million parameters copies names and numbers reliably only if they are the same tokens everywhere. So the
text is split the same way in every context (a capitalised word never includes the space before it, every digit is a
piece, the opening of a call `{"name": "find_patient", "arguments": {` is one piece), and the vocabulary has the most
frequent whole pieces, and the 256 bytes for anything else. Encoding is greedy longest match (WordPiece with an empty
continuation prefix), so it is lossless and no text is unknown.

>>> tokenizer = train_tokenizer(['Hi, Nora Quist here.'] * 3, vocabulary=300)
>>> tokenizer.convert_ids_to_tokens(tokenizer.encode('Nora 42'))
['Nora', 'Ġ', '4', '2']
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tbx_envs.errors import ConfigError
from tbx_envs.messages import DONE_MARK

END = "<|end|>"
PAD = "<|pad|>"
ROLE_MARKS = ("<|user|>", "<|tool|>", "<|assistant|>")
CALL_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_SPECIALS = (PAD, END, *ROLE_MARKS)
_UNKNOWN = "<|unk|>"  # required by the model class; every byte is in the vocabulary, so it is never produced

# In order of preference: the opening of a call, a key with the opening of its value, a capitalised word, a word with
# its space, a digit, punctuation with its space, any other character.
_PIECES = Regex(
    r'\{"name": "[a-z_]+", "arguments": \{'
    r'|[\[{]*"[a-z_]+": "?'
    r"|[A-Z][a-z]*"
    r"| ?[a-z][a-z_]*"
    r"|[0-9]"
    r'|[",.:;!?\]}]+ ?'
    r"|.|\n"
)

# Roles and turns only: a system message and tool schemas are not rendered, since a million parameters learn one
# domain's rules from demonstrations and cannot read them.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}<|user|>{{ message.content }}<|end|>"
    "{%- elif message.role == 'tool' -%}<|tool|>{{ message.content }}<|end|>"
    "{%- elif message.role == 'assistant' -%}<|assistant|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the bytes, the marks and the most frequent pieces of `texts`.

    Args:
        texts: texts that the policy will read and write, without marks of the template.
        vocabulary: number of tokens in all; fewer if `texts` have fewer pieces.

    Raises:
        ConfigError: no room for the bytes and the marks.
    """
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    marks = [*_SPECIALS, *CALL_MARKS, DONE_MARK]
    base = [_UNKNOWN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    room = vocabulary - len(base) - len(marks)
    if room < 0:
        raise ConfigError(
            f"vocabulary is {vocabulary} tokens; bytes and marks alone are {len(base) + len(marks)}. Raise vocabulary."
        )
    counts = _piece_counts(texts, pre_tokenizer, marks)
    known = set(base)
    frequent = [
        piece for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if piece not in known
    ]
    vocab = {piece: index for index, piece in enumerate([*base, *frequent[:room]])}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=vocab, unk_token=_UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=1_000_000
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in _SPECIALS])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (*CALL_MARKS, DONE_MARK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _piece_counts(
    texts: Iterable[str], pre_tokenizer: pre_tokenizers.PreTokenizer, marks: list[str]
) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        for mark in marks:
            text = text.replace(mark, "\n")
        counts.update(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text) if len(piece) > 1)
    return counts


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token that may be a part of a character, such as one of the three of "€"; None when unknown.

    Known are the bytes of byte-level vocabularies, which spell each byte as a character (GPT-2's alphabet), and of the
    `<0xE2>` tokens of SentencePiece.
    """
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return None
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    alphabet = _byte_of_character()
    return bytes(alphabet[character] for character in piece) if alphabet.keys() >= set(piece) else None


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
