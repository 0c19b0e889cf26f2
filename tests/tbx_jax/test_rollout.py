"""Rollouts with the real sampler and a toy environment."""

import threading
import types
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policy import PARITY_TASKS, SAMPLING, build_tiny

from tbx_envs.agents import Attempt
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.episode import FinishReason
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Turn
from tbx_envs.testing.parity_slots import ParitySlots
from tbx_jax import rollout as rollout_module
from tbx_jax.models import token_logps
from tbx_jax.rollout import Stopwatch, run_attempts
from tbx_jax.sampler.sampler import Sampler

ROOM = 96
# With 20 slots, 13 attempts are left for the second wave: the sampler's groups are then not full.
ATTEMPTS = tuple(Attempt(uid, attempt, seed=10 * attempt + 3) for uid in PARITY_TASKS[:11] for attempt in range(3))


class Recorder(Sampler):
    """A sampler that writes down, for each episode, all ids that went in and came out."""

    def __init__(self, *args):
        super().__init__(*args)
        self.heard, self.at = {}, {}

    def begin(self, slot, tokens, turn_key):
        self.at[slot] = turn_key[:2]
        self.heard[turn_key[:2]] = [(token, False, 0.0) for token in tokens]
        super().begin(slot, tokens, turn_key)

    def extend(self, slot, tokens, turn_key):
        self.heard[self.at[slot]] += [(token, False, 0.0) for token in tokens]
        super().extend(slot, tokens, turn_key)

    def advance(self, params):
        turns = super().advance(params)
        for turn in turns:
            written = zip(turn.tokens, turn.logps, strict=True)
            self.heard[self.at[turn.episode]] += [(token, True, logp) for token, logp in written]
        return turns


class Scene:
    """A tiny policy at a table of `slots` slots."""

    def __init__(self, slots=20, breaks=lambda uid, seed: False, max_turn_tokens=60, in_flight=None):
        self.model, self.params, tokenizer = build_tiny()
        self.chat = ChatTemplate(tokenizer)
        self.slots = ParitySlots(in_flight or slots, breaks)
        sampling = SAMPLING.model_copy(
            update={"slots": slots, "max_turn_tokens": max_turn_tokens, "max_episode_tokens": ROOM}
        )
        self.sampler = Recorder(self.model, self.chat.end_of_turn_ids, sampling, 0)

    def run(self, attempts=ATTEMPTS, room=ROOM, stopwatch=None):
        return run_attempts(
            self.sampler,
            self.params,
            self.slots,
            self.chat,
            attempts,
            max_episode_tokens=room,
            stopwatch=stopwatch,
        )


@pytest.fixture(scope="module")
def played():
    scene = Scene()
    return scene, list(scene.run())


def key(rollout):
    return (rollout.episode.uid, rollout.episode.attempt)


def test_every_attempt_gives_one_rollout(played):
    _, rollouts = played
    assert sorted(map(key, rollouts)) == sorted((attempt.uid, attempt.index) for attempt in ATTEMPTS)


def test_a_trajectory_is_what_went_in_and_came_out_of_the_sampler(played):
    scene, rollouts = played
    assert any(len([m for m in rollout.episode.transcript if isinstance(m, Turn)]) == 2 for rollout in rollouts)
    for rollout in rollouts:
        tokens, wrote, logps = zip(*scene.sampler.heard[key(rollout)], strict=True)
        assert rollout.trajectory.tokens_t.tolist() == list(tokens)
        assert rollout.trajectory.loss_mask_t.tolist() == list(wrote)
        np.testing.assert_array_equal(rollout.trajectory.logp_behavior_t, np.array(logps, np.float32))
        assert rollout.episode.usage["sampled_tokens"] == sum(wrote)
        assert rollout.episode.usage["given_tokens"] == len(wrote) - sum(wrote)


def test_the_learner_gives_sampled_tokens_the_probability_they_were_sampled_with(played):
    scene, rollouts = played
    made = [rollout.trajectory for rollout in rollouts]
    tokens_bt = jnp.array([np.pad(one.tokens_t, (0, ROOM - len(one))) for one in made])
    logp_bt = np.asarray(jax.jit(token_logps, static_argnums=0)(scene.model, scene.params, tokens_bt))
    for one, logp_t in zip(made, logp_bt, strict=True):
        assert np.abs(logp_t[: len(one)] - one.logp_behavior_t)[one.loss_mask_t].max() < 1e-5


def test_an_episode_does_not_depend_on_how_many_slots_there_are(played):
    _, rollouts = played
    other = {key(rollout): rollout for rollout in Scene(slots=3).run()}
    for rollout in rollouts:
        assert rollout.trajectory.tokens_t.tolist() == other[key(rollout)].trajectory.tokens_t.tolist()


