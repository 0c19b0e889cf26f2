"""A policy's folder: exact both ways, strict both ways."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from small_model import VOCABULARY, small_model
from tiny_policy import build_tiny

from tbx_envs.errors import CheckpointError
from tbx_jax.policies.weights import load_model, load_policy, model_tensors, policy_folder, save_policy


def from_elsewhere(folder):
    """The folder as if another program had written it: it has no checksums."""
    (folder / "tbx_checksums.json").unlink()
    return folder


def edit(folder, change):
    """The folder's tensors, changed by `change`."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


@pytest.fixture
def folder(tmp_path):
    save_policy(tmp_path / "policy", *build_tiny())
    return from_elsewhere(tmp_path / "policy")


def test_what_was_saved_is_loaded_bit_for_bit(folder):
    model, params, tokenizer = build_tiny()
    loaded_model, loaded, loaded_tokenizer = load_policy(folder)
    assert loaded_model == model and hash(loaded_model) == hash(model)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    text = "<|im_start|>a token, 42 é"
    assert loaded_tokenizer.encode(text) == tokenizer.encode(text)
    assert loaded_tokenizer.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_tensors_have_the_names_and_the_orientation_of_published_checkpoints(tie_embeddings):
    model, params = small_model(tie_embeddings=tie_embeddings)
    tensors = model_tensors(model, params)
    assert len(tensors) == 3 + 2 * 11 + (not tie_embeddings)
    query = np.asarray(params["layers"]["query"])
    out = np.asarray(params["layers"]["out"])
    for layer in range(2):
        stored = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        back = tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
        for head in range(4):
            for i in range(4):
                np.testing.assert_array_equal(stored[head * 4 + i], query[layer, :, head, i])
                np.testing.assert_array_equal(back[:, head * 4 + i], out[layer, head, i])
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], params["layers"]["down"][1].T)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embedding"])


def test_every_tensor_that_does_not_fit_is_in_one_message(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = np.zeros((3, 3), np.float32)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.copy()
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.int8)

    edit(folder, change)
    with pytest.raises(CheckpointError) as error:
        load_policy(folder)
    message = str(error.value)
    assert "up_proj.weight: file has float32 (32, 64), model wants (64, 32)" in message
    assert "q_norm.weight: file has int8 (16,), model wants (16,)" in message
    assert "2 of 14 tensors do not fit; 1 missing: model.norm.weight; 1 unused: lm_head.weight" in message


def test_an_unknown_policy_is_named_with_what_there_is(tmp_path):
    with pytest.raises(CheckpointError, match=r"policy 'nanoo': .* no such folder\. Did you mean 'nano'\?"):
        load_policy("nanoo")
    with pytest.raises(CheckpointError, match="there is a folder without one"):
        load_policy(tmp_path)


def test_the_shipped_policy_is_found_by_name():
    assert policy_folder("nano").name == "nano" and policy_folder("nano").parent.name == "policies"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_a_checkpoint_error(folder, name):
    (folder / name).write_bytes(b"\x00 not what it was")
    with pytest.raises(CheckpointError, match=r"cannot be read|is not JSON") as error:
        load_policy(folder)
    assert name in str(error.value)


def test_a_configuration_with_unknown_keys_or_of_another_kind_is_refused(folder):
    fields = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"depth": 3}, "depth: there is no"),
        ({"model_type": "lama"}, "Did you mean 'llama'"),
    ):
        (folder / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(folder):
    model, params = small_model()
    save_policy(folder, model, params, build_tiny()[2])
    with pytest.raises(CheckpointError, match=f"the model a vocabulary of {VOCABULARY}"):
        load_policy(folder)


def test_saving_replaces_a_policy_as_a_whole_and_leaves_nothing_beside_it(folder):
    save_policy(folder, *build_tiny())
    assert os.listdir(folder.parent) == ["policy"]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    names |= {"tbx_checksums.json"}
    assert set(os.listdir(folder)) == names


def test_saving_never_deletes_what_is_not_a_policy(folder):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"replacing the folder would delete notes\.txt"):
        save_policy(folder, *build_tiny())
    assert (folder / "notes.txt").read_text() == "mine"


def test_parameters_of_another_model_are_not_saved(tmp_path):
    model, params, tokenizer = build_tiny()
    with pytest.raises(CheckpointError, match=r"norm: given \(5,\), model wants \(32,\)"):
        save_policy(tmp_path / "policy", model, params | {"norm": np.zeros(5, np.float32)}, tokenizer)
    assert os.listdir(tmp_path) == []


def test_loading_says_nothing_about_libraries_that_it_does_not_want(folder):
    quiet = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    code = f"from tbx_jax.policies.weights import load_policy; load_policy({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
