"""SFT: demonstrations are laid out as rollouts are, and a tiny one goes from nothing to a folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_policy

from tbx_envs.chat.chatml import CHATML_COMPACT
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.domains import load_domain
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Turn, to_chat
from tbx_jax.commands.sft import FIRST_FRESH, demonstrated, demonstrations, run
from tbx_jax.config import MeshConfig, OptimConfig, SftConfig
from tbx_jax.policies.tokenizers import train_tokenizer
from tbx_jax.policies.weights import load_policy, save_policy

MODEL = tiny_policy.MODEL.model_copy(update={"width": 16, "head_width": 8, "mlp_width": 32, "max_length": 512})


@pytest.fixture(scope="module")
def episodes():
    return list(demonstrations(load_domain("clinic"), number=16, error_rate=0.5, seed=3))


@pytest.fixture(scope="module")
def tokenizer(episodes):
    return train_tokenizer((message.text for e in episodes for message in e.transcript), vocabulary=500)


def test_demonstrations_are_of_every_family_and_of_no_frozen_task(episodes):
    domain = load_domain("clinic")
    assert {episode.uid.split("/")[1] for episode in episodes} == set(domain.families)
    assert not {episode.uid for episode in episodes} & set(domain.uids())
    assert all(int(episode.uid.split("/")[2]) >= FIRST_FRESH for episode in episodes)


def test_the_same_seed_gives_the_same_demonstrations(episodes):
    again = demonstrations(load_domain("clinic"), number=16, error_rate=0.5, seed=3)
    assert [episode.transcript for episode in again] == [episode.transcript for episode in episodes]


def test_a_demonstration_is_the_template_of_its_whole_transcript_and_only_turns_are_trained(episodes, tokenizer):
    chat = ChatTemplate(tokenizer)
    for episode in episodes:
        trajectory = demonstrated(chat, episode)
        whole = tokenizer.apply_chat_template(to_chat(episode.transcript), tokenize=False)
        assert tokenizer.decode(trajectory.tokens_t) == whole
        trained = np.split(trajectory.tokens_t, np.flatnonzero(np.diff(trajectory.loss_mask_t)) + 1)[1::2]
        turns = [message for message in episode.transcript if isinstance(message, Turn)]
        assert [list(ids) for ids in trained] == [chat.policy_turn(turn) for turn in turns]


def sft_config(output_dir, **changes):
    return SftConfig(
        **{
            "model": MODEL,
            "optim": OptimConfig(
                learning_rate=0.02, b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=1.0, warmup_steps=0, schedule="cosine"
            ),
            "mesh": MeshConfig(axes={"fsdp": 1}, rules={}),
            "seed": 0,
            "policy": None,
            "compute_dtype": None,
            "chat_template": None,
            "domain": "clinic",
            "families": None,
            "demonstrations": 64,
            "error_rate": 0.3,
            "epochs": 3,
            "batch_tokens": 2048,
            "vocabulary": 500,
            "output_dir": str(output_dir),
            **changes,
        }
    )


def test_a_tiny_warm_start_learns_and_writes_a_policy_that_loads(tmp_path):
    config = sft_config(tmp_path)
    summary = run(config)
    assert json.loads((tmp_path / "sft.json").read_text()) == summary
    # A policy that knows nothing has ln(vocabulary) nats a token.
    assert summary["heldback_loss"] < 0.7 * np.log(summary["vocabulary"])
    model, _, tokenizer = load_policy(str(tmp_path / "policy"))
    assert model.vocabulary == len(tokenizer) == summary["vocabulary"]


def test_a_warm_start_goes_on_from_a_policy_with_its_tokenizer_and_another_template(tmp_path):
    model, params, tokenizer = tiny_policy.build_tiny()
    save_policy(tmp_path / "first", model, params, tokenizer)
    summary = run(
        sft_config(
            tmp_path / "second",
            policy=str(tmp_path / "first"),
            chat_template="compact",
            families=("cancel_visit",),
            demonstrations=16,
            epochs=2,
        )
    )
    after, _, kept = load_policy(str(tmp_path / "second" / "policy"))
    assert (after.config, len(kept), kept.chat_template) == (model.config, len(tokenizer), CHATML_COMPACT)
    assert summary["heldback_loss"] < 0.95 * np.log(len(kept))


def test_a_family_that_a_domain_has_not_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no family 'cancel_vist'\. Did you mean 'cancel_visit'"):
        run(sft_config(tmp_path, families=("cancel_vist",)))
