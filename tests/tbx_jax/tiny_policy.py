"""A policy that trains in milliseconds: one layer, bytes, roles and turns only. For tests."""

from tbx_envs.testing.byte_tokenizer import byte_tokenizer
from tbx_jax.config import (
    AlgoConfig,
    EnvironmentConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
    TrainConfig,
)
from tbx_jax.keys import key_for
from tbx_jax.models import build
from tbx_jax.policies.weights import save_policy

CHAT_TEMPLATE = (
    "{%- for message in messages if message.role != 'system' -%}<|im_start|>{{ message.role[0] }}"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|im_end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>a{%- endif -%}"
)
MODEL = ModelConfig(
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    head_width=16,
    mlp_width=64,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
    hybrid=None,
    token_shift=1,
    max_length=1024,
    dtype="float32",
)
ALGO = AlgoConfig(
    group_size=8,
    groups_per_update=4,
    groups_rolled=4,
    max_rounds=2,
    normalize_by_std=True,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    max_void_retries=1,
    micro_batch=16,
)
OPTIM = OptimConfig(
    learning_rate=2e-2, b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=1.0, warmup_steps=0, schedule="constant"
)
SAMPLING = SamplingConfig(
    temperature=1.0,
    top_k=None,
    top_p=1.0,
    max_turn_tokens=4,
    max_episode_tokens=40,
    slots=32,
    decode_steps=4,
    episodes=None,
    cache_dtype=None,
)
ONE_DEVICE = MeshConfig(axes={"fsdp": 1}, rules={})
# Letters of code points 97 to 104, four tasks of each.
PARITY_TASKS = tuple(f"parity/{letter}/{number}" for letter in "abcdefgh" for number in range(4))


def build_tiny():
    """Model, parameters and tokenizer; new parameters each time, the same numbers."""
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    return *build(MODEL, len(tokenizer), key_for(0, "parameters")), tokenizer


def save_tiny(folder):
    save_policy(folder, *build_tiny())
    return str(folder)


ENVIRONMENT = EnvironmentConfig(
    concurrency=1,
    tool_timeout_s=None,
    user_timeout_s=None,
    check_timeout_s=60.0,
    start="fork",
    clock=None,
    clock_runs=False,
)


def train_config(policy, output_dir, **changes):
    return TrainConfig(
        **{
            "algo": ALGO,
            "optim": OPTIM,
            "sampling": SAMPLING,
            "mesh": ONE_DEVICE,
            "judge": {"kind": "none", "style": "plain", "endpoint": None},
            "user": {"kind": "default", "can_end": True, "max_silent_share": 0.1, "endpoint": None},
            "environment": ENVIRONMENT,
            "seed": 0,
            "steps": 6,
            "policy": str(policy),
            "compute_dtype": None,
            "tasks": "train",
            "pool": None,
            "train_on_benchmark_and_mark_results": False,
            "checkpoint_every": 2,
            "output_dir": str(output_dir),
            **changes,
        }
    )
