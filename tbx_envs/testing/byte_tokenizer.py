"""A tokenizer that needs no download: one token per byte, the usual markers, a chat template of our own.

The ids are those of the markers (in the order of `MARKERS`), then those of the 256 bytes. It needs transformers and
tokenizers, which are imported when it is made.
"""

from __future__ import annotations

from typing import Any

MARKERS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")

# Every message is `<|im_start|>role`, a line break, its content, `<|im_end|>`, a line break. Tool schemas come first;
# reasoning is kept in all turns, so that each conversation extends the previous one.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ "\\n" }}{% endif -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Any:
    """A `transformers.PreTrainedTokenizerFast` over bytes, with `chat_template`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*MARKERS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(marker, special=marker.startswith("<|"), normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast
