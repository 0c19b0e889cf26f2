"""Policies whose files are damaged, or were never what they claim: told before anything large is made of them."""

import json
import shutil

import pytest
from full_disks import files_limited_to
from tiny_policy import SAMPLING, build_tiny

from tbx_envs.commands.evaluate import policy_fingerprint
from tbx_envs.errors import CheckpointError, StorageError
from tbx_jax.policies.weights import load_model, load_policy, load_tokenizer, save_policy

NAMES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "policy"
    save_policy(folder, *build_tiny())
    return folder


@pytest.fixture
def policy(saved, tmp_path):
    """A folder that a run wrote."""
    return shutil.copytree(saved, tmp_path / "policy")


@pytest.fixture
def foreign(policy):
    """The same folder from elsewhere: without checksums."""
    (policy / "tbx_checksums.json").unlink()
    return policy


def flipped(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


DAMAGES = {
    "a bit is flipped": flipped,
    "half is cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
def test_a_policy_that_a_run_wrote_is_loaded_only_as_it_was_written(policy, name, damage):
    path = policy / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError) as error:
        load_policy(policy)
    if (name, damage) != ("config.json", "gone"):  # then the folder holds no policy at all
        assert f"not as it was saved: {name} " in str(error.value)
        assert "Restore the folder from a copy" in str(error.value) and "tbx_checksums.json" in str(error.value)


def test_a_change_on_purpose_is_loaded_once_the_checksums_are_gone(policy):
    (policy / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match=r"If it was changed on purpose, remove tbx_checksums\.json"):
        load_tokenizer(policy)
    (policy / "tbx_checksums.json").unlink()
    assert load_tokenizer(policy).chat_template == "{{ messages }}"


def test_checksums_that_are_damaged_themselves_are_told(policy):
    (policy / "tbx_checksums.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tbx_checksums\.json: checksums is a JSON list"):
        load_policy(policy)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"", "is empty"),
        ("config.json", b"[]", "is a JSON list, wanted an object"),
        ("config.json", b"\xff\xfe", "not UTF-8"),
        ("config.json", b"[" * 100_000, "nested too deeply"),
        ("config.json", b'{"model_type": "llama", "model_type": "qwen3"}', "'model_type' is there twice"),
        ("config.json", b'{"rms_norm_eps": NaN}', "NaN is no number"),
        ("config.json", b'{"rms_norm_eps": 1e999}', "1e999 is too large"),
        ("config.json", b'{"model_type": ["llama"]}', "model_type ['llama'] is not implemented"),
        ("tokenizer.json", b"[]", "is a JSON list, wanted an object"),
        ("tokenizer.json", b"{}", "the tokenizer cannot be read"),
        ("tokenizer.json", b'{"model": 7}', "the tokenizer cannot be read"),
        (
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
            "cannot be read",
        ),
        ("tokenizer_config.json", b"null", "is a JSON null, wanted an object"),
        ("tokenizer_config.json", b"\x80", "not UTF-8"),
        ("model.safetensors", b"", "cannot be read"),
        ("model.safetensors", b"\xff" * 64, "cannot be read"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_files_from_elsewhere_that_are_no_policy_are_told_by_name(foreign, name, content, said):
    (foreign / name).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        load_policy(foreign)
    assert said in str(error.value) and str(foreign) in str(error.value)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        (None, "its weight_map is None"),
        ([], r"its weight_map is \[\]"),
        ({}, "its weight_map is {}"),
        ({"a": "../model.safetensors"}, r"a is in '\.\./model\.safetensors', wanted the name of a \.safetensors file"),
        ({"a": "/etc/passwd"}, "a is in '/etc/passwd'"),
        ({"a": None}, "a is in None"),
        ({"a": ".."}, r"a is in '\.\.'"),
        ({"a": "tokenizer.json"}, "a is in 'tokenizer.json'"),
        ({"a": "other.safetensors"}, r"other\.safetensors: cannot be read: FileNotFoundError"),
    ],
    ids=str,
)
def test_an_index_names_files_beside_it_and_nothing_else(foreign, weight_map, said):
    (foreign / "model.safetensors").rename(foreign.parent / "model.safetensors")
    (foreign / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=said):
        load_model(foreign)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 10**9}, "the model has 1000000000 layers, the weights beside it have 1"),
        ({"width": 10**12}, "tensors do not fit"),
        ({"vocabulary": 10**15}, "tensors do not fit"),
        ({"num_layers": 10**30}, "layers"),
        ({"norm_eps": "NaN"}, "norm_eps"),
    ],
    ids=str,
)
def test_sizes_are_compared_with_the_weights_before_anything_is_made_of_them(foreign, changes, said):
    fields = json.loads((foreign / "config.json").read_text()) | changes
    (foreign / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as error:
        load_model(foreign)
    assert said in str(error.value)


def test_a_disk_that_fills_up_while_a_policy_is_saved_leaves_the_one_before(policy):
    before = {path.name: path.read_bytes() for path in policy.iterdir()}
    with (
        files_limited_to(5000),
        pytest.raises(StorageError, match=r"policy cannot be written: .*is as it was\. Make room"),
    ):
        save_policy(policy, *build_tiny())
    assert {path.name: path.read_bytes() for path in policy.iterdir()} == before
    assert [path.name for path in policy.parent.iterdir()] == ["policy"]


def test_a_policy_has_the_same_fingerprint_with_and_without_its_checksums(policy):
    whole = policy_fingerprint(str(policy), SAMPLING, 0.0)
    (policy / "tbx_checksums.json").unlink()
    assert policy_fingerprint(str(policy), SAMPLING, 0.0) == whole
    (policy / "chat_template.jinja").write_text("{{ messages }}")
    assert policy_fingerprint(str(policy), SAMPLING, 0.0) != whole
