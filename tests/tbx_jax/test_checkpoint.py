"""Checkpoints: bytes come back as they were, and changed configurations are refused."""

import errno
import shutil

import jax
import numpy as np
import pytest
from full_disks import files_limited_to
from tiny_policy import ALGO, ENVIRONMENT, ONE_DEVICE, OPTIM, build_tiny, train_config

from tbx_envs.errors import CheckpointError, ConfigError, StorageError
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


@pytest.fixture(scope="module")
def two(tmp_path_factory, trained):
    """A folder with checkpoints of steps 2 and 4, each with its own parameters."""
    learner, state = trained
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(fresh_state(learner), progress(2))
    checkpoints.save(state, progress(4))
    checkpoints.close()
    return folder


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "one bit is flipped": (flipped, "has other content than was saved"),
    "half is cut off": (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "other content"),
    "it is empty": (lambda path: path.write_bytes(b""), "is empty"),
    "it is gone": (lambda path: path.unlink(), "is missing"),
}


def files_of(folder, step):
    """The largest file of the state, the file of progress, and orbax's own description."""
    files = [path for path in (folder / str(step)).rglob("*") if path.is_file()]
    largest = max((path for path in files if "state" in path.parts), key=lambda path: path.stat().st_size)
    return {
        "state": largest,
        "progress": folder / str(step) / "progress" / "metadata",
        "orbax": folder / str(step) / "_CHECKPOINT_METADATA",
    }


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["state", "progress", "orbax"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_it_is_said(tmp_path, trained, two, part, damage):
    learner, state = trained
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    harm, words = DAMAGES[damage]
    harm(files_of(folder, 4)[part])
    checkpoints = Checkpoints(folder)
    assert checkpoints.read_progress() == progress(2) and checkpoints.latest_step == 2
    (remark,) = checkpoints.remarks
    assert "checkpoint of step 4 (" in remark and words in remark and "step 2 is taken instead" in remark
    if damage == "one bit is flipped" and part == "state":
        assert_same_bytes(checkpoints.restore(fresh_state(learner)), fresh_state(learner))
        assert sorted(path.name for path in (tmp_path / "checkpoints-damaged").iterdir()) == ["4"]
        checkpoints.save(state, progress(4))  # the run comes to this step again
        checkpoints.close()
        again = Checkpoints(folder)
        assert (again.latest_step, again.remarks) == (4, [])
        assert_same_bytes(again.restore(fresh_state(learner)), state)
        checkpoints = again
    checkpoints.close()


def test_when_no_checkpoint_is_whole_the_run_is_not_resumed_and_nothing_is_removed(tmp_path, two):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    flipped(files_of(folder, 4)["state"])
    (folder / "2" / "tbx_checksums.json").write_text("[]")
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints can be used: .* step 4 .* step 2 .*a JSON list"
    ):
        Checkpoints(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]


def test_a_checkpoint_of_an_older_version_is_taken_and_said_to_have_no_checksums(tmp_path, trained, two):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    (folder / "4" / "tbx_checksums.json").unlink()
    checkpoints = Checkpoints(folder)
    assert checkpoints.remarks == ["checkpoint of step 4 has no checksums and is taken as it is"]
    assert_same_bytes(checkpoints.restore(fresh_state(trained[0])), trained[1])
    checkpoints.close()


@pytest.mark.parametrize(
    "said", [OSError(errno.ENOSPC, "No space left on device"), ValueError("RESOURCE_EXHAUSTED")], ids=repr
)
def test_a_disk_that_fills_up_while_a_checkpoint_is_written_costs_that_one_only(
    tmp_path, two, trained, monkeypatch, said
):
    """What orbax raises on a disk that is really full; it leaves other tasks behind, which a test cannot."""
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    checkpoints = Checkpoints(folder)

    def half(step, args):
        (folder / f"{step}.orbax-checkpoint-tmp").mkdir()
        raise said

    with (
        monkeypatch.context() as patch,
        pytest.raises(StorageError, match=r"step 5 cannot be written: .*step 4 is as it was"),
    ):
        patch.setattr(checkpoints._manager, "save", half)
        checkpoints.save(trained[1], progress(5))
    with files_limited_to(1000), pytest.raises(StorageError, match="step 5 cannot be written"):
        monkeypatch.setattr(
            checkpoints._manager, "save", lambda step, args: shutil.copytree(two / "4", folder / str(step))
        )
        checkpoints.save(trained[1], progress(5))
    checkpoints.close()
    assert not (folder / "5").exists()
    again = Checkpoints(folder)
    assert (again.latest_step, again.remarks) == (4, [])
    again.close()


def plain(**changes):
    return train_config("p", "out", **changes).model_dump(mode="json")


def test_a_changed_configuration_is_refused_with_every_key_that_differs():
    other = plain(seed=1, algo=ALGO.model_copy(update={"clip_low": 0.1}))
    with pytest.raises(ConfigError, match=r"2 key\(s\)(.|\n)*algo.clip_low: was 0.2, now 0.1(.|\n)*seed: was 0, now 1"):
        refuse_changed_config(plain(), other)


def test_more_steps_another_folder_and_other_intervals_are_allowed():
    refuse_changed_config(plain(steps=6), plain(steps=9, checkpoint_every=5) | {"output_dir": "moved"})


def test_a_run_of_the_version_before_goes_on_with_the_defaults_of_keys_that_it_did_not_have():
    before = plain()
    del before["user"]["max_silent_share"], before["environment"]["user_timeout_s"]
    refuse_changed_config(before, plain())
    with pytest.raises(ConfigError, match="user_timeout_s: was None, now 5"):
        environment = ENVIRONMENT.model_copy(update={"user_timeout_s": 5.0})
        refuse_changed_config(before, plain(environment=environment))


def test_fewer_steps_are_refused():
    with pytest.raises(ConfigError, match="steps: was 6, now 5"):
        refuse_changed_config(plain(steps=6), plain(steps=5))


def test_more_steps_are_refused_where_the_learning_rate_depends_on_their_number():
    cosine = OPTIM.model_copy(update={"schedule": "cosine"})
    with pytest.raises(ConfigError, match="steps: was 6, now 9"):
        refuse_changed_config(plain(steps=6, optim=cosine), plain(steps=9, optim=cosine))
