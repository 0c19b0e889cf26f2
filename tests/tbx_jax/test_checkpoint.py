"""Checkpoints: bytes come back as they were, and changed configurations are refused."""

import jax
import numpy as np
import pytest
from tiny_policy import ALGO, ONE_DEVICE, OPTIM, build_tiny, train_config

from tbx_envs.errors import ConfigError
from tbx_jax.batching import build_batch
from tbx_jax.checkpoint import Checkpoints, Progress, refuse_changed_config
from tbx_jax.learner import build_learner
from tbx_jax.trajectory import Trajectory


@pytest.fixture(scope="module")
def trained():
    """A learner whose state has moments that are not zero."""
    model, params, _ = build_tiny()
    learner = build_learner(model, optim=OPTIM, mesh=ONE_DEVICE, num_steps=5, algo=ALGO)
    tokens_t = np.arange(8, dtype=np.int32)
    one = Trajectory("t", 0, 1.0, False, tokens_t, tokens_t > 3, np.zeros(8, np.float32))
    batch = build_batch([one], np.ones(1, np.float32), micro_batch=2, buckets=(8,))
    return learner, learner.sft_update(learner.init(params), batch)[0]


def progress(step):
    return Progress(step=step, position=step * 7, config={"a": {"b": 1}}, tasks="hash")


def fresh_state(learner):
    return learner.init(build_tiny()[1])


def assert_same_bytes(a, b):
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(leaves_a) == len(leaves_b)
    for one, other in zip(leaves_a, leaves_b, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert one.sharding == other.sharding


def test_state_and_progress_come_back_as_they_were_saved(tmp_path, trained):
    learner, state = trained
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, progress(3))
    checkpoints.close()

    again = Checkpoints(tmp_path)
    assert again.latest_step == 3
    assert again.read_progress() == progress(3)
    assert_same_bytes(again.restore(fresh_state(learner)), state)
    again.close()


def test_a_folder_without_checkpoints_has_no_progress(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.latest_step is None and checkpoints.read_progress() is None
    checkpoints.close()


def test_a_checkpoint_that_was_being_written_when_the_run_was_killed_does_not_count(tmp_path, trained):
    learner, state = trained
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, progress(2))
    checkpoints.save(state, progress(4))
    checkpoints.close()
    half = next(tmp_path.glob("4"))
    half.rename(tmp_path / "4.orbax-checkpoint-tmp-1")

    again = Checkpoints(tmp_path)
    assert again.latest_step == 2
    assert_same_bytes(again.restore(fresh_state(learner)), state)
    again.save(state, progress(4))
    assert again.latest_step == 4
    again.close()


def test_only_the_newest_two_are_kept(tmp_path, trained):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3, 4):
        checkpoints.save(trained[1], progress(step))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def plain(**changes):
    return train_config("p", "out", **changes).model_dump(mode="json")


def test_a_changed_configuration_is_refused_with_every_key_that_differs():
    other = plain(seed=1, algo=ALGO.model_copy(update={"clip_low": 0.1}))
    with pytest.raises(ConfigError, match=r"2 key\(s\)(.|\n)*algo.clip_low: was 0.2, now 0.1(.|\n)*seed: was 0, now 1"):
        refuse_changed_config(plain(), other)


def test_more_steps_another_folder_and_other_intervals_are_allowed():
    refuse_changed_config(plain(steps=6), plain(steps=9, checkpoint_every=5) | {"output_dir": "moved"})


def test_fewer_steps_are_refused():
    with pytest.raises(ConfigError, match="steps: was 6, now 5"):
        refuse_changed_config(plain(steps=6), plain(steps=5))


def test_more_steps_are_refused_where_the_learning_rate_depends_on_their_number():
    cosine = OPTIM.model_copy(update={"schedule": "cosine"})
    with pytest.raises(ConfigError, match="steps: was 6, now 9"):
        refuse_changed_config(plain(steps=6, optim=cosine), plain(steps=9, optim=cosine))
