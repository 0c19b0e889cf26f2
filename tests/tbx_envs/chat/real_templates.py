"""Chat templates of real models, out of the `trl` wheel, with a tokenizer of bytes that knows their markers.

The wheel is installed without its dependencies (`pip install --no-deps trl`) and never imported: only its files are
read.
"""

import functools
import importlib.util
from pathlib import Path

import pytest

from tbx_envs.chat.template import ChatTemplate
from tbx_envs.testing.byte_tokenizer import byte_tokenizer

# name -> (format, what happens to earlier reasoning, whether the prompt opens reasoning)
SUPPORTED = {
    "llama3_1": ("llama3_json", "ignored", False),
    "llama3_2": ("llama3_json", "ignored", False),
    "qwen2_5": ("hermes", "ignored", False),
    "qwen3": ("hermes", "dropped", False),
    "qwen3_instruct_2507": ("hermes", "ignored", False),
    "qwen3_vl": ("hermes", "ignored", False),
    "qwen3_5_think": ("qwen3_coder", "dropped", True),
    "qwen3_5_nothink": ("qwen3_coder", "dropped", False),
    "qwen3_6": ("qwen3_coder", "dropped", True),
    "qwen3_8": ("qwen3_coder", "kept", True),
}
# Templates for training that the wheel has beside them: they keep all reasoning, whatever the original does.
KEEPING = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")

_LLAMA = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"],
}


def template_source(name):
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the templates of real models are not installed: pip install --no-deps trl")
    path = Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"the installed trl has no template {name}")
    return path.read_text(encoding="utf-8")


@functools.cache
def real_tokenizer(name):
    tokenizer = byte_tokenizer(template_source(name))
    if name.startswith("llama"):
        tokenizer.add_special_tokens(_LLAMA)
    return tokenizer


@functools.cache
def real_template(name):
    return ChatTemplate(real_tokenizer(name))


@functools.cache
def faithful_template(name):
    """With the tokens that a server makes of the rendered text, control strings in given text included."""
    return ChatTemplate(real_tokenizer(name), splits_control_text=False)