def test_episodes_that_outnumber_the_samplers_slots_write_the_same_and_are_swapped_out(played):
    _, rollouts = played
    scene = Scene(slots=3, in_flight=8)
    swapped_out = []
    advance = scene.sampler.advance
    scene.sampler.advance = lambda params: swapped_out.append(scene.sampler.num_swapped_out) or advance(params)
    others = {key(rollout): rollout for rollout in scene.run()}
    assert max(swapped_out) > 0 and scene.sampler.num_swapped_out == 0
    for rollout in rollouts:
        other = others[key(rollout)].trajectory
        assert rollout.trajectory.tokens_t.tolist() == other.tokens_t.tolist()
        np.testing.assert_allclose(rollout.trajectory.logp_behavior_t, other.logp_behavior_t, atol=1e-5)


def test_a_turn_cut_off_by_a_limit_ends_its_episode_as_truncated():
    rollouts = list(Scene(max_turn_tokens=2).run(ATTEMPTS[:8]))
    assert len(rollouts) == 8
    assert all(rollout.episode.finish_reason is FinishReason.TRUNCATED for rollout in rollouts)
    assert all(rollout.trajectory.truncated for rollout in rollouts)
    assert all(rollout.trajectory.num_trained_tokens == 2 for rollout in rollouts)


def test_a_void_episode_has_no_trajectory_and_the_others_go_on():
    broken = {ATTEMPTS[1].uid}
    rollouts = list(Scene(breaks=lambda uid, seed: uid in broken).run())
    assert len(rollouts) == len(ATTEMPTS)
    for rollout in rollouts:
        is_void = rollout.episode.uid in broken
        assert (rollout.trajectory is None) is is_void
        assert (rollout.episode.reward is None) is is_void


def test_an_answer_without_room_for_another_token_ends_the_episode():
    # The prompt has 6 tokens, and a first turn of 8 leaves room for 2: the user's words alone have more.
    scene = Scene(max_turn_tokens=8)
    rollouts = list(scene.run(room=16))
    assert all(len(rollout.trajectory) <= 16 for rollout in rollouts)
    assert any(
        rollout.episode.finish_reason is FinishReason.TRUNCATED and rollout.trajectory.tokens_t[-1] == 1
        for rollout in list(scene.run([Attempt(PARITY_TASKS[0], n, n) for n in range(300)], room=16))
    )


def test_a_prompt_without_room_for_a_turn_is_refused():
    with pytest.raises(ConfigError, match=r"parity/a/0 has \d+ tokens.*max_episode_tokens"):
        list(Scene().run(room=4))


def test_stopping_early_leaves_the_slots_free_for_the_next_attempts(played):
    scene = Scene()
    rollouts = scene.run()
    next(rollouts)
    rollouts.close()
    again = {key(rollout): rollout.trajectory.tokens_t.tolist() for rollout in scene.run()}
    assert again == {key(rollout): rollout.trajectory.tokens_t.tolist() for rollout in played[1]}


def test_attempts_are_read_only_as_slots_become_free():
    read = []

    def attempts():
        for attempt in ATTEMPTS:
            read.append(attempt)
            yield attempt

    rollouts = Scene(slots=3).run(attempts())
    next(rollouts)
    assert len(read) == 3


def test_a_stopwatch_tells_policy_and_environment_apart():
    stopwatch = Stopwatch()
    list(Scene().run(ATTEMPTS[:2], stopwatch=stopwatch))
    assert set(stopwatch.seconds) == {"policy", "environment"}


class EagerWorker:
    """A thread that is always faster than the sampler."""

    def __init__(self, *_):
        pass

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self):
        pass


class LazyWorker(EagerWorker):
    """A thread that is always slower: it begins when its result is waited for."""

    def submit(self, function, *arguments):
        return types.SimpleNamespace(result=lambda: function(*arguments))


def test_neither_order_nor_tokens_depend_on_how_fast_the_environments_are(played, monkeypatch):
    _, rollouts = played
    for worker in (EagerWorker, LazyWorker):
        monkeypatch.setattr(rollout_module, "ThreadPoolExecutor", worker)
        others = list(Scene().run())
        assert list(map(key, others)) == list(map(key, rollouts))
        for one, other in zip(rollouts, others, strict=True):
            np.testing.assert_array_equal(one.trajectory.tokens_t, other.trajectory.tokens_t)


def test_environments_step_in_one_thread_that_is_not_the_samplers_and_ends_with_the_run():
    scene = Scene()
    threads = set()
    advance = scene.slots.advance
    scene.slots.advance = lambda actions: threads.add(threading.current_thread()) or advance(actions)
    list(scene.run())
    (worker,) = threads
    assert worker is not threading.main_thread()
    assert not worker.is_alive()
