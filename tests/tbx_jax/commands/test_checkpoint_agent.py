"""A policy model as an agent, on tasks of the clinic."""

import jax
import tiny_policy

from tbx_envs.agents import Attempt
from tbx_envs.domains import load_domain
from tbx_jax.commands import agents as agent
from tbx_jax.commands.agents import CheckpointAgent
from tbx_jax.config import MeshConfig
from tbx_jax.policies.weights import load_policy, save_policy
from tbx_jax.sampler.sampler import Sampler

SAMPLING = tiny_policy.SAMPLING.model_copy(update={"slots": 4, "max_turn_tokens": 8, "max_episode_tokens": 1000})


def test_a_policy_is_loaded_as_stored_into_its_place_and_computed_in_the_type_that_is_asked_for(tmp_path, monkeypatch):
    model, params, tokenizer = tiny_policy.build_tiny()
    save_policy(tmp_path / "narrow", model, params, tokenizer, dtype="bfloat16")
    mesh = MeshConfig(axes={"fsdp": 2}, rules={"b": "fsdp", "d": "fsdp"})
    samplers = []

    class Watched(Sampler):
        def __init__(self, model, *arguments, **options):
            super().__init__(model, *arguments, **options)
            samplers.append((model.config.dtype, options["params"], self.memory))

    monkeypatch.setattr(agent, "Sampler", Watched)
    for asked in (None, "float32"):
        CheckpointAgent(str(tmp_path / "narrow"), SAMPLING, mesh, seed=0, compute_dtype=asked)
    assert [dtype for dtype, _, _ in samplers] == [load_policy(tmp_path / "narrow")[0].config.dtype, "float32"]
    for _, stored, memory in samplers:
        leaves = jax.tree.leaves(stored)
        assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
        assert memory.parameters == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert len(stored["embedding"].sharding.device_set) == 2


def test_a_checkpoint_plays_every_attempt_and_the_same_each_time(tiny_folder):
    uids = load_domain("clinic").uids("train")[:3]
    attempts = [Attempt(uid, number, seed=number) for uid in uids for number in range(2)]

    def play():
        agent = CheckpointAgent(tiny_folder, SAMPLING, tiny_policy.ONE_DEVICE, seed=0)
        return {(episode.uid, episode.attempt): episode for episode in agent.run(attempts)}

    first, again = play(), play()
    assert set(first) == {(attempt.uid, attempt.index) for attempt in attempts}
    for key, episode in first.items():
        assert episode.fault is None and episode.passed is False
        assert episode.transcript == again[key].transcript
        assert episode.usage["sampled_tokens"] > 0
