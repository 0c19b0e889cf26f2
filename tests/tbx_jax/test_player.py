"""A policy model as a player, on tasks of the clinic."""

import tiny_policy

from tbx_envs.domains import load_domain
from tbx_envs.policies import Attempt
from tbx_jax.player import CheckpointPlayer

SAMPLING = tiny_policy.SAMPLING.model_copy(update={"slots": 4, "max_turn_tokens": 8, "max_episode_tokens": 1000})


def test_a_checkpoint_plays_every_attempt_and_the_same_each_time(tiny_folder):
    uids = load_domain("clinic").uids("train")[:3]
    attempts = [Attempt(uid, number, seed=number) for uid in uids for number in range(2)]

    def play():
        player = CheckpointPlayer(tiny_folder, SAMPLING, tiny_policy.ONE_DEVICE, seed=0)
        return {(episode.uid, episode.attempt): episode for episode in player.play(attempts)}

    first, again = play(), play()
    assert set(first) == {(attempt.uid, attempt.attempt) for attempt in attempts}
    for key, episode in first.items():
        assert episode.fault is None and episode.passed is False
        assert episode.transcript == again[key].transcript
        assert episode.usage["sampled_tokens"] > 0
