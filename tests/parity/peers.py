"""Tiny random models of every supported type, made and run by transformers."""

import copy

import torch
import transformers
from torch.overrides import TorchFunctionMode

VOCABULARY = 97
# Far enough from the initial values that no part is idle.
NOISE = 0.08
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def _dense(config_class, **changes):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    return config_class(**(_SIZES | rope | changes))


CONFIGS = {
    "llama": lambda: _dense(transformers.LlamaConfig, rms_norm_eps=1e-5),
    "llama 3.1": lambda: _dense(transformers.LlamaConfig, rope_parameters=_LLAMA3, head_dim=12),
    "smollm2": lambda: _dense(transformers.LlamaConfig, tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2": lambda: _dense(transformers.Qwen2Config),
    "qwen2.5 tied": lambda: _dense(transformers.Qwen2Config, tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3": lambda: _dense(transformers.Qwen3Config, head_dim=16),
    "qwen3 tied": lambda: _dense(transformers.Qwen3Config, head_dim=8, tie_word_embeddings=True),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**(_SIZES | _HYBRID)),
    "qwen3.5 of two periods": lambda: transformers.Qwen3_5TextConfig(
        **(_SIZES | _HYBRID | {"layer_types": ["linear_attention", "full_attention"] * 2})
    ),
    "qwen3.5 tied": lambda: transformers.Qwen3_5TextConfig(
        **(_SIZES | _HYBRID | {"tie_word_embeddings": True, "linear_num_value_heads": 2})
    ),
    "qwen3.5 with images": lambda: transformers.Qwen3_5Config(
        text_config=_SIZES | _HYBRID, vision_config=_VISION, tie_word_embeddings=False
    ),
}


def random_peer(name, folder):
    """A model of transformers with every parameter moved by noise, saved to `folder`."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    if isinstance(config, transformers.Qwen3_5Config):
        peer = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        peer = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += NOISE * torch.randn_like(parameter)
    peer = peer.float().eval()
    peer.generation_config.do_sample = False
    peer.save_pretrained(folder)
    return peer


class _Widened(TorchFunctionMode):
    """Computes in float64 what a model asks to be computed in float32: norms, softmax, positions, the delta rule."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def in_float64(peer):
    """The same model with everything in float64, as a function of the same arguments."""
    wide = copy.deepcopy(peer).double()

    def call(*args, **kwargs):
        with _Widened():
            return wide(*args, **kwargs)

    return call
