"""Folders of published types: what is read, what is refused, what is written, and how much memory that takes."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from small_model import CONFIG, HYBRID, VOCABULARY, small_model

from tbx_envs.chat.chatml import CHATML_WITH_TOOLS
from tbx_envs.errors import CheckpointError, ConfigError
from tbx_envs.testing.byte_tokenizer import byte_tokenizer
from tbx_jax.config import MeshConfig, RopeScaling
from tbx_jax.mesh import build_mesh
from tbx_jax.models import abstract, compute_params, parameter_axes, token_logps
from tbx_jax.models.hub_config import read_config, write_config
from tbx_jax.models.hub_tensors import flat
from tbx_jax.policies.tensor_files import TensorFiles
from tbx_jax.policies.weights import export_policy, load_model, load_policy, load_tokenizer, model_tensors, save_policy

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)
TYPES = {
    "llama": {"qk_norm": False, "tie_embeddings": False, "rope_scaling": SCALING},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {},
    "qwen3_5_text": HYBRID,
}
ROPE_ALONE = {"rope_scaling": ..., "rope_theta": 1000.0}
every_type = pytest.mark.parametrize("name", TYPES)


def policy_of(name):
    tokenizer = byte_tokenizer("{{ messages }}")
    return *small_model(len(tokenizer), **({"token_shift": 0} | TYPES[name])), tokenizer


@pytest.fixture
def folder(tmp_path, request):
    save_policy(tmp_path / "policy", *policy_of(getattr(request, "param", "qwen3")))
    without_checksums(tmp_path / "policy")
    return tmp_path / "policy"


def without_checksums(folder):
    """Folders that are edited here stand for folders from elsewhere."""
    (folder / "tbx_checksums.json").unlink(missing_ok=True)


def edit_json(path, **changes):
    without_checksums(path.parent)
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def edit_tensors(folder, change):
    without_checksums(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@every_type
def test_what_was_saved_as_a_published_type_is_loaded_bit_for_bit(name, tmp_path):
    model, params, tokenizer = policy_of(name)
    save_policy(tmp_path / "policy", model, params, tokenizer)
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["model_type"] == name
    loaded_model, loaded = load_model(tmp_path / "policy")
    assert loaded_model == model
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@every_type
def test_parts_with_an_index_hold_the_same_tensors_as_one_file(name, tmp_path, monkeypatch):
    model, params, tokenizer = policy_of(name)
    monkeypatch.setattr("tbx_jax.policies.tensor_files.PART_BYTES", 1500)
    save_policy(tmp_path / "policy", model, params, tokenizer)
    files = sorted(path.name for path in (tmp_path / "policy").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "policy" / "model.safetensors.index.json").read_text())
    wanted = model_tensors(model, params)
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    for file in files:  # read by the format's own library
        for tensor, array in safetensors.numpy.load_file(tmp_path / "policy" / file).items():
            np.testing.assert_array_equal(array, wanted[tensor])
            assert index["weight_map"][tensor] == file
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "policy")[1], params)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tbx_jax.policies.tensor_files.PART_BYTES", 1500)
    save_policy(tmp_path / "policy", *policy_of("qwen3"))
    path = tmp_path / "policy" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit_json(path, weight_map=index["weight_map"] | {"model.more": index["weight_map"]["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"1 tensors are only in it or only in its files: model\.more"):
        load_model(tmp_path / "policy")
    (tmp_path / "policy" / index["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match="cannot be read: FileNotFoundError"):
        load_model(tmp_path / "policy")


@pytest.mark.parametrize(
    ("rules", "axes"),
    [
        ({"d": "fsdp"}, {"fsdp": 8}),
        ({"d": "fsdp", "n": "tensor", "k": "tensor", "f": "tensor"}, {"fsdp": 4, "tensor": 2}),
        ({"h": "fsdp", "l": "tensor"}, {"fsdp": 2, "tensor": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5_text"])
def test_tensors_go_straight_to_where_the_rules_put_them(name, rules, axes, tmp_path):
    model, params, tokenizer = policy_of(name)
    save_policy(tmp_path / "policy", model, params, tokenizer)
    mesh = build_mesh(MeshConfig(axes=axes, rules=rules))
    _, loaded = load_model(tmp_path / "policy", mesh=mesh, rules=rules)
    letters = flat(parameter_axes(model))
    for path, leaf in flat(loaded).items():
        np.testing.assert_array_equal(leaf, flat(params)[path])
        split = [rules[letter] for letter in letters[path].split() if letter in rules]
        wanted = leaf.size // int(np.prod([axes[axis] for axis in split]))
        assert {shard.data.size for shard in leaf.addressable_shards} == {wanted}


def test_sizes_that_the_mesh_does_not_divide_are_refused(folder):
    rules = {"v": "fsdp"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 4}, rules=rules))
    with pytest.raises(ConfigError, match="embedding: v is 262, mesh axis fsdp has 4 devices"):
        load_model(folder, mesh=mesh, rules=rules)


@pytest.mark.parametrize("folder", ["qwen3_5_text"], indirect=True)
def test_every_tensor_that_does_not_fit_is_in_one_message(folder):
    def change(tensors):
        del tensors["model.layers.5.self_attn.q_norm.weight"]
        tensors["model.layers.0.linear_attn.conv1d.weight"] = np.zeros((59, 4), np.float32)
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(3, np.float32)
        tensors["model.visual.blocks.0.attn.proj.weight"] = np.zeros(3, np.float32)  # is for the image encoder
        tensors["mtp.norm.weight"] = np.zeros(3, np.float32)  # drafts tokens

    edit_tensors(folder, change)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    message = str(error.value)
    assert "model.layers.0.linear_attn.conv1d.weight: file has float32 (59, 4), model wants (59, 1, 4)" in message
    assert "1 missing: model.layers.5.self_attn.q_norm.weight" in message
    assert "1 unused: model.layers.9.mlp.up_proj.weight" in message


def test_a_tied_model_may_hold_its_embedding_twice_but_not_another_matrix(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    model, params = load_model(folder)
    save_policy(folder.parent / "again", model, params, byte_tokenizer(""), like=folder)
    again = TensorFiles(folder.parent / "again")
    assert again["lm_head.weight"].tobytes() == again["model.embed_tokens.weight"].tobytes()
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"1 unused: lm_head\.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True, implemented is False only"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "implemented is full_attention only"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama", ROPE_ALONE | {"rope_parameters": {"rope_type": "yarn"}}, "type 'yarn' are not implemented"),
        ("llama", ROPE_ALONE | {"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "lack low_freq_factor"),
        ("llama", ROPE_ALONE | {"rope_parameters": {"beta_fast": 2}}, "unknown keys of rope_parameters: beta_fast"),
        ("llama", ROPE_ALONE | {"rope_parameters": ["yarn"]}, "rope_parameters is ['yarn'], wanted an object"),
        ("llama", {"layer_types": 7}, "layer_types has 7"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 2"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "hybrids only"),
        ("qwen3", {"rope_parameters": ..., "rope_theta": ...}, "rope_theta is missing"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("qwen3", {"head_dim": ..., "vocab_size": ...}, "head_dim is missing; vocab_size is missing"),
        ("qwen3", {"logit_scale": 2.0, "num_experts": 8}, "unknown keys: logit_scale, num_experts"),
        ("qwen3", {"num_hidden_layers": "many"}, "num_layers: Input should be a valid integer"),
        ("qwen3", {"dtype": "float16", "torch_dtype": "float16"}, "dtype: Input should be 'float32' or 'bfloat16'"),
        ("qwen3", {"model_type": "qwen3_moe"}, "a mixture of experts"),
        ("qwen3", {"model_type": "gemma3"}, "model_type 'gemma3' is not implemented"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 6}, "layer_types must repeat"),
        ("qwen3_5_text", {"full_attention_interval": 4}, "layer_types must repeat"),
        ("qwen3_5_text", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "only default"),
        ("qwen3_5_text", {"linear_num_value_heads": ...}, "linear_num_value_heads is missing"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_an_error_and_never_ignored(name, changes, message, tmp_path):
    model, params, tokenizer = policy_of(name)
    save_policy(tmp_path / "policy", model, params, tokenizer)
    edit_json(tmp_path / "policy" / "config.json", **changes)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path / "policy")
    assert message in str(error.value) and "config.json" in str(error.value)


@every_type
def test_a_configuration_is_written_as_it_is_read(name):
    model, _, _ = policy_of(name)
    fields = json.loads(json.dumps(write_config(model.config, VOCABULARY, "float32")))
    assert read_config(fields) == (model.config, VOCABULARY)


def test_a_policy_saved_like_its_origin_keeps_what_tbx_does_not_know(tmp_path):
    """A composite with an image encoder: its keys, its files and its tensors go along; the weights are the new ones."""
    model, params, tokenizer = policy_of("qwen3_5_text")
    origin = tmp_path / "origin"
    save_policy(origin, model, params, tokenizer, dtype="bfloat16")
    text = json.loads((origin / "config.json").read_text())
    fields = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3}, "image_token_id": 7}
    fields["tie_word_embeddings"] = text["tie_word_embeddings"]
    (origin / "config.json").write_text(json.dumps(fields))
    (origin / "generation_config.json").write_text('{"eos_token_id": [2, 3], "top_k": 20}')
    rng = np.random.default_rng(0)

    def change(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch.weight"] = rng.standard_normal((3, 2)).astype(ml_dtypes.bfloat16)
        tensors["mtp.fc.weight"] = rng.standard_normal((2, 3)).astype(np.float32)

    edit_tensors(origin, change)
    loaded_model, loaded = load_model(origin, dtype="float32")
    moved = jax.tree.map(lambda leaf: leaf + 1, loaded)
    save_policy(tmp_path / "new", loaded_model, moved, tokenizer, like=origin)
    before, after = TensorFiles(origin), TensorFiles(tmp_path / "new")
    assert set(before) == set(after)
    for name in ("model.visual.patch.weight", "mtp.fc.weight"):
        assert before[name].tobytes() == after[name].tobytes() and before[name].dtype == after[name].dtype
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["vision_config"] == {"depth": 3} and written["text_config"]["dtype"] == "float32"
    assert (tmp_path / "new" / "generation_config.json").read_text() == '{"eos_token_id": [2, 3], "top_k": 20}'
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "new")[1], moved)


def test_a_policy_is_not_saved_like_another_model(folder, tmp_path):
    model, params, tokenizer = policy_of("qwen2")
    with pytest.raises(CheckpointError, match="name the policy that the model came from, or none"):
        save_policy(tmp_path / "new", model, params, tokenizer, like=folder)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_an_export_is_exact_or_rounded_to_nearest_and_keeps_all_other_files(folder, dtype, tmp_path):
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    export_policy(folder, tmp_path / "out", dtype=dtype)
    before, after = TensorFiles(folder), TensorFiles(tmp_path / "out")
    assert set(before) == set(after)
    for name in before:
        wanted = before[name].astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else before[name]
        assert after[name].dtype == wanted.dtype and after[name].tobytes() == wanted.tobytes()
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == (dtype or "float32")
    for name in {path.name for path in folder.iterdir()} - {"config.json", "model.safetensors"}:
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    _, _, tokenizer = load_policy(tmp_path / "out")
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_an_export_with_another_chat_template_has_it_alone_whatever_file_had_the_first(folder, where, tmp_path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if where == "chat_template.jinja":
        (folder / where).write_text("{{ messages }}")
        (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    else:
        settings["chat_template"] = "{{ messages }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).chat_template == "{{ messages }}"
    export_policy(folder, tmp_path / "out", dtype=None, chat_template="tools")
    assert load_tokenizer(tmp_path / "out").chat_template == CHATML_WITH_TOOLS
    assert not any("{{ messages }}" in path.read_text("utf-8") for path in (tmp_path / "out").glob("*.j*"))


def test_a_policy_that_only_tbx_can_run_is_not_exported(tmp_path):
    with pytest.raises(CheckpointError, match="other programs cannot run it"):
        export_policy("nano", tmp_path / "out", dtype=None)


def test_parameters_in_the_compute_type_or_as_stored_give_the_same_numbers(tmp_path):
    model, params = small_model(**HYBRID, dtype="bfloat16")
    save_policy(tmp_path / "policy", model, params, byte_tokenizer(""), dtype="bfloat16")
    model, wide = load_model(tmp_path / "policy")
    _, stored = load_model(tmp_path / "policy", param_dtype=None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stored)} == {"bfloat16"}
    narrow = compute_params(model, wide)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow)} == {"bfloat16", "float32"}
    logps = jax.jit(token_logps, static_argnums=0)
    tokens = jnp.arange(8)[None] % VOCABULARY
    np.testing.assert_array_equal(logps(model, stored, tokens), logps(model, narrow, tokens))
    assert np.all(np.isfinite(logps(model, narrow, tokens)))


MEMORY_PROBE = """
import pathlib, sys, threading, time
import numpy as np
from tbx_jax.policies.weights import load_model

def resident():
    fields = dict(line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem")) * 1024

highest, running = [0], True
def watch():
    while running:
        highest[0] = max(highest[0], resident())
        time.sleep(0.001)

import jax
jax.block_until_ready(jax.device_put(np.zeros(8)))
before = resident()
thread = threading.Thread(target=watch)
thread.start()
model, params = load_model(sys.argv[1])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
running = False
thread.join()
print(size, largest, highest[0] - before)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_loading_holds_the_weights_once(tmp_path):
    """A model of 300 MB: at most one parameter more than the parameters themselves is in memory at any time."""
    sizes = {"num_layers": 18, "width": 512, "mlp_width": 2048, "num_heads": 8, "num_kv_heads": 8, "head_width": 64}
    model, shapes = abstract(CONFIG.model_copy(update={"token_shift": 0, **sizes}), VOCABULARY)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    save_policy(tmp_path / "large", model, params, byte_tokenizer(""), dtype="bfloat16")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, tmp_path / "large"], capture_output=True, text=True, check=True
    )
    size, largest, highest = map(int, done.stdout.split())
    assert size > 300e6
    assert highest < size + largest + 30e6
